"""Bytes that the eager engine holds, counted on CPU, next to what the planner predicts.

Cases are small models of each family under each ZeRO stage, offload and recompute kind. Counted are tensors:
stored weights, gradients, optimizer state, windows of gathered weights, and what is saved for backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ms_zero.config import RunConfig, load_config
from ms_zero.plan.activations import packed_share, saved_ends_bytes
from ms_zero.plan.parameters import layer_parameters
from ms_zero.plan.run import layout_of, memory_model_of
from ms_zero.plan.shapes import from_config
from ms_zero.testing.workers import run_workers

WORLD_SIZE = 2
FAMILIES: Mapping[str, str] = {  # sizes that chunks do not divide
    "gpt": "{family: gpt, vocab_size: 259, hidden_size: 95, num_layers: 5, num_heads: 5, max_seq_len: 63}",
    "llama": "{family: llama, vocab_size: 259, hidden_size: 95, num_layers: 5, num_heads: 6, "
    "num_kv_heads: 2, head_dim: 18, ffn_hidden_size: 253, max_seq_len: 63}",
}
STATES: Mapping[str, str] = {
    "stage 0": "parallel: {zero_stage: 0}",
    "stage 1": "parallel: {zero_stage: 1}",
    "stage 2": "parallel: {zero_stage: 2}",
    "stage 3": "parallel: {zero_stage: 3}",
    "stage 1 bf16": "parallel: {zero_stage: 1}\nprecision: {policy: bf16}",
    "stage 3 bf16": "parallel: {zero_stage: 3}\nprecision: {policy: bf16}",
    "stage 2 half on host": "parallel: {zero_stage: 2}\noffload: {optimizer: cpu, fraction: 0.5}",
    "stage 3 all on host": "parallel: {zero_stage: 3}\nprecision: {policy: bf16}\n"
    "offload: {optimizer: cpu, params: cpu}",
    "stage 3 by size": "parallel: {zero_stage: 3, wrap: size, wrap_elements: 1000000}",
}
_BF16 = "\nprecision: {policy: bf16}"
SAVED: Mapping[str, str] = {
    "recompute none": "memory: {recompute: none}",
    "recompute full": "memory: {recompute: full}",
    "recompute every_k": "memory: {recompute: every_k, recompute_every: 2}",
    "recompute sqrt": "memory: {recompute: sqrt}",
    "recompute selective": "memory: {recompute: selective}",
    "recompute budget": "memory: {recompute: budget, budget_gb: 0.002}",
    "recompute none bf16": f"memory: {{recompute: none}}{_BF16}",
    "recompute full bf16": f"memory: {{recompute: full}}{_BF16}",
    "recompute selective bf16": f"memory: {{recompute: selective}}{_BF16}",
    "recompute budget bf16": f"memory: {{recompute: budget, budget_gb: 0.0022}}{_BF16}",
}
_CASES = {**STATES, **SAVED}
STATE_PARTS = ("weights", "gradients", "master", "moments")
HOST_PARTS = ("host weights", "host master", "host moments")
PLACES = ("host", "int8", "int8_host")
_RUN = """
model: {model}
data: {{seq_len: 48}}
train: {{steps: 1, micro_batch_size: 2, accumulation_steps: 2, output_dir: out}}
{more}
"""


def write_cases(folder: Path) -> None:
    """Write the run file of every case."""
    for family, model in FAMILIES.items():
        for number, more in enumerate(_CASES.values()):
            text = _RUN.format(model=model, more=more)
            (folder / f"{family}-{number}.yaml").write_text(text, encoding="utf-8")


def read_case(folder: Path, family: str, case: str = "stage 0", world: int = 1) -> RunConfig:
    """The config of a case, a key of STATES or SAVED."""
    path = folder / f"{family}-{list(_CASES).index(case)}.yaml"
    return load_config(path, world_size=world).config


def measure_states(folder: Path) -> list[dict[str, dict[str, int]]]:
    """For each rank: `family case` -> part -> bytes; "open" is the most that windows held."""
    return run_workers(WORLD_SIZE, _measure_states, str(folder), timeout_s=240.0)


def measure_saved(config: RunConfig) -> int:
    """Bytes that the forward of one microbatch saves, see `memory.saved`."""
    from ms_zero._compat import device_target
    from ms_zero.memory.saved import measure_saved as count
    from ms_zero.precision.autocast import apply as autocast
    from ms_zero.recipes.build import apply_memory, build_policy

    model = _model(config)
    apply_memory(config, model)
    autocast(model, build_policy(config.precision), device_target())
    forward = _forward(model, _batch(config))
    forward()  # builds the constants that operators cache
    tensors, _ = count(forward)
    return sum(tensor.bytes for tensor in tensors)


def measure_packed(config: RunConfig, place: str) -> tuple[int, int]:
    """Bytes of the blocks' saved activations on the device and on the host, for one of PLACES."""
    from ms_zero import memory
    from ms_zero._compat import tape

    model = _model(config)
    if place == "host":
        packed = memory.offload_activations(model, min_bytes=0)
    else:
        packed = memory.compress_activations(model, min_bytes=0, offload=place == "int8_host")
    with tape():
        loss = _forward(model, _batch(config))()
    assert loss is not None
    return packed.ledger.device_bytes, packed.ledger.host_bytes


def predict_states(config: RunConfig) -> dict[str, float]:
    """The planner's bytes by part, on the host too, and of the gathered weights ("open")."""
    layout, shape = layout_of(config), from_config(config.model)
    worst = memory_model_of(config, "case").report(layout).worst
    layer = layer_parameters(shape.blocks[0][1], shape.hidden_size, shape.norm).total
    gradient = layout.precision.gradient * layer if layout.syncs else 0
    found = {part: worst.parts.get(part, 0.0) for part in STATE_PARTS}
    found |= {part: worst.host.get(part.removeprefix("host "), 0.0) for part in HOST_PARTS}
    return {**found, "open": worst.parts.get("unsharded", 0.0) - gradient}


def predict_saved(config: RunConfig) -> float:
    """The planner's bytes of saved activations."""
    return memory_model_of(config, "case").saved(layout_of(config))


def predict_packed(config: RunConfig, place: str) -> tuple[float, float]:
    """The planner's bytes of the blocks' activations on the device and on the host."""
    bits = None if place == "host" else 8
    layout = layout_of(config).replace(activation_offload=place != "int8", activation_bits=bits)
    model = memory_model_of(config, "case")
    blocks = model.saved(layout) - saved_ends_bytes(model.shape, layout, model.kernels)
    kept = blocks * packed_share(layout)
    return (0.0, kept) if layout.activation_offload else (kept, 0.0)


def relative_errors(folder: Path) -> Iterator[tuple[str, float]]:
    """Name and predicted over counted bytes, less 1, of every case and part."""
    write_cases(folder)
    ranks = measure_states(folder)
    for family in FAMILIES:
        for case in STATES:
            predicted = predict_states(read_case(folder, family, case, WORLD_SIZE))
            for rank, counted in enumerate(ranks):
                yield from _compare(f"{family} {case} rank {rank}", predicted, counted[f"{family} {case}"])
        for case in SAVED:
            config = read_case(folder, family, case)
            yield f"{family} {case}: saved", predict_saved(config) / measure_saved(config) - 1


def _compare(
    name: str, predicted: Mapping[str, float], counted: Mapping[str, int]
) -> Iterator[tuple[str, float]]:
    for part in (*STATE_PARTS, *HOST_PARTS):
        if predicted[part] or counted[part]:
            yield f"{name}: {part}", predicted[part] / counted[part] - 1 if counted[part] else float("inf")


def _measure_states(comm: Any, folder: str) -> dict[str, dict[str, int]]:
    return {
        f"{family} {case}": _measure_one(comm, read_case(Path(folder), family, case, WORLD_SIZE))
        for family in FAMILIES
        for case in STATES
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
    held, states = engine.sharded.held_bytes(), engine.optimizer.held_bytes()
    parts = {
        "weights": held["weights"],
        "gradients": held["gradients"],
        "host weights": held["host_weights"],
    }
    for prefix, place in (("", "device"), ("host ", "host")):
        state = dict(states.get(place, {}))
        parts[f"{prefix}master"] = state.pop("master", 0)
        parts[f"{prefix}moments"] = sum(state.values())
    return parts


def _watch_windows(engine: Any) -> list[int]:
    seen = [0]
    for _, cell in engine.model.cells_and_names():
        cell.register_forward_pre_hook(lambda *_: seen.append(engine.sharded.held_bytes()["unsharded"]))
    return seen


def _batch(config: RunConfig) -> np.ndarray:
    shape = (config.train.micro_batch_size, config.data.seq_len)
    return (np.arange(shape[0] * shape[1], dtype=np.int32) % 250).reshape(shape)


def _model(config: RunConfig) -> Any:
    from ms_zero import models
    from ms_zero.recipes.build import build_model

    model = build_model(config.model)
    models.initialise(model, 1)
    return model


def _forward(model: Any, ids: np.ndarray) -> Any:
    from mindspore import Tensor

    from ms_zero import kernels

    loss, inputs, labels = kernels.CrossEntropySum(), Tensor(ids), Tensor(ids.reshape(-1))

    def forward() -> Tensor:
        logits = model(inputs)
        return loss(logits.reshape(-1, logits.shape[-1]), labels)

    return forward
