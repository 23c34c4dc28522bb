"""Bytes that the eager engine holds, counted on CPU, next to what the planner predicts.

Cases are small models of each family under each ZeRO stage and recompute kind. Counted are tensors: stored
weights, gradients, optimizer state, windows of gathered weights, and what operators save for backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ms_zero.config import RunConfig, load_config
from ms_zero.plan.parameters import layer_parameters
from ms_zero.plan.recompute import RECOMPUTE_KINDS
from ms_zero.plan.run import layout_of, memory_model_of
from ms_zero.plan.shapes import from_config
from ms_zero.testing.workers import run_workers

WORLD_SIZE = 2
STATE_PARTS = ("weights", "gradients", "master", "moments")
FAMILIES: Mapping[str, str] = {
    "gpt": "{family: gpt, hidden_size: 96, num_layers: 5, num_heads: 4, max_seq_len: 64}",
    "llama": "{family: llama, hidden_size: 96, num_layers: 5, num_heads: 4, num_kv_heads: 2, "
    "ffn_hidden_size: 256, max_seq_len: 64}",
}
STAGES = ((0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "bf16"))
KINDS = tuple(kind for kind in RECOMPUTE_KINDS if kind != "budget")
_EVERY = 2
_RUN = """
model: {model}
data: {{seq_len: 48}}
train: {{steps: 1, micro_batch_size: 2, accumulation_steps: 2, output_dir: out}}
parallel: {{zero_stage: {stage}}}
precision: {{policy: {policy}}}
"""


def write_cases(folder: Path) -> None:
    """Write the run file of every case."""
    for family, model in FAMILIES.items():
        for stage, policy in STAGES:
            text = _RUN.format(model=model, stage=stage, policy=policy)
            (folder / f"{family}-{stage}-{policy}.yaml").write_text(text, encoding="utf-8")


def read_case(folder: Path, family: str, stage: int = 0, policy: str = "fp32", world: int = 1) -> RunConfig:
    """The config of a case."""
    return load_config(folder / f"{family}-{stage}-{policy}.yaml", world_size=world).config


def measure_states(folder: Path) -> list[dict[str, dict[str, int]]]:
    """For each rank: `family-stage-policy` -> part -> bytes; "open" is the most that windows held."""
    return run_workers(WORLD_SIZE, _measure_states, str(folder), timeout_s=240.0)


def measure_saved(config: RunConfig, kind: str) -> int:
    """Bytes that the forward of one microbatch saves under a kind of recompute, see `memory.saved`."""
    from ms_zero import memory, models
    from ms_zero.recipes.build import build_model

    model = build_model(config.model)
    models.initialise(model, 1)
    memory.apply_recompute(model, kind, every=_EVERY if kind == "every_k" else None)
    return _count_saved(model, _batch(config))


def predict_states(config: RunConfig) -> dict[str, float]:
    """The planner's bytes by part, and of the gathered weights ("open")."""
    layout, shape = layout_of(config), from_config(config.model)
    parts = memory_model_of(config, "case").report(layout).worst.parts
    layer = layer_parameters(shape.blocks[0][1], shape.hidden_size, shape.norm).total
    gradient = layout.precision.gradient * layer if layout.syncs else 0
    found = {part: parts.get(part, 0.0) for part in STATE_PARTS}
    return {**found, "open": parts.get("unsharded", 0.0) - gradient}


def predict_saved(config: RunConfig, kind: str) -> float:
    """The planner's bytes of saved activations."""
    layout = layout_of(config).replace(recompute=kind, recompute_every=_EVERY)
    return memory_model_of(config, "case").saved(layout)


def relative_errors(folder: Path) -> Iterator[tuple[str, float]]:
    """Name and predicted over counted bytes, less 1, of every case and part."""
    write_cases(folder)
    ranks = measure_states(folder)
    for family in FAMILIES:
        for stage, policy in STAGES:
            predicted = predict_states(read_case(folder, family, stage, policy, WORLD_SIZE))
            for rank, counted in enumerate(ranks):
                case = counted[f"{family}-{stage}-{policy}"]
                for part in STATE_PARTS:
                    if case[part] or predicted[part]:
                        name = f"{family} stage {stage} {policy} rank {rank}: {part}"
                        yield name, predicted[part] / case[part] - 1
        for kind in KINDS:
            config = read_case(folder, family)
            yield (
                f"{family} recompute {kind}: saved",
                predict_saved(config, kind) / measure_saved(config, kind) - 1,
            )


def _measure_states(comm: Any, folder: str) -> dict[str, dict[str, int]]:
    return {
        f"{family}-{stage}-{policy}": _measure_one(
            comm, read_case(Path(folder), family, stage, policy, WORLD_SIZE)
        )
        for family in FAMILIES
        for stage, policy in STAGES
    }


def _measure_one(comm: Any, config: RunConfig) -> dict[str, int]:
    from ms_zero.comm import ProcessMesh
    from ms_zero.config import mesh_of
    from ms_zero.recipes.build import build_engine

    engine = build_engine(config, ProcessMesh(mesh_of(config, comm.world_size), comm))
    open_bytes, ids = _watch_windows(engine), _batch(config)
    engine.forward_backward(ids, ids, weight=1.0, last=False)
    held = _held_bytes(engine)
    engine.forward_backward(ids, ids, weight=1.0, last=True)
    engine.reduce()
    if layout_of(config).syncs:  # before, a reduction may be under way that no buffer shows yet
        held = _held_bytes(engine)
    return {**held, "open": max(open_bytes)}


def _held_bytes(engine: Any) -> dict[str, int]:
    held = engine.sharded.held_bytes()
    parts = {part: held[part] for part in ("weights", "gradients")}
    state = engine.optimizer.held_bytes()["device"]
    master = state.pop("master", 0)
    return {**parts, "master": master, "moments": sum(state.values())}


def _watch_windows(engine: Any) -> list[int]:
    seen = [0]
    for _, cell in engine.model.cells_and_names():
        cell.register_forward_pre_hook(lambda *_: seen.append(engine.sharded.held_bytes()["unsharded"]))
    return seen


def _batch(config: RunConfig) -> np.ndarray:
    shape = (config.train.micro_batch_size, config.data.seq_len)
    return (np.arange(shape[0] * shape[1], dtype=np.int32) % 250).reshape(shape)


def _count_saved(model: Any, ids: np.ndarray) -> int:
    from mindspore import Tensor

    from ms_zero import kernels
    from ms_zero.memory.saved import measure_saved as count

    loss, inputs = kernels.CrossEntropySum(), Tensor(ids)
    labels = Tensor(ids.reshape(-1))

    def forward() -> Tensor:
        logits = model(inputs)
        return loss(logits.reshape(-1, logits.shape[-1]), labels)

    forward()  # builds the constants that operators cache
    tensors, _ = count(forward)
    return sum(tensor.bytes for tensor in tensors)
