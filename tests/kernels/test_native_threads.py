"""The C functions called directly: threads and instruction sets."""

import ctypes

import numpy as np
import pytest

from ms_zero.native import load_library, supported_variants

RNG = np.random.default_rng(7)
HEADS, KV_HEADS, LENGTH, DIM = 4, 2, 200, 24


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def address(value):
    return ctypes.c_void_p(value.ctypes.data) if isinstance(value, np.ndarray) else value


def call(library, name, *arguments, threads):
    numbers = [ctypes.c_float(a) if isinstance(a, float) else a for a in arguments]
    assert getattr(library, name)(*map(address, numbers), ctypes.c_int(threads)) == 0


def count(value):
    return ctypes.c_int64(value)


def everything(library, threads):
    """All outputs of all functions on fixed inputs."""
    rng = np.random.default_rng(1)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    def new(*shape):
        return np.full(shape, np.nan, np.float32)

    def run(name, *arguments):
        call(library, name, *arguments, threads=threads)

    x, up, dy, weight, bias = draw(300, 129), draw(300, 129), draw(300, 129), draw(129), draw(129)
    y, dx, dup, n = new(300, 129), new(300, 129), new(300, 129), count(x.size)
    outputs = []

    def keep(*arrays):
        outputs.extend(array.copy() for array in arrays)

    run("msz_gelu", x, y, 0, n)
    run("msz_gelu_grad", x, dy, dx, 0, n)
    keep(y, dx)
    run("msz_swiglu", x, up, y, 0, n)
    run("msz_swiglu_grad", x, up, dy, dx, dup, 0, n)
    keep(y, dx, dup)
    moments, dweight, dbias = new(300, 2), new(129), new(129)
    rows = count(300), count(129)
    run("msz_norm", x, 0, weight, bias, 0, y, moments, *rows, 1e-5)
    run("msz_norm_grad", x, dy, 0, weight, 0, moments, 1, dx, dweight, dbias, *rows)
    keep(y, moments, dx, dweight, dbias)
    run("msz_sum_rows", x, dbias, 0, *rows)
    keep(dbias)
    keep(*linear(run, draw, new))
    keep(*embedding(run, rng, draw, new))
    labels, log_sums, loss = rng.integers(0, 129, 300).astype(np.int32), new(300), new(1)
    run("msz_cross_entropy", x, 0, labels, -100, *rows, log_sums, loss)
    run("msz_cross_entropy_grad", x, 0, labels, -100, count(0), *rows, log_sums, loss, count(0), dx)
    keep(log_sums, loss, dx)
    keep(*attention(run, draw, new))
    return outputs


def linear(run, draw, new):
    outputs = []
    for rows, size_in, size_out in ((300, 129, 515), (1, 800, 40), (7, 1, 1), (100, 16, 700)):
        x, weight, bias = draw(rows, size_in), draw(size_out, size_in), draw(size_out)
        y, dx, dweight = new(rows, size_out), new(rows, size_in), new(size_out, size_in)
        sizes = [count(size) for size in (rows, size_in, size_out)]
        run("msz_linear", x, weight, bias, y, 0, *sizes)
        run("msz_linear_grad_input", y, weight, dx, 0, *sizes)
        run("msz_linear_grad_weight", y, x, dweight, 0, *sizes)
        assert np.abs(y - x @ weight.T - bias).max() < 1e-5 * np.abs(y).max()
        assert np.abs(dx - y @ weight).max() < 1e-5 * np.abs(dx).max()
        assert np.abs(dweight - y.T @ x).max() < 1e-5 * np.abs(dweight).max()
        outputs += [y, dx, dweight]
    return outputs


def embedding(run, rng, draw, new):
    table, rows, sums = draw(50, 129), new(300, 129), new(50, 129)
    indices = rng.integers(0, 50, 300).astype(np.int32)
    run("msz_rows", table, indices, rows, 0, count(300), count(129))
    run("msz_sum_by_index", rows, 0, indices, sums, count(300), count(50), count(129))
    assert np.array_equal(rows, table[indices])
    expected = np.zeros_like(sums)
    np.add.at(expected, indices, rows)
    assert np.array_equal(sums, expected)
    return [rows, sums]


def attention(run, draw, new):
    q, out, dout, dq = draw(2, LENGTH, HEADS, DIM), *(new(2, LENGTH, HEADS, DIM) for _ in range(3))
    dout[...] = q[::-1]
    (k, v), (dk, dv) = draw(2, 2, LENGTH, KV_HEADS, DIM), new(2, 2, LENGTH, KV_HEADS, DIM)
    log_sums = new(2, HEADS, LENGTH)
    sizes = [count(size) for size in (2, LENGTH, HEADS, KV_HEADS, DIM)]
    run("msz_attention", q, k, v, 0, None, out, log_sums, *sizes, 0.2)
    run("msz_attention_grad", q, k, v, out, dout, 0, None, log_sums, dq, dk, dv, *sizes, 0.2)
    cos, sin, turned = draw(LENGTH, DIM), draw(LENGTH, DIM), new(2, LENGTH, HEADS, DIM)
    run("msz_rotary", q, turned, 0, cos, sin, count(1), *sizes[:3], sizes[4], 0)
    return out, log_sums, dq, dk, dv, turned


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_bits_do_not_depend_on_the_number_of_threads(threads):
    library = load_library()
    for one, many in zip(everything(library, 1), everything(library, threads), strict=True):
        assert np.isfinite(one).all()
        assert np.array_equal(one, many)


def test_instruction_sets_agree():
    best, plain = (everything(load_library(name), 2) for name in (None, "plain"))
    for left, right in zip(best, plain, strict=True):
        assert np.abs(left - right).max() <= 5e-6 * np.abs(left).max()


def test_the_best_variant_is_used():
    assert load_library().msz_variant().decode() == supported_variants()[0].name


GIVEN = np.array([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8), 3.4e38, np.inf, np.nan, -0.0] * 5, np.float32)
ROUNDED = np.array([1, 1 + 2**-6, -1, np.inf, np.inf, np.nan, -0.0] * 5, np.float32)


def test_bf16_rounds_to_nearest_even():
    out = np.empty_like(GIVEN)
    call(load_library(), "msz_round_to", GIVEN, out, 2, count(out.size), threads=1)
    assert np.array_equal(out, ROUNDED, equal_nan=True)
    assert np.array_equal(np.signbit(out), np.signbit(ROUNDED))


def test_fp16_conversion_is_that_of_numpy():
    values = np.concatenate([normal(1000) * 10.0**power for power in (-8, -5, 0, 4, 6)]).astype(np.float32)
    out, back = np.empty(values.shape, np.float16), np.empty_like(values)
    call(load_library(), "msz_cast", values, 0, out, 1, count(values.size), threads=2)
    call(load_library(), "msz_cast", out, 1, back, 0, count(values.size), threads=2)
    with np.errstate(over="ignore"):
        assert np.array_equal(out, values.astype(np.float16))
    assert np.array_equal(back, out.astype(np.float32))
