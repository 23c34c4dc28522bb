import gc
import weakref
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from ms_zero import _compat
from ms_zero.precision.cast import cast, from_bits, round_array, round_gradient, round_to_grid, to_bits

to_bf16 = partial(round_to_grid, grid="bf16")

ALL_BITS = np.arange(2**16, dtype=np.uint16)


def some_bits(count=1 << 20):
    """fp32 values of every kind: random bits, the neighbourhoods of all rounding borders, special values."""
    rng = np.random.default_rng(0)
    random = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32)
    offsets = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    borders = (ALL_BITS.astype(np.uint32)[:, None] << 16) + offsets
    return np.concatenate([random, borders.reshape(-1)]).view(np.float32)


def nearest_even(values):
    """The definition, in float64: of the two neighbours the nearer one; of two equally near the even one."""
    low = (values.view(np.uint32) >> 16).astype(np.uint16)  # towards zero
    high = low + np.uint16(1)
    exact = values.astype(np.float64)
    # One step beyond the largest finite value counts as 2^128, which rounds to inf.
    below, above = (widen(bits) for bits in (low, high))
    to_low, to_high = np.abs(exact - below), np.abs(above - exact)
    return np.where((to_low < to_high) | ((to_low == to_high) & (low % 2 == 0)), low, high)


def widen(bits):
    value = (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.where(np.isinf(value), np.copysign(2.0**128, value), value)


def test_bits_follow_the_definition_of_rounding():
    values = some_bits()
    finite = values[np.isfinite(values)]
    np.testing.assert_array_equal(to_bits(finite), nearest_even(finite))


def test_bits_agree_with_the_framework():
    values = some_bits(1 << 18)
    values = values[~np.isnan(values)]
    found = Tensor(values).astype(ms.bfloat16).asnumpy().view(np.uint16)
    np.testing.assert_array_equal(to_bits(values), found)


def test_from_bits_is_exact_and_to_bits_its_inverse():
    values = from_bits(ALL_BITS)
    np.testing.assert_array_equal(values.view(np.uint32) >> 16, ALL_BITS)
    nan = np.isnan(values)
    np.testing.assert_array_equal(to_bits(values)[~nan], ALL_BITS[~nan])
    assert np.isnan(from_bits(to_bits(values)))[nan].all()


def test_nan_stays_nan_whatever_its_bits():
    patterns = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000], np.uint32)
    patterns = patterns.view(np.float32)
    assert np.isnan(round_array(patterns)).all()
    assert np.isnan(from_bits(to_bits(patterns))).all()


def test_infinities_overflow_denormals_and_signed_zeros():
    values = np.array([np.inf, -np.inf, 3.4028235e38, 1e-45, -0.0, 2.0**-133, 1.5 * 2.0**-133], np.float32)
    expected = np.array([np.inf, -np.inf, np.inf, 0.0, -0.0, 2.0**-133, 2.0**-132], np.float32)
    found = round_array(values)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3, 4)])
def test_shapes_and_strides(shape):
    values = np.random.default_rng(1).standard_normal(shape, np.float32) if shape else np.float32(1.01)
    values = np.asarray(values, np.float32)
    assert to_bits(values).shape == round_array(values).shape == from_bits(to_bits(values)).shape == shape
    turned = np.ascontiguousarray(values.T).T
    np.testing.assert_array_equal(to_bits(turned), to_bits(values))
    assert to_bf16(Tensor(values)).shape == shape


def test_rounding_leaves_its_argument_alone():
    values = np.array([1.001, 2.003], np.float32)
    tensor = Tensor(values)
    rounded = to_bf16(tensor)
    np.testing.assert_array_equal(tensor.asnumpy(), values)
    np.testing.assert_array_equal(rounded.asnumpy(), round_array(values))


def gradients(how, function, x, weight):
    """function(x) and the gradient of sum(function(x) * weight)."""
    if how == "tape":
        leaf = Tensor(x)
        leaf.requires_grad_(True)
        with _compat.tape():
            out = function(leaf)
        _compat.backward(out, Tensor(weight))
        return out, leaf._grad
    (_, out), grad = ms.value_and_grad(
        lambda x: ((lambda out: ((out * Tensor(weight)).sum(), out))(function(x))), 0, has_aux=True
    )(Tensor(x))
    return out, grad


@pytest.mark.parametrize("how", ["tape", "value_and_grad"])
def test_round_to_grid_rounds_values_and_gradients(how):
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((2, 50, 3), np.float32)
    out, grad = gradients(how, to_bf16, x, weight)
    np.testing.assert_array_equal(out.asnumpy(), round_array(x))
    np.testing.assert_array_equal(grad.asnumpy(), round_array(weight))


@pytest.mark.parametrize("how", ["tape", "value_and_grad"])
def test_round_gradient_leaves_values_alone(how):
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((2, 50, 3), np.float32)
    out, grad = gradients(how, partial(round_gradient, grid="bf16"), x, weight)
    np.testing.assert_array_equal(out.asnumpy(), x)
    np.testing.assert_array_equal(grad.asnumpy(), round_array(weight))


@pytest.mark.parametrize("how", ["tape", "value_and_grad"])
@pytest.mark.parametrize(("dtype", "numpy_dtype"), [(ms.float16, np.float16), (ms.float32, np.float32)])
def test_cast_converts_values_and_gradients(how, dtype, numpy_dtype):
    other = np.float16 if numpy_dtype is np.float32 else np.float32
    rng = np.random.default_rng(3)
    x, weight = rng.standard_normal((2, 50, 3), np.float32)
    x, weight = x.astype(other), weight.astype(numpy_dtype)
    out, grad = gradients(how, lambda x: cast(x, dtype), x, weight)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out.asnumpy(), x.astype(numpy_dtype))
    assert grad.asnumpy().dtype == other
    np.testing.assert_array_equal(grad.asnumpy(), weight.astype(other))


def test_cast_rounds_to_nearest_even_and_to_inf():
    values = [1 + 2**-11, 1 + 3 * 2**-11, 65519.0, 65520.0, 2.0**-25, 3 * 2.0**-25, np.nan]
    expected = [1, 1 + 2**-9, 65504.0, np.inf, 0, 2.0**-23, np.nan]
    found = cast(Tensor(np.array(values, np.float32)), ms.float16).asnumpy()
    np.testing.assert_array_equal(found, np.array(expected, np.float16))
    wide = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4028235e38, 1e-40], np.float32)
    np.testing.assert_array_equal(cast(Tensor(wide), ms.bfloat16).asnumpy().view(np.uint16), to_bits(wide))


def test_round_to_fp16_overflows_and_keeps_denormals():
    x = np.array([1 + 2**-11, 65520.0, -65519.0, 3 * 2.0**-25, np.nan], np.float32)
    found = round_to_grid(Tensor(x), "fp16")
    assert found.dtype == ms.float32
    expected = np.array([1, np.inf, -65504, 2.0**-23, np.nan], np.float32)
    np.testing.assert_array_equal(found.asnumpy(), expected)


def test_cast_to_the_own_dtype_is_the_tensor_itself():
    x = Tensor(np.ones(3, np.float16))
    assert cast(x, ms.float16) is x


@pytest.mark.parametrize("function", [to_bf16, lambda x: cast(x, ms.float16)])
def test_nothing_is_kept_for_backward(function):
    leaf = Tensor(np.ones(1000, np.float32))
    leaf.requires_grad_(True)
    with _compat.tape():
        inner = leaf * 2  # keeps a scalar only
        out = function(inner)
        alive = weakref.ref(inner)
        del inner
    gc.collect()
    assert alive() is None
    _compat.backward(out, ops.ones_like(out))
    np.testing.assert_array_equal(leaf._grad.asnumpy(), np.full(1000, 2, np.float32))


def test_a_non_contiguous_tensor():
    x = Tensor(np.arange(12, dtype=np.float32).reshape(3, 4) * 1.001)
    turned = mint.transpose(x, 0, 1)
    np.testing.assert_array_equal(to_bf16(turned).asnumpy(), round_array(x.asnumpy().T))
    np.testing.assert_array_equal(cast(turned, ms.float16).asnumpy(), x.asnumpy().T.astype(np.float16))
