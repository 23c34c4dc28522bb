"""Conversions between the float dtypes, without gradients: `ms_zero.precision` has the differentiable ones.

All round to nearest even; denormals are kept, NaN stays NaN, values beyond the range become inf.
"""

import mindspore as ms
from mindspore import Tensor, mint

from ms_zero.kernels import cpu
from ms_zero.kernels.dispatch import select


def convert(x: Tensor, dtype: ms.Type, *, target: str | None = None) -> Tensor:
    """A new tensor with the values of x (fp32, fp16 or bf16, any shape) in another of these dtypes."""
    implementations = {"CPU": _convert_native, **dict.fromkeys(("CPU-portable", "GPU", "Ascend"), _convert)}
    return select("convert", implementations, target)(x, dtype)


def _convert_native(x: Tensor, dtype: ms.Type) -> Tensor:
    x, out = cpu.packed(x), mint.empty(x.shape, dtype=dtype)
    cpu.call("msz_cast", x, cpu.dtype_code(x), out, cpu.dtype_code(out), x.size)
    return out


def _convert(x: Tensor, dtype: ms.Type) -> Tensor:
    out = mint.empty(x.shape, dtype=dtype)
    out.copy_(x)
    return out


def round_to(x: Tensor, grid: ms.Type, *, target: str | None = None) -> Tensor:
    """A new fp32 tensor: each value of x (fp32) rounded to the nearest one that `grid` (fp16, bf16) has."""
    implementations = {"CPU": _round_native, **dict.fromkeys(("CPU-portable", "GPU", "Ascend"), _round)}
    return select("round_to", implementations, target)(x, grid)


def _round_native(x: Tensor, grid: ms.Type) -> Tensor:
    assert x.dtype == ms.float32, x.dtype
    x = cpu.packed(x)
    out = cpu.like(x)
    cpu.call("msz_round_to", x, out, cpu.dtype_code(mint.empty((0,), dtype=grid)), x.size)
    return out


def _round(x: Tensor, grid: ms.Type) -> Tensor:
    return _convert(_convert(x, grid), ms.float32)
