"""The count of saved tensors against what is measured, and the measuring against what is known."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops

from ms_zero import kernels, memory
from ms_zero._compat import backward
from ms_zero.memory.saved import live_tensors, measure_saved
from ms_zero.plan.saved import BlockShape, Split, block_bytes, edge_bytes
from ms_zero.precision import autocast
from ms_zero.precision.policy import policy
from tests.memory.training import (
    LENGTH,
    VOCAB,
    assert_bitwise,
    batch,
    build,
    forward,
    leaf_of,
    results,
    step,
)

HIDDEN, LAYERS = 24, 3


def block_of(family, **more):
    gated = family == "llama"
    return BlockShape(
        hidden_size=HIDDEN,
        num_heads=4,
        num_kv_heads=2 if gated else 4,
        head_dim=6,
        ffn_hidden_size=80,
        gated=gated,
        rotary=gated,
        **more,
    )


def measured(model, kind, target="CPU"):
    """Bytes that one forward pass with loss keeps."""
    data = batch()
    applied = memory.apply_recompute(model, kind)
    with kernels.default_target(target):
        forward(model, data)  # builds cached constants
        saved, _ = measure_saved(lambda: forward(model, data))
    applied.remove()
    return sum(tensor.bytes for tensor in saved)


def counted(block, kind, implementation="native", **split):
    split = Split(**{"batch": 2, "seq_len": LENGTH, "activation_bytes": 4, **split})
    edges = edge_bytes(block, VOCAB, split, implementation=implementation)
    blocks = LAYERS * block_bytes(block, split, implementation=implementation, recompute=kind)
    return blocks + sum(vars(edges).values())


@pytest.mark.parametrize(("implementation", "target"), [("native", "CPU"), ("portable", "CPU-portable")])
@pytest.mark.parametrize(
    ("family", "dropout", "qk_norm"), [("gpt", 0.1, 0), ("llama", 0.0, 0), ("llama", 0.1, 1)]
)
def test_count_is_what_is_measured(implementation, target, family, dropout, qk_norm):
    options = {"qk_norm": True} if qk_norm else {}
    with kernels.default_target(target):
        model = build(family, num_layers=LAYERS, dropout=dropout, **options)
    if dropout:
        model.dropout_state.set_position(seed=0, step=0, sample_numbers=(0, 1))
    for kind in ("none", "selective", "full"):
        expected = counted(block_of(family, **options), kind, implementation, dropout=dropout > 0)
        assert measured(model, kind, target) == pytest.approx(expected, rel=0.02), kind


@pytest.mark.parametrize(("name", "split"), [("bf16", {"rounded": True}), ("fp16", {"activation_bytes": 2})])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_count_under_a_16_bit_policy(family, name, split):
    model = build(family, num_layers=LAYERS)
    if name == "fp16":
        wide = autocast.fp32_parameters(model)
        for path, param in model.parameters_and_names():
            if path not in wide:
                param.data = param.astype(ms.float16)
    autocast.apply(model, policy(name), "CPU")
    assert measured(model, "none") == pytest.approx(counted(block_of(family), "none", **split), rel=0.02)
    tables = 0 if family == "gpt" else 2 * LENGTH * 6 * 4  # what the blocks of this small model share
    full = counted(block_of(family), "full", **split)
    assert full * 0.98 <= measured(model, "full") <= full * 1.02 + tables


def test_a_product_keeps_its_factors_once():
    weight, x, y = Parameter(Tensor(np.ones(6, np.float32))), leaf_of(np.ones(6)), leaf_of(np.ones(6))

    def run():
        made = x * 2.0
        return made * weight * y + made * made

    saved, out = measure_saved(run)
    assert [(tensor.shape, tensor.dtype) for tensor in saved] == [((6,), ms.float32)] * 2
    assert out.shape == (6,)


def test_a_view_counts_with_its_whole_storage_and_only_once():
    x = leaf_of(np.ones((4, 6)))

    def run():
        made = x * 2.0
        return ops.sin(made[:2]).sum() + ops.sin(made).sum()

    saved, _ = measure_saved(run)
    whole = [tensor for tensor in saved if tensor.bytes == 96]
    assert len(whole) == 1


def test_measuring_changes_no_gradient():
    model, data = build(num_layers=2), batch()
    _, loss = measure_saved(lambda: forward(model, data))
    backward(loss)
    assert_bitwise(results(model, loss), step(model, data))


def test_live_tensors_sees_a_new_one_and_its_end():
    before = len(live_tensors())
    held = Tensor(np.ones(3))
    assert len(live_tensors()) == before + 1
    del held
    assert len(live_tensors()) == before
