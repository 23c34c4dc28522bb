"""The fused updates and the gradient statistics of the C++ library, on addresses in host memory."""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from ms_zero.native import load_library

FP32, FP16, BF16 = range(3)
"""dtype codes of the library."""

_ADDRESS, _INT, _INT64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64


@dataclass(frozen=True)
class _Functions:
    """The C functions of one library, with their types set."""

    adamw: Callable[..., int]
    sgd: Callable[..., int]
    sum_of_squares: Callable[..., int]
    sum_of_squares_fp64: Callable[..., int]


@cache  # what is loaded never changes
def _functions(variant: str | None) -> _Functions:
    library = load_library(variant)
    grad_and_rest = (_ADDRESS, _INT, _ADDRESS, _INT, _INT64, _ADDRESS, _INT)
    library.msz_adamw.argtypes = (_ADDRESS, _ADDRESS, _ADDRESS, *grad_and_rest)
    library.msz_sgd.argtypes = (_ADDRESS, *grad_and_rest)
    sums = library.msz_sum_of_squares, library.msz_sum_of_squares_fp64
    for function, result in zip(sums, (ctypes.c_float, ctypes.c_double), strict=True):
        function.argtypes = (_ADDRESS, _INT, _INT64, ctypes.POINTER(result), _INT)
    return _Functions(library.msz_adamw, library.msz_sgd, *sums)


@dataclass(frozen=True)
class HostArray:
    """A flat array in host memory: address of the first element, elements, dtype code."""

    address: int
    size: int
    dtype: int


_NO_ARRAY = HostArray(0, 0, BF16)


def adamw(
    param: HostArray,
    exp_avg: HostArray,
    exp_avg_sq: HostArray,
    grad: HostArray,
    low_precision: HostArray | None,
    scalars: np.ndarray,
    *,
    threads: int = 0,
    variant: str | None = None,
) -> None:
    """One AdamW step, see ``ops/README.md``.

    Args:
        param: fp32, updated.
        exp_avg: fp32, updated.
        exp_avg_sq: fp32, updated.
        grad: any of the three dtypes.
        low_precision: fp16 or bf16, written; or None.
        scalars: fp32 [16].
        threads: at most so many; 0 for what OpenMP says.
        variant: instruction set of the library; None for the best.
    """
    _check_same_length(param, exp_avg, exp_avg_sq, grad, low_precision)
    low = low_precision or _NO_ARRAY
    status = _functions(variant).adamw(
        param.address,
        exp_avg.address,
        exp_avg_sq.address,
        grad.address,
        grad.dtype,
        low.address,
        low.dtype,
        param.size,
        scalars.ctypes.data,
        threads,
    )
    assert status == 0, status


def sgd(
    param: HostArray,
    grad: HostArray,
    low_precision: HostArray | None,
    scalars: np.ndarray,
    *,
    threads: int = 0,
    variant: str | None = None,
) -> None:
    """One step of gradient descent, see ``ops/README.md``; arguments as in :func:`adamw`."""
    _check_same_length(param, grad, low_precision)
    low = low_precision or _NO_ARRAY
    status = _functions(variant).sgd(
        param.address,
        grad.address,
        grad.dtype,
        low.address,
        low.dtype,
        param.size,
        scalars.ctypes.data,
        threads,
    )
    assert status == 0, status


def sum_of_squares(values: HostArray, *, threads: int = 0, variant: str | None = None) -> float:
    """The sum of squares, an fp32 value; see ``ops/README.md``."""
    result = ctypes.c_float()
    status = _functions(variant).sum_of_squares(values.address, values.dtype, values.size, result, threads)
    assert status == 0, status
    return result.value


def sum_of_squares_fp64(values: HostArray, *, threads: int = 0) -> float:
    """The same before its rounding to fp32."""
    result = ctypes.c_double()
    function = _functions(None).sum_of_squares_fp64
    status = function(values.address, values.dtype, values.size, result, threads)
    assert status == 0, status
    return result.value


def _check_same_length(first: HostArray, *others: HostArray | None) -> None:
    sizes = [other.size for other in others if other is not None]
    assert all(size == first.size for size in sizes), f"lengths differ: {first.size} and {sizes}"
