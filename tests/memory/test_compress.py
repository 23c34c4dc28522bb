"""8-bit block-wise compression: its error, and what that does to gradients."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ms_zero import memory
from ms_zero._compat import backward, gradient, tape
from ms_zero.errors import UserError
from ms_zero.memory.compress import (
    Int8Codec,
    quantise_on_device,
    quantise_on_host,
    restore_on_device,
    restore_on_host,
)
from tests.memory.training import assert_bitwise, build, leaf_of, step


def values(kind, size):
    draw = np.random.default_rng(3)
    x = draw.standard_normal(size).astype(np.float32)
    return {
        "normal": x,
        "outliers": np.where(draw.random(size) < 0.01, 1e4 * x, x).astype(np.float32),
        "tiny": x * np.float32(1e-30),
        "zeros": np.zeros(size, np.float32),
        "positive": np.abs(x) + 5,
    }[kind]


def bound(x, block):
    """absmax / 254 of each element's block."""
    rows = np.zeros(-(-x.size // block) * block, np.float32)
    rows[: x.size] = np.abs(x)
    return np.repeat(rows.reshape(-1, block).max(1) / 254, block)[: x.size]


@pytest.mark.parametrize("kind", ["normal", "outliers", "tiny", "zeros", "positive"])
@pytest.mark.parametrize(("size", "block"), [(4096, 256), (1000, 64), (7, 256), (5, 1)])
def test_error_is_at_most_half_a_step(kind, size, block):
    for dtype, unit in ((ms.float32, 0), (ms.float16, 2.0**-11), (ms.bfloat16, 2.0**-8)):
        if dtype == ms.float16 and kind in ("outliers", "tiny"):
            continue  # beyond its range
        tensor = Tensor(values(kind, size)).astype(dtype)
        x = tensor.astype(ms.float32).asnumpy()
        kept, device, host = Int8Codec(block).encode(tensor)
        back = Int8Codec(block).decode(kept).astype(ms.float32).asnumpy()
        restored = bound(x, block) + 3 * 2.0**-24 * np.abs(x)
        assert (np.abs(back - x) <= restored + unit * (np.abs(x) + restored)).all()
        assert host == 0 and device == -(-size // block) * (block + 4)


def test_the_bound_is_reached():
    """No smaller bound holds: values half way between two steps."""
    x = np.array([127.0, 0.5, 1.5, -2.5], np.float32)
    kept, _, _ = Int8Codec(4).encode(Tensor(x))
    error = np.abs(Int8Codec(4).decode(kept).asnumpy() - x)
    assert error.tolist() == [0, 0.5, 0.5, 0.5] and bound(x, 4)[0] == 0.5


def test_error_of_normal_values_is_the_stated_one():
    x = values("normal", 1 << 16)
    kept, _, _ = Int8Codec(256).encode(Tensor(x))
    error = Int8Codec(256).decode(kept).asnumpy() - x
    assert 0.005 < np.sqrt((error**2).mean() / (x**2).mean()) < 0.007
    assert abs(error.mean()) < 1e-4


@pytest.mark.parametrize("kind", ["normal", "outliers", "zeros"])
def test_operators_and_numpy_agree(kind):
    x = Tensor(values(kind, 1000).reshape(10, 100))
    on_host, on_device = quantise_on_host(x, 64), quantise_on_device(x, 64)
    for left, right in zip(on_host, on_device, strict=True):
        np.testing.assert_array_equal(left.asnumpy(), right.asnumpy())
    restored = restore_on_host(*on_host), restore_on_device(*on_device)
    np.testing.assert_array_equal(restored[0].asnumpy(), restored[1].asnumpy())


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_a_block_that_is_not_finite_stays_so_and_others_are_untouched(bad):
    x = values("normal", 128)
    x[5] = bad
    kept, _, _ = Int8Codec(64).encode(Tensor(x))
    back = Int8Codec(64).decode(kept).asnumpy()
    assert np.isnan(back[:64]).all() and np.isfinite(back[64:]).all()


def test_shape_and_dtype_come_back():
    for dtype in (ms.float16, ms.bfloat16, ms.float32):
        for host in (False, True):
            tensor = Tensor(values("normal", 30).reshape(2, 3, 5)).astype(dtype)
            codec = Int8Codec(8, host=host)
            kept, device, bytes_on_host = codec.encode(tensor)
            back = codec.decode(kept)
            assert back.dtype == dtype and back.shape == (2, 3, 5)
            assert (bytes_on_host if host else device) == 4 * 12 and (device if host else bytes_on_host) == 0
    assert not Int8Codec().takes(Tensor(np.ones(3, bool)))
    assert not Int8Codec().takes(Tensor(np.ones(3, np.int32)))


class Matrix(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros((5, 64), np.float32)), name="w")
        self.product = ops.MatMul(transpose_b=True)

    def construct(self, x):
        return self.product(x, self.w)


def test_gradient_of_a_weight_is_within_the_stated_bound():
    class Model(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inner = Matrix()

        def construct(self, x):
            return self.inner(x)

    x, dy = values("outliers", 32 * 64).reshape(32, 64), values("normal", 32 * 5).reshape(32, 5)
    model = Model()
    memory.compress_activations(model, cells="inner", min_bytes=1, block=16)
    inputs = leaf_of(x)
    with tape():
        out = model(inputs)
    np.testing.assert_array_equal(out.asnumpy(), np.zeros((32, 5)))
    backward(out, Tensor(dy))
    exact = dy.T.astype(np.float64) @ x
    limit = np.abs(dy).T.astype(np.float64) @ bound(x.reshape(-1), 16).reshape(x.shape)
    error = np.abs(gradient(model.inner.w).asnumpy() - exact)
    assert (error <= limit + 1e-6 * np.abs(dy).T @ np.abs(x)).all()
    assert error.max() > 1e-3 * limit.max()  # it was compressed


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_loss_is_exact_and_gradients_are_close(family):
    model = build(family, num_layers=2)
    plain = step(model)
    packed = memory.compress_activations(model, min_bytes=1, block=32)
    found = step(model)
    assert found["loss"] == plain["loss"]
    vector = {name: np.concatenate([v[n].ravel() for n in plain if n != "loss"]) for name, v in
              (("plain", plain), ("found", found))}
    error = np.linalg.norm(vector["found"] - vector["plain"]) / np.linalg.norm(vector["plain"])
    assert 1e-5 < error < 0.02
    ledger = packed.ledger
    assert ledger.peak_device_bytes < 0.35 * ledger.peak_original_bytes and ledger.peak_host_bytes == 0
    packed.remove()
    offloaded = memory.compress_activations(model, min_bytes=1, block=32, offload=True)
    assert_bitwise(step(model), found)
    assert offloaded.ledger.peak_device_bytes == 0 < offloaded.ledger.peak_host_bytes
    assert offloaded.ledger.host_bytes == 0


def test_recompute_from_compressed_inputs():
    """The second forward starts from the restored input: its error passes through the block once."""
    model = build("gpt", num_layers=2)
    plain = step(model)
    memory.apply_recompute(model, "full")
    packed = memory.compress_activations(model, min_bytes=1, block=32)
    found = step(model)
    assert found["loss"] == plain["loss"]
    name = "transformer.h.0.mlp.c_fc.weight"
    error = np.linalg.norm(found[name] - plain[name]) / np.linalg.norm(plain[name])
    assert 0 < error < 0.05
    assert packed.ledger.packed == 2


def test_refusals():
    with pytest.raises(UserError, match="a compression block of 0 elements: expected at least 1"):
        memory.compress_activations(build(num_layers=1), block=0)
