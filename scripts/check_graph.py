#!/usr/bin/env python
"""Check the graph engine without devices.

    python scripts/check_graph.py [--json [PATH]] [--quick] [--only TEXT]

Executed on CPU: steps of the graph engine against the eager engine. Compiled by MindSpore's front end for a
rank of an Ascend cluster, not executed: every layout below, and the four presets with their meshes' axes,
scaled down in depth and width, on the first and the last rank. What is looked at: whether it compiles, uses
no deprecated API, sends on every axis the bytes that the planner predicts, and holds the bytes of weights,
summed gradients and moments that ZeRO's formulas give (tests/graph look at operations, groups and places).
Kernels, memory, numbers and speed on an NPU are no part of it. --quick: fewer layouts, no presets.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ms_zero.config import load_config
from ms_zero.errors import UserError
from ms_zero.graph.frontend import Case, FrontEndError, FrontEndUnavailable, compile_case
from ms_zero.graph.report import axis_bytes, held_bytes
from ms_zero.mesh import AXES, Mesh
from ms_zero.plan import compiled as plan
from ms_zero.plan.run import placed_layout
from ms_zero.plan.shapes import from_config

TOLERANCE = 0.02
TIMEOUT_S = 3600.0
# Axes whose single numbers the planner leaves out; no more than this many bytes of them.
_LEFT_OUT = {"other": 1000.0}
_LLAMA = "configs/runs/llama-tiny.yaml"
_GPT = "configs/runs/quickstart.yaml"
_MIXTURE = (
    "model.num_experts=8", "model.experts_per_token=2", "model.expert_ffn_hidden_size=32", "parallel.ep=1",
)  # fmt: skip
_SMALL = (
    "engine=graph", "model.hidden_size=64", "model.num_heads=4", "model.ffn_hidden_size=128",
    "model.vocab_size=512", "model.max_seq_len=64", "data.seq_len=32", "train.micro_batch_size=1",
)  # fmt: skip
_TINY = (
    *_SMALL, "train.output_dir=/tmp/unused", "hardware.target=Ascend", "precision.policy=bf16",
    "data.source=stdlib", "train.global_batch_size=auto", "train.eval_interval=0",
    "parallel.zero_stage=0",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """One thing to compile.

    Attributes:
        name: for people.
        run: run file or preset.
        overrides: of it.
        size: ranks.
        rank: whose graph.
    """

    name: str
    run: str
    overrides: tuple[str, ...]
    size: int
    rank: int = 0


def small(
    name: str, size: int, *changes: str, rank: int = 0, layers: int = 1, k: int = 1, family: str = "llama"
) -> Layout:
    """A tiny model; ``changes``: keys of section parallel, or whole overrides; ``k``: microbatches."""
    overrides = [*_TINY, f"model.num_layers={layers}", f"train.accumulation_steps={k}"]
    overrides += ["model.num_kv_heads=2"] if family in ("llama", "mixtral") else []
    overrides += _MIXTURE if family in ("mixtral", "deepseek") else []
    overrides += [key if "." in key.split("=")[0] else f"parallel.{key}" for key in changes]
    if family == "mixtral":
        overrides.remove("model.ffn_hidden_size=128")  # without effect
    last = dict(key.split("=") for key in overrides)  # later ones replace earlier ones
    run = {"llama": _LLAMA, "gpt": _GPT}.get(family, f"configs/runs/{family}-tiny.yaml")
    return Layout(name, run, tuple(f"{key}={value}" for key, value in last.items()), size, rank)


def layouts(quick: bool) -> Iterator[Layout]:
    """All cases."""
    yield small("dp", 4)
    yield small("hsdp level 2, 3 microbatches", 4, "zero_stage=2", k=3)
    yield small("tp", 4, "tp=2")
    if quick:
        return
    yield from data_parallel()
    yield from within_a_stage()
    yield from recomputed()
    yield from experts()
    yield from pipelines()
    yield from presets()


def data_parallel() -> Iterator[Layout]:
    """Levels of hsdp, with and without microbatches and replicas."""
    for level, k in ((0, 3), (1, 1), (1, 3), (2, 1), (3, 1), (3, 3)):
        yield small(f"hsdp level {level}, {k} microbatches", 4, f"zero_stage={level}", k=k)
    for level in (1, 2, 3):
        replicas = (f"zero_stage={level}", "dp_replicate=2", "dp_shard=2")
        yield small(f"hsdp level {level}, replicas, 2 microbatches", 4, *replicas, k=2)
    again = ("zero_stage=3", "dp_replicate=2", "dp_shard=2", "memory.recompute=full")
    yield small("hsdp level 3, gpt, replicas, recompute full", 4, *again, family="gpt")
    odd = ("zero_stage=2", "model.vocab_size=510", "model.tie_embeddings=true")
    yield small("hsdp level 2, gpt, rows that do not divide", 4, *odd, k=2, family="gpt")


def within_a_stage() -> Iterator[Layout]:
    """Tensor, sequence and context parallelism."""
    sequence = ("tp=2", "sequence_parallel=true")
    yield small("tp + sp", 4, *sequence)
    yield small("tp + sp, hsdp level 2, 2 microbatches", 4, *sequence, "zero_stage=2", k=2)
    yield small("tp + sp, hsdp level 3, 2 microbatches", 4, *sequence, "zero_stage=3", k=2)
    replicas = ("zero_stage=2", "dp_replicate=2", "dp_shard=2")
    yield small("tp, hsdp level 2, replicas", 8, "tp=2", *replicas)
    level_3 = (*sequence, "zero_stage=3", *replicas[1:])
    for k in (1, 2):
        yield small(f"tp + sp, hsdp level 3, replicas, {k} microbatches", 8, *level_3, k=k, family="gpt")
    for name, extra in (("tp", ("tp=2",)), ("tp + sp", sequence)):
        yield small(f"{name}, gpt", 4, *extra, family="gpt")
        yield small(f"{name}, gpt, odd vocabulary", 4, *extra, "model.vocab_size=511", family="gpt")
    for kind in ("ring", "ulysses"):
        context = ("cp=2", f"context={kind}")
        yield small(f"cp {kind}", 4, *context)
        yield small(f"cp {kind}, hsdp level 2, 2 microbatches", 4, *context, "zero_stage=2", k=2)
    heads = ("model.num_kv_heads=4",)
    yield small("cp ring x tp + sp", 8, "cp=2", *sequence, *heads, rank=7)
    yield small("cp ulysses x tp + sp", 8, "cp=2", "context=ulysses", *sequence, *heads, rank=7)


def recomputed() -> Iterator[Layout]:
    """What recompute communicates again."""
    full, selective = "memory.recompute=full", "memory.recompute=selective"
    sequence = ("tp=2", "sequence_parallel=true")
    yield small("recompute full", 4, full)
    yield small("recompute selective", 4, selective)
    yield small("activations on the host", 4, "memory.activations=host")
    offload = ("offload.optimizer=cpu", "optim.kind=adamw", "zero_stage=1")
    yield small("optimizer state on the host", 4, *offload)
    yield small("recompute full, tp", 4, full, "tp=2", layers=2)
    yield small("recompute full, tp + sp", 4, full, *sequence, layers=2)
    yield small("recompute selective, tp + sp", 4, selective, *sequence)
    yield small("recompute full, hsdp level 3, 2 microbatches", 4, full, "zero_stage=3", k=2)
    for kind in ("ring", "ulysses"):
        for name, value in (("full", full), ("selective", selective)):
            yield small(f"recompute {name}, cp {kind}", 4, value, "cp=2", f"context={kind}")


def experts() -> Iterator[Layout]:
    """Expert parallelism, alone and with other axes; Mixtral's experts and DeepSeek's."""
    even, sequence = "model.capacity_factor=1.0", ("tp=2", "sequence_parallel=true")
    yield small("ep 2 of 4", 4, "ep=2", even, family="mixtral")
    yield small("ep 4, every token", 4, "ep=4", family="mixtral")
    yield small("ep 4, recompute full", 4, "ep=4", "memory.recompute=full", even, family="mixtral")
    for level in (1, 2, 3):
        keys = ("ep=2", f"zero_stage={level}", even)
        yield small(f"ep 2, hsdp level {level}, 2 microbatches", 4, *keys, k=2, family="mixtral")
    yield small("ep x tp", 4, "ep=2", "tp=2", even, rank=3, family="mixtral")
    keys = ("ep=2", *sequence, "zero_stage=2", even)
    yield small("ep x tp + sp, hsdp level 2", 8, *keys, rank=7, family="mixtral")
    latent = ("ep=2", "model.router_bias=false", "model.shared_ffn_hidden_size=64")
    yield small("ep 2, latent attention, shared experts", 4, *latent, layers=2, family="deepseek")


def pipelines() -> Iterator[Layout]:
    """Schedules, ends and middles, and three axes at once."""
    for schedule, virtual in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)):
        keys = (f"schedule={schedule}", *((f"virtual_stages={virtual}",) if virtual > 1 else ()))
        for stages, rank in ((2, 0), (4, 1), (4, 3)):
            name = f"pp {stages} {schedule} rank {rank}"
            yield small(name, stages, f"pp={stages}", *keys, rank=rank, layers=stages * virtual, k=4)
    for schedule, chunks, k in (("zb-v", 2, 8), ("seqpipe", 1, 4)):
        for stages, rank in ((2, 0), (4, 1), (4, 3)):
            name, keys = f"pp {stages} {schedule} rank {rank}", (f"pp={stages}", f"schedule={schedule}")
            yield small(name, stages, *keys, rank=rank, layers=stages * chunks, k=k)
    for level in (0, 1, 2, 3):
        for rank in (0, 3):
            keys = ("pp=2", f"zero_stage={level}", "model.tie_embeddings=true")
            yield small(f"pp 2, tied, level {level}, rank {rank}", 4, *keys, rank=rank, layers=2, k=2)
    grid = ("pp=2", "tp=2", "sequence_parallel=true")
    for level in (0, 1, 2, 3):
        for rank in (0, 7):
            keys = (*grid, f"zero_stage={level}")
            yield small(f"pp x dp x tp, level {level}, rank {rank}", 8, *keys, rank=rank, layers=2, k=2)


def presets() -> Iterator[Layout]:
    """The four runs of the founding table, small, on the axes of their meshes."""
    llama = ("model.num_kv_heads=2", "model.head_dim=16")
    cases = (
        ("gpt3-1.5b", 8, (2, 16, 8)),
        ("gpt3-13b", 8, (2, 8, 4)),
        ("gpt3-175b", 16, (8, 16, 2)),
        ("llama-70b", 16, (4, 16, 4), *llama),
    )
    for name, size, (layers, batch, shards), *more in cases:
        overrides = (*_SMALL, *more, f"model.num_layers={layers}", f"train.global_batch_size={batch}")
        overrides += (f"parallel.dp_shard={shards}",)
        for rank in (0, size - 1):
            yield Layout(f"preset {name} rank {rank}", f"configs/runs/{name}.yaml", overrides, size, rank)


@dataclass(frozen=True)
class Found:
    """What a case shows: the largest relative differences to the planner, and what is wrong."""

    traffic: float = 0.0
    state: float = 0.0
    wrong: tuple[str, ...] = ()


def check(case: Layout) -> Found:
    """Compile one case and hold it against the planner."""
    arguments = {"run": case.run, "overrides": list(case.overrides), "workers": case.size}
    job = Case("ms_zero.graph.inspected:build_run", arguments, rank=case.rank, size=case.size)
    compiled = compile_case(job, timeout_s=TIMEOUT_S)
    config = load_config(case.run, list(case.overrides), case.size, to_run=False).config
    wrong = [f"deprecated: {line}" for line in compiled.deprecations()]
    mesh = Mesh(**{axis: getattr(config.parallel, axis) for axis in (*AXES, "ep")})
    model = from_config(config.model), placed_layout(config), mesh.coords(case.rank)["pp"]
    sent = axis_bytes(compiled.graph, mesh, case.rank)
    held = held_bytes(compiled.graph, compiled.notes["parameters"])
    traffic = compare("sends", sent, plan.stage_bytes(*model), wrong)
    state = compare("holds", held, plan.held_bytes(*model), wrong)
    return Found(traffic, state, tuple(wrong))


def compare(verb: str, found: Mapping[str, float], planned: Mapping[str, float], wrong: list[str]) -> float:
    """The largest relative difference; adds to ``wrong`` what is too far off."""
    worst = 0.0
    for name in sorted(found.keys() | planned.keys()):
        here, there = found.get(name, 0.0), planned.get(name, 0.0)
        if abs(here - there) <= _LEFT_OUT.get(name, 0.0):
            continue
        difference = abs(here - there) / max(here, there)
        worst = max(worst, difference)
        if difference > TOLERANCE:
            wrong.append(f"{verb} {name}: {here:.0f} bytes, the planner says {there:.0f}")
    return worst


def executed_difference(steps: int = 3) -> float:
    """Largest relative difference of the loss between the engines, over some steps on CPU."""
    from ms_zero import _compat, comm
    from ms_zero.data.run import load_data
    from ms_zero.runner import build_trainer

    _compat.launch_blocking()
    worst = 0.0
    for run in (_GPT, _LLAMA, *(f"configs/runs/{name}-tiny.yaml" for name in ("mixtral", "deepseek"))):
        losses = {}
        for engine in ("eager", "graph"):
            overrides = [f"engine={engine}", "model.num_layers=2", "model.hidden_size=64", "data.seq_len=32",
                         "train.global_batch_size=8", "parallel.zero_stage=0", "train.eval_interval=0",
                         f"train.steps={steps}", "optim.warmup_steps=1"]  # fmt: skip
            config = load_config(run, overrides, 1).config
            trainer = build_trainer(config, load_data(config), comm.local("CPU"))
            losses[engine] = [trainer.step().loss for _ in range(steps)]
        pairs = zip(losses["eager"], losses["graph"], strict=True)
        worst = max(worst, *(abs(graph - eager) / eager for eager, graph in pairs))
    return worst


def main() -> int:
    """Run every case; returns 0 when none failed."""
    from _figures import add_json_option, write_figures

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_json_option(parser)
    parser.add_argument("--quick", action="store_true", help="a few layouts only")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases with this in their name")
    arguments = parser.parse_args()
    figures = {"cases": 0, "failures": 0, "skipped": 0}
    traffic = state = 0.0
    for case in layouts(arguments.quick):
        if arguments.only not in case.name:
            continue
        figures["cases"] += 1
        try:
            found = check(case)
        except FrontEndUnavailable as reason:
            figures["skipped"] += 1
            print(f"skipped {case.name}: {reason}")
            continue
        except (FrontEndError, UserError) as error:
            found = Found(wrong=(str(error)[-800:],))
        traffic, state = max(traffic, found.traffic), max(state, found.state)
        figures["failures"] += bool(found.wrong)
        status = "FAILED" if found.wrong else "ok"
        print("\n       ".join([f"{status:6s} {case.name}", *found.wrong]), flush=True)
    if not figures["cases"]:
        parser.error(f"no case has {arguments.only!r} in its name")
    if not arguments.only:
        figures["eager_vs_graph_max_rel_loss"] = executed_difference()
    figures |= {"traffic_vs_planner_max_rel": traffic, "state_vs_planner_max_rel": state}
    lines = [f"{key}: {value}" for key, value in figures.items()]
    print("\n".join(lines))
    write_figures(figures, arguments.json)
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
