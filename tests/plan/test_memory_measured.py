"""The memory model against bytes that the eager engine counts on CPU, by ZeRO stage and recompute kind."""

from pathlib import Path

import pytest

from ms_zero.config import load_config
from ms_zero.plan.parameters import layer_parameters
from ms_zero.plan.run import layout_of, memory_model_of
from ms_zero.plan.shapes import from_config
from ms_zero.testing import run_workers

TOLERANCE = 0.05
WORLD = 2
MODELS = {
    "gpt": "{family: gpt, hidden_size: 96, num_layers: 5, num_heads: 4, max_seq_len: 64}",
    "llama": "{family: llama, hidden_size: 96, num_layers: 5, num_heads: 4, num_kv_heads: 2, "
    "ffn_hidden_size: 256, max_seq_len: 64}",
}
RUN = """
model: {model}
data: {{seq_len: 48}}
train: {{steps: 1, micro_batch_size: 2, accumulation_steps: 2, output_dir: out}}
parallel: {{zero_stage: {stage}}}
precision: {{policy: {policy}}}
"""
STAGES = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (1, "bf16"), (3, "bf16")]


def write_configs(folder):
    for family in MODELS:
        for stage, policy in STAGES:
            text = RUN.format(model=MODELS[family], stage=stage, policy=policy)
            Path(folder, f"{family}-{stage}-{policy}.yaml").write_text(text)


def config_of(folder, family, stage=0, policy="fp32", world=1):
    return load_config(Path(folder, f"{family}-{stage}-{policy}.yaml"), world_size=world).config


def batch(layout):
    import numpy as np

    ids = np.arange(layout.micro_batch_size * layout.seq_len, dtype=np.int32) % 250
    return ids.reshape(layout.micro_batch_size, layout.seq_len)


def measure(comm, folder):
    """For each case what is held by part, and the most that windows held open."""
    return {
        f"{family}-{stage}-{policy}": measure_one(comm, config_of(folder, family, stage, policy, WORLD))
        for family in MODELS
        for stage, policy in STAGES
    }


def measure_one(comm, config):
    from ms_zero.comm import ProcessMesh
    from ms_zero.config import mesh_of
    from ms_zero.recipes.build import build_engine

    engine = build_engine(config, ProcessMesh(mesh_of(config, comm.world_size), comm))
    open_bytes, layout = watch_windows(engine), layout_of(config)
    ids = batch(layout)
    engine.forward_backward(ids, ids, weight=1.0, last=False)
    parts = held(engine)
    engine.forward_backward(ids, ids, weight=1.0, last=True)
    engine.reduce()
    if layout.syncs:  # before, a reduction may be under way that no buffer shows yet
        parts = held(engine)
    return {**parts, "open": max(open_bytes)}


def held(engine):
    buffers = [bucket.buffers() for bucket in engine.sharded.buckets]
    parts = {part: sum(each[part] for each in buffers) for part in ("weights", "gradients")}
    state = engine.optimizer.held_bytes()["device"]
    master = state.pop("master", 0)
    return {**parts, "master": master, "moments": sum(state.values())}


def watch_windows(engine):
    seen = [0]

    def note(cell, inputs, output=None):
        seen.append(engine.sharded.open_bytes())

    for _, cell in engine.model.cells_and_names():
        cell.register_forward_pre_hook(note)
    return seen


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("measured"))
    write_configs(folder)
    return folder, run_workers(WORLD, measure, folder, timeout_s=240)


@pytest.mark.parametrize(("stage", "policy"), STAGES)
@pytest.mark.parametrize("family", MODELS)
def test_states_are_what_the_engine_holds(measured, family, stage, policy):
    folder, ranks = measured
    config = config_of(folder, family, stage, policy, WORLD)
    layout = layout_of(config)
    parts = memory_model_of(config, family).report(layout).worst.parts
    for rank in ranks:
        counted = rank[f"{family}-{stage}-{policy}"]
        for part in ("weights", "gradients", "master", "moments"):
            assert parts.get(part, 0) == pytest.approx(counted[part], rel=TOLERANCE), part
        gathered = parts.get("unsharded", 0) - layout.syncs * unit_gradient(config)
        assert counted["open"] <= gathered <= 2 * counted["open"]


def unit_gradient(config):
    """Bytes of the largest unit's fp32 gradient: here that of a block."""
    shape = from_config(config.model)
    return 4 * layer_parameters(shape.blocks[0][1], shape.hidden_size, shape.norm).total


@pytest.mark.parametrize("kind", ["none", "selective", "every_k", "sqrt", "full"])
@pytest.mark.parametrize("family", MODELS)
def test_saved_activations_are_what_the_engine_saves(tmp_path, blocking, family, kind):
    from ms_zero import memory, models
    from ms_zero.recipes.build import build_model

    write_configs(tmp_path)
    config = config_of(tmp_path, family)
    model = build_model(config.model)
    models.initialise(model, 1)
    every = 2 if kind == "every_k" else None
    memory.apply_recompute(model, kind, every=every)
    layout = layout_of(config).replace(recompute=kind, recompute_every=every or 1)
    counted = count_saved(model, batch(layout))
    predicted = memory_model_of(config, family).saved(layout)
    assert predicted == pytest.approx(counted, rel=TOLERANCE / 10)


def count_saved(model, ids):
    import mindspore as ms
    from mindspore import Tensor

    from ms_zero import kernels
    from ms_zero._compat import tape

    found = {}

    def pack(tensor):
        found[tensor.data_ptr()] = tensor.data  # kept, so that no address is used twice
        return tensor.data

    weights = {param.data_ptr() for param in model.get_parameters()}
    with ms.saved_tensors_hooks(pack, lambda tensor: tensor), tape():
        logits = model(Tensor(ids))
        loss = kernels.CrossEntropySum()(logits.reshape(-1, logits.shape[-1]), Tensor(ids.reshape(-1)))
    assert loss is not None
    return sum(tensor.nbytes for address, tensor in found.items() if address not in weights)
