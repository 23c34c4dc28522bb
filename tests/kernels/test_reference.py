"""The numpy reference against its contract: float64 arithmetic, and the rounding of every kind of value."""

import math

import numpy as np
import pytest

from ms_zero.kernels import reference

HYPER = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 5}


def test_the_scalars_are_computed_in_double_and_rounded_once():
    scalars = reference.adamw_scalars(**HYPER, grad_scale=0.5)
    beta1, beta2 = float(np.float32(0.9)), float(np.float32(0.95))
    expected = [1 - 3e-4, beta1, 1 - beta1, beta2, 1 - beta2, 1 / math.sqrt(1 - beta2**5), 1e-8]
    expected += [3e-3 / (1 - beta1**5), 0.5, 0, 0, 0, 0, 0, 0, 0]
    assert scalars.dtype == np.float32
    assert np.array_equal(scalars, np.array(expected).astype(np.float32))
    sgd = reference.sgd_scalars(lr=0.5, weight_decay=0.5, grad_scale=4.0)
    assert sgd.tolist() == [0.75, 2.0] + [0.0] * 14


def one_element(p, m, v, g, scalars):
    """The lines of ops/README.md, each rounded to fp32."""
    f = np.float32
    keep, beta1, rest1, beta2, rest2, inverse_root, eps, step_size, scale = (f(x) for x in scalars[:9])
    g = f(g * scale)
    m = f(f(m * beta1) + f(g * rest1))
    v = f(f(v * beta2) + f(f(g * g) * rest2))
    u = f(m / f(f(np.sqrt(v) * inverse_root) + eps))
    return f(f(p * keep) - f(u * step_size)), m, v


def test_adamw_rounds_after_every_operation():
    rng = np.random.default_rng(1)
    p, m, g = rng.standard_normal((3, 300)).astype(np.float32)
    v = np.square(rng.standard_normal(300, np.float32))
    scalars = reference.adamw_scalars(**HYPER, grad_scale=0.37)
    expected = np.array([one_element(*values, scalars) for values in zip(p, m, v, g)], np.float32)
    low = np.zeros(300, np.uint16)
    reference.adamw(p, m, v, g, low, scalars)
    assert np.array_equal(np.stack([p, m, v], 1), expected)
    assert np.array_equal(low, reference.narrow(p, np.dtype(np.uint16)))


def test_nothing_is_written_when_an_overflow_was_found():
    for found_inf in (1.0, math.nan):
        arrays = [np.ones(5, np.float32) for _ in range(4)]
        low = np.full(5, 7, np.uint16)
        reference.adamw(*arrays, low, reference.adamw_scalars(**HYPER, found_inf=found_inf))
        scalars = reference.sgd_scalars(lr=1.0, weight_decay=0.0, grad_scale=1.0, found_inf=found_inf)
        reference.sgd(arrays[0], arrays[3], low, scalars)
        assert all(np.array_equal(array, np.ones(5)) for array in arrays)
        assert low.tolist() == [7] * 5


def exact_bf16(value):
    """The nearest bf16 bits by comparing with the two neighbours in exact arithmetic; ties to even."""
    bits = int(np.float32(value).view(np.uint32))
    lower = bits >> 16
    near = [reference.widen(np.array([each], np.uint16))[0] for each in (lower, lower + 1)]
    if math.isinf(near[1]):
        near[1] = np.copysign(2.0**128, near[1])  # what the next step would be
    down, up = (abs(float(each) - float(value)) for each in near)
    return lower + (up < down or (up == down and lower % 2 == 1))


@pytest.mark.parametrize("low_half", [0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
def test_bf16_is_rounded_to_nearest_even(low_half):
    upper = np.arange(0, 0x7F80, 37, dtype=np.uint32)  # every exponent, denormals included
    upper = np.concatenate([upper, [0, 1, 0x7F7F], upper | 0x8000])
    values = ((upper << np.uint32(16)) | np.uint32(low_half)).astype(np.uint32).view(np.float32)
    found = reference.narrow(values, np.dtype(np.uint16))
    assert found.tolist() == [exact_bf16(value) for value in values]


def test_nan_stays_nan_and_inf_stays_inf():
    bits = np.array([0x7F800001, 0x7FFFFFFF, 0xFF800001, 0x7F800000, 0xFF800000], np.uint32)
    for dtype in (np.uint16, np.float16):
        wide = reference.widen(reference.narrow(bits.view(np.float32), np.dtype(dtype)))
        assert np.isnan(wide[:3]).all()
        assert wide[3:].tolist() == [math.inf, -math.inf]


def test_the_sum_of_squares_is_made_in_the_stated_order():
    values = np.random.default_rng(2).standard_normal(32768 + 37).astype(np.float32)
    total = 0.0
    for block in (values[:32768], values[32768:]):
        lanes = [0.0] * 16
        for index, value in enumerate(block.astype(np.float64).tolist()):
            lanes[index % 16] += value * value
        for half in (8, 4, 2, 1):
            lanes = [lanes[i] + lanes[i + half] for i in range(half)]
        total += lanes[0]
    assert reference.sum_of_squares(values) == np.float32(total)
    assert reference.sum_of_squares(values[:0]) == 0
