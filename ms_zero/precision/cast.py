"""Casts of activations, with gradients, and the bits of bf16.

bf16 is the upper half of fp32 (8 exponent bits, 7 of the mantissa); numpy has no dtype for it, so its bits
are uint16 here. All roundings are to nearest even; denormals are kept, NaN stays NaN, values beyond the
largest finite one become inf.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_zero._compat import function_class
from ms_zero.kernels.rounding import convert, round_to
from ms_zero.precision.policy import DTYPES

_HALF_BITS = np.uint32(16)
_HALF = np.uint32(0x7FFF)
_UPPER = np.uint32(0xFFFF0000)
_QUIET = np.uint32(0x00400000)


def to_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 values of any shape to bf16; returns its bits, uint16."""
    return np.ascontiguousarray(_rounded_bits(values).view(np.uint16)[1::2]).reshape(values.shape)


def from_bits(bits: np.ndarray) -> np.ndarray:
    """The float32 values of bf16 bits (uint16 of any shape); exact."""
    assert bits.dtype == np.uint16, bits.dtype
    wide = bits.astype(np.uint32)
    wide <<= _HALF_BITS
    return wide.view(np.float32)


def round_array(values: np.ndarray) -> np.ndarray:
    """A new float32 array: each value rounded to the nearest one that bf16 can represent."""
    return _rounded_bits(values).view(np.float32).reshape(values.shape)


def round_to_grid(x: Tensor, grid: str) -> Tensor:
    """Round an fp32 tensor to the values of a 16-bit dtype ("bf16", "fp16"), and so its gradient.

    What native 16-bit arithmetic does at the end of an operation, for devices without kernels for it. Keeps
    nothing for backward.
    """
    return _RoundToGrid.apply(x, DTYPES[grid])


def round_gradient(x: Tensor, grid: str) -> Tensor:
    """`round_to_grid` for values that are on the grid already: shares their storage, rounds the gradient."""
    return _RoundGradient.apply(x, DTYPES[grid])


def cast(x: Tensor, dtype: ms.Type) -> Tensor:
    """Convert a float tensor; its gradient is converted back. Keeps nothing for backward.

    x itself when it has the dtype.
    """
    return x if x.dtype == dtype else _Cast.apply(x, dtype)


def _rounded_bits(values: np.ndarray) -> np.ndarray:
    """Flat fp32 bits with the lower halves rounded away."""
    assert values.dtype == np.float32, values.dtype
    flat = np.ascontiguousarray(values).reshape(-1)
    bits = flat.view(np.uint32)
    # Half of the last kept place, less one when that place is even: the carry does the rounding.
    rounded = bits >> _HALF_BITS
    rounded &= 1
    rounded += _HALF
    rounded += bits
    rounded &= _UPPER
    nan = np.isnan(flat)
    if nan.any():  # the carry may have turned a NaN into inf or zero
        rounded[nan] = (bits[nan] & _UPPER) | _QUIET
    return rounded


class _RoundToGrid(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: ms.Type) -> Tensor:
        ctx.grid = grid
        return round_to(x, grid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return round_to(grad, ctx.grid), None


class _RoundGradient(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: ms.Type) -> Tensor:
        ctx.grid = grid
        return x  # the caller gets a new tensor on the same storage

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return round_to(grad, ctx.grid), None


class _Cast(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: ms.Type) -> Tensor:
        ctx.dtype = x.dtype
        return convert(x, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return convert(grad, ctx.dtype), None
