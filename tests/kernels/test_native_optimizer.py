"""The C++ library and the numpy reference: the same bits for every instruction set, dtype and cut."""

import numpy as np
import pytest

from ms_zero import kernels, native
from ms_zero.kernels import native_optimizer, reference
from ms_zero.kernels.host import host_array

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "step": 7}
SCALARS = reference.adamw_scalars(**HYPER, grad_scale=0.37)
SGD_SCALARS = reference.sgd_scalars(lr=0.1, weight_decay=0.1, grad_scale=0.5)
DTYPES = (np.float32, np.float16, np.uint16)

every_variant = pytest.mark.parametrize("variant", [each.name for each in native.supported_variants()])


def values(rng, n, dtype=np.float32):
    """Values of all magnitudes, and one in ten any bits: inf, NaN, denormals."""
    x = (rng.standard_normal(n) * 10.0 ** rng.integers(-12, 12, n)).astype(np.float32)
    odd = rng.integers(0, max(n, 1), n // 10)
    x[odd] = rng.integers(0, 2**32, odd.size, dtype=np.uint64).astype(np.uint32).view(np.float32)
    return x if dtype == np.float32 else reference.narrow(x, np.dtype(dtype))


def same_bits(left, right):
    with np.errstate(invalid="ignore"):
        left, right = reference.widen(left), reference.widen(right)
    real = ~np.isnan(left)
    return np.array_equal(~np.isnan(right), real) and np.array_equal(
        left[real].view(np.uint32), right[real].view(np.uint32)
    )


def copies(arrays):
    return [None if array is None else array.copy() for array in arrays]


@every_variant
@pytest.mark.parametrize("grad_dtype", DTYPES)
@pytest.mark.parametrize("low_dtype", [None, np.float16, np.uint16])
def test_both_updates_have_the_bits_of_the_reference(variant, grad_dtype, low_dtype):
    rng = np.random.default_rng(3)
    for n in (0, 1, 7, 15, 16, 17, 33, 1000, 40_001):
        arrays = [values(rng, n), values(rng, n), np.abs(values(rng, n))]
        arrays += [values(rng, n, grad_dtype), None if low_dtype is None else np.zeros(n, low_dtype)]
        ours, expected = copies(arrays), copies(arrays)
        held = [None if array is None else host_array(array) for array in ours]
        native_optimizer.adamw(*held, SCALARS, threads=2, variant=variant)
        reference.adamw(*expected, SCALARS)
        native_optimizer.sgd(held[0], *held[3:], SGD_SCALARS, threads=2, variant=variant)
        reference.sgd(expected[0], *expected[3:], SGD_SCALARS)
        pairs = [pair for pair in zip(ours, expected) if pair[0] is not None]
        assert all(same_bits(*pair) for pair in pairs)


@every_variant
@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_every_16_bit_value_is_widened_and_narrowed_exactly(variant, dtype):
    every = np.arange(2**16, dtype=np.uint32).astype(np.uint16).view(dtype)
    param, back = np.full(2**16, -0.0, np.float32), np.zeros(2**16, dtype)
    negate = np.array([1.0, -1.0, *[0.0] * 14], np.float32)  # p - (g * -1): the gradient itself, -0 included
    native_optimizer.sgd(*map(host_array, (param, every, back)), negate, variant=variant)
    assert same_bits(param, reference.widen(every))
    assert same_bits(back, every)


@every_variant
@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_values_between_16_bit_values_are_rounded_to_nearest_even(variant, dtype):
    bits = np.arange(0, 2**32, 4099, dtype=np.uint64).astype(np.uint32)  # a million, at every exponent
    ties = (np.arange(2**16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    half_way = (np.arange(2**16, dtype=np.uint32) << np.uint32(13)) + np.uint32((112 << 23) | 0x1000)
    param = np.concatenate([bits, ties, half_way]).view(np.float32)
    expected, low = reference.narrow(param, np.dtype(dtype)), np.zeros(param.size, dtype)
    leave = np.array([1.0, *[0.0] * 15], np.float32)
    arrays = param.copy(), np.zeros(param.size, np.float32), low
    native_optimizer.sgd(*map(host_array, arrays), leave, variant=variant)
    assert same_bits(low, expected)


@every_variant
def test_the_sum_of_squares_has_the_bits_of_the_reference_for_any_number_of_threads(variant):
    rng = np.random.default_rng(4)
    for n in (0, 1, 15, 17, 32_767, 32_769, 100_003):
        for dtype in DTYPES:
            x = rng.standard_normal(n).astype(np.float32)
            x = x if dtype == np.float32 else reference.narrow(x, np.dtype(dtype))
            expected = float(reference.sum_of_squares(x))
            found = [
                native_optimizer.sum_of_squares(host_array(x), threads=t, variant=variant) for t in (1, 2, 7)
            ]
            assert found == [expected] * 3


def test_neither_threads_nor_cuts_nor_alignment_change_a_bit():
    rng = np.random.default_rng(5)
    n = 100_003
    arrays = [values(rng, n), values(rng, n), np.square(rng.standard_normal(n, np.float32)), values(rng, n)]
    whole, cut = copies([*arrays, np.zeros(n, np.uint16)]), []
    native_optimizer.adamw(*map(host_array, whole), SCALARS, threads=5)
    for array in [*arrays, np.zeros(n, np.uint16)]:
        moved = np.zeros(array.nbytes + 3, np.uint8)[3:].view(array.dtype)  # at an odd address
        moved[...] = array
        cut.append(moved)
    for start, stop in ((0, 1), (1, 30_011), (30_011, 99_999), (99_999, n)):
        native_optimizer.adamw(*(host_array(array[start:stop]) for array in cut), SCALARS, threads=1)
    assert all(same_bits(*pair) for pair in zip(whole, cut))


def test_a_flush_to_zero_that_the_process_has_set_is_not_seen(tmp_path):
    """Libraries built with -ffast-math set it for the thread that loads them."""
    import ctypes
    import subprocess

    source = tmp_path / "flush.c"
    source.write_text(
        "#include <xmmintrin.h>\nvoid set(int on) { _mm_setcsr(on ? _mm_getcsr() | 0x8040 : 0x1f80); }\n"
    )
    library = source.with_suffix(".so")
    if subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(library)]).returncode:
        pytest.skip("not an x86 processor")
    tiny = np.full(8, 1e-40, np.float32)  # a denormal
    low, halves = np.zeros(8, np.float16), np.full(8, 1e-7, np.float16)
    leave = np.array([1.0, *[0.0] * 15], np.float32)
    small, total = np.full(4, 1e-21, np.float32), np.zeros(1, np.float32)
    add = native_optimizer._functions(None).sum_of_squares
    result = total.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    flush = ctypes.CDLL(str(library)).set
    flush(1)
    try:
        native_optimizer.sgd(*map(host_array, (tiny, halves, low)), leave)
        add(small.ctypes.data, native_optimizer.FP32, 4, result, 1)
    finally:
        flush(0)
    assert np.array_equal(tiny, np.full(8, 1e-40, np.float32))
    assert total[0] == np.float32(4 * float(np.float32(1e-21)) ** 2) > 0


def test_bad_arguments_have_codes_of_their_own():
    library, x = native.load_library(), np.zeros(16, np.float32)
    p = x.ctypes.data
    adamw = native_optimizer._functions(None).adamw
    assert library is native.load_library()
    assert adamw(p, p, p, p, 3, None, 0, 1, p, 1) == -1
    assert adamw(p, p, p, p, 0, p, 0, 1, p, 1) == -1
    assert adamw(p, p, p, p, 0, None, 0, -1, p, 1) == -2
    assert adamw(None, p, p, p, 0, None, 0, 1, p, 1) == -3
    assert adamw(None, None, None, None, 0, None, 0, 0, p, 1) == 0


def host_case(n=50):
    rng = np.random.default_rng(6)
    arrays = [rng.standard_normal(n).astype(np.float32) for _ in range(3)]
    return [arrays[0], arrays[1], np.square(arrays[2]), rng.standard_normal(n).astype(np.float32)]


def test_host_updates_are_the_same_natively_and_in_numpy():
    results = {}
    for target in ("CPU", "CPU-portable", None):
        arrays, low = host_case(), np.zeros(50, np.float16)
        kernels.adamw_update_host(*arrays, **HYPER, grad_scale=0.5, low_precision=low, target=target)
        kernels.sgd_update_host(arrays[0], arrays[3], lr=0.1, weight_decay=0.5, target=target)
        total = kernels.sum_of_squares_host(arrays[0], target=target)
        results[target] = [*arrays, low, np.float32(total)]
    for found in results.values():
        assert all(np.array_equal(*pair) for pair in zip(found, results["CPU"]))


def test_host_updates_refuse_what_they_would_get_wrong():
    arrays = host_case()
    with pytest.raises(AssertionError, match="contiguous"):
        kernels.adamw_update_host(*arrays[:3], np.zeros(100, np.float32)[::2], **HYPER)
    with pytest.raises(AssertionError, match="one length"):
        kernels.adamw_update_host(*arrays[:3], arrays[3][:-1], **HYPER)
    with pytest.raises(AssertionError, match="float64"):
        kernels.adamw_update_host(*arrays[:3], arrays[3].astype(np.float64), **HYPER)
    with pytest.raises(AssertionError, match="low_precision"):
        kernels.adamw_update_host(*arrays, **HYPER, low_precision=np.zeros(50, np.float32))
    arrays[1].flags.writeable = False
    with pytest.raises(AssertionError, match="read-only"):
        kernels.adamw_update_host(*arrays, **HYPER)
