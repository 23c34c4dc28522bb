#!/usr/bin/env python
"""Check the graph engine without devices.

    python scripts/check_graph.py [--json] [--quick]

Executed on CPU: steps of the graph engine against the eager engine. Compiled by MindSpore's front end for a
rank of an Ascend cluster, not executed: every layout below, and the four presets with their meshes' axes,
scaled down in depth and width, on the first and the last rank. What is looked at: whether it compiles, uses
no deprecated API, and sends the bytes that the planner predicts (tests/graph look at operations, groups and
places). Kernels, memory, numbers and speed on an NPU are no part of it. --quick: fewer layouts, no presets.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ms_zero.config import load_config
from ms_zero.errors import UserError
from ms_zero.graph.frontend import Case, FrontEndError, FrontEndUnavailable, compile_case
from ms_zero.graph.report import axis_bytes, gathered_parameters
from ms_zero.mesh import AXES, Mesh
from ms_zero.plan.layout import Precision
from ms_zero.plan.run import layout_of
from ms_zero.plan.shapes import from_config
from ms_zero.plan.traffic import step_bytes

TOLERANCE = 0.02
TIMEOUT_S = 3600.0
_SMALL = (
    "model.hidden_size=64", "model.num_heads=4", "model.ffn_hidden_size=128", "model.vocab_size=512",
    "model.max_seq_len=64", "data.seq_len=32", "train.micro_batch_size=1",
)  # fmt: skip
_TINY = (
    *_SMALL, "train.output_dir=/tmp/unused", "hardware.target=Ascend", "precision.policy=bf16",
    "optim.kind=sgd", "optim.clip_norm=0", "data.source=stdlib", "train.global_batch_size=auto",
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
        compared: axes whose bytes are compared with the planner's.
    """

    name: str
    run: str
    overrides: tuple[str, ...]
    size: int
    rank: int = 0
    compared: tuple[str, ...] = ()


def layouts(quick: bool) -> Iterator[Layout]:
    """All cases."""
    run, k3 = "configs/runs/llama-tiny.yaml", "train.accumulation_steps=3"
    base = (*_TINY, "model.num_kv_heads=2", "model.num_layers=1")
    one = (*base, "train.accumulation_steps=1")
    yield Layout("dp", run, one, 4, compared=("dp",))
    level = (*base, k3, "parallel.zero_stage=2")
    yield Layout("hsdp level 2, 3 microbatches", run, level, 4, compared=("dp",))
    yield Layout("tp", run, (*one, "parallel.tp=2"), 4, compared=("tp",))
    if quick:
        return
    sequence = ("parallel.tp=2", "parallel.sequence_parallel=true")
    level = (*base, k3, "parallel.zero_stage=1")
    yield Layout("hsdp level 1, 3 microbatches", run, level, 4, compared=("dp",))
    yield Layout("hsdp level 3, 3 microbatches", run, (*base, k3, "parallel.zero_stage=3"), 4)
    yield Layout("tp + sp", run, (*one, *sequence), 4, compared=("tp",))
    yield Layout("cp, gathered", run, (*one, "parallel.cp=2"), 4)
    yield Layout("cp, ulysses", run, (*one, "parallel.cp=2", "parallel.context=ulysses"), 4)
    yield Layout("recompute full", run, (*one, "memory.recompute=full"), 4, compared=("dp",))
    yield Layout("recompute selective", run, (*one, "memory.recompute=selective"), 4, compared=("dp",))
    yield Layout("activations on the host", run, (*one, "memory.activations=host"), 4, compared=("dp",))
    for schedule, virtual in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)):
        for stages in (2, 4):
            extra = (f"parallel.pp={stages}", f"parallel.schedule={schedule}", "train.accumulation_steps=4")
            extra += (f"model.num_layers={stages * virtual}",)
            extra += (f"parallel.virtual_stages={virtual}",) if virtual > 1 else ()
            compared = ("pp",) if stages == 4 and virtual == 1 else ()
            case = (*_TINY, "model.num_kv_heads=2", *extra)
            yield Layout(f"pp {stages} {schedule}", run, case, stages, stages // 2, compared)
    grid = ("parallel.pp=2", *sequence, "parallel.zero_stage=2", "model.num_layers=2")
    case = (*_TINY, "model.num_kv_heads=2", "train.accumulation_steps=2", *grid)
    yield Layout("pp x dp x tp", run, case, 8, 7)
    yield from presets()


def presets() -> Iterator[Layout]:
    """The four runs of the founding table, small, on the axes of their meshes."""
    untied = "model.tie_embeddings=false"
    llama = ("model.num_kv_heads=2", "model.head_dim=16")
    cases = (
        ("gpt3-1.5b", 8, (2, 16, 8)),
        ("gpt3-13b", 8, (2, 8, 4), untied),
        ("gpt3-175b", 16, (8, 16, 2), untied),
        ("llama-70b", 16, (4, 16, 4), *llama),
    )
    for name, size, (layers, batch, shards), *more in cases:
        overrides = (*_SMALL, *more, f"model.num_layers={layers}", f"train.global_batch_size={batch}")
        overrides += (f"parallel.dp_shard={shards}",)
        for rank in (0, size - 1):
            yield Layout(f"preset {name} rank {rank}", f"configs/runs/{name}.yaml", overrides, size, rank)


def check(case: Layout) -> tuple[float, list[str]]:
    """Compile one case; the largest relative difference to the planner, and what is wrong."""
    arguments = {"run": case.run, "overrides": list(case.overrides), "workers": case.size}
    job = Case("ms_zero.graph.inspected:build_run", arguments, rank=case.rank, size=case.size)
    compiled = compile_case(job, timeout_s=TIMEOUT_S)
    wrong = [f"deprecated: {line}" for line in compiled.deprecations()]
    config = load_config(case.run, list(case.overrides), case.size, to_run=False).config
    mesh = Mesh(**{axis: getattr(config.parallel, axis) for axis in AXES})
    accumulates = config.train.accumulation_steps > 1
    precision = Precision(
        weight=4, gathered=2 if accumulates else 4, gradient=4, master=0, activation=2, reduce=4
    )
    layout = replace(layout_of(config), precision=precision, hsdp_level=config.parallel.zero_stage or None)
    parameters = gathered_parameters(compiled.graph, mesh, compiled.notes["parameters"])
    planned = step_bytes(from_config(config.model), layout, parameters)
    # The planner leaves out what a tensor-parallel table of tokens and head send: half a layer's.
    planned["tp"] *= (8 * config.model.num_layers + 4) / (8 * config.model.num_layers)
    sent = axis_bytes(compiled.graph, mesh, case.rank)
    worst = 0.0
    for axis in case.compared:
        difference = abs(sent[axis] - planned[axis]) / planned[axis]
        worst = max(worst, difference)
        if difference > TOLERANCE:
            wrong.append(f"{axis}: {sent[axis]:.0f} bytes, the planner says {planned[axis]:.0f}")
    return worst, wrong


def executed_difference(steps: int = 3) -> float:
    """Largest relative difference of the loss between the engines, over some steps on CPU."""
    from ms_zero import _compat, comm
    from ms_zero.data.run import load_data
    from ms_zero.runner import build_trainer

    _compat.launch_blocking()
    worst = 0.0
    for run in ("configs/runs/quickstart.yaml", "configs/runs/llama-tiny.yaml"):
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as JSON on the last line")
    parser.add_argument("--quick", action="store_true", help="a few layouts only")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases with this in their name")
    arguments = parser.parse_args()
    figures = {"cases": 0, "failures": 0, "skipped": 0}
    worst = 0.0
    for case in layouts(arguments.quick):
        if arguments.only not in case.name:
            continue
        figures["cases"] += 1
        try:
            difference, wrong = check(case)
        except FrontEndUnavailable as reason:
            figures["skipped"] += 1
            print(f"skipped {case.name}: {reason}")
            continue
        except (FrontEndError, UserError) as error:
            difference, wrong = 0.0, [str(error)[-800:]]
        worst = max(worst, difference)
        figures["failures"] += bool(wrong)
        print("\n       ".join([f"{'FAILED' if wrong else 'ok':6s} {case.name}", *wrong]), flush=True)
    if not arguments.only:
        figures["eager_vs_graph_max_rel_loss"] = executed_difference()
    figures["traffic_vs_planner_max_rel"] = worst
    lines = [f"{key}: {value}" for key, value in figures.items()]
    print(json.dumps(figures) if arguments.json else "\n".join(lines))
    return 1 if figures["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
