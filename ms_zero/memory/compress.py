"""Saved tensors as 8-bit numbers with one scale a block (block-wise quantisation).

Each run of `block` elements, in row-major order, is divided by scale = absmax / 127 and rounded to the
nearest of -127 ... 127. What comes back differs from what was saved by at most half a step and rounding::

    |x - x'| <= absmax(block) / 254 + u |x'|

with u = 3 * 2^-24 for fp32 and, as x' is rounded to the dtype of x, 2^-11 more for fp16 and 2^-8 more for
bf16 (up to another half step). Blocks below 1e-38 may come back as zeros.

A block with an inf or nan comes back as nan altogether, so that a gradient computed from it is not finite
either. Memory: 1 + 4 / block bytes an element.

Losses are exact, for forward sees the tensors themselves. Gradients are approximate: that of a weight, the
product of output gradients with the saved input, has an error of at most sum |dy| (absmax / 254 + u |x'|) an
element. On values of a normal distribution a block of 256 has an rms error of about 0.6 % of theirs, and so
has the gradient; the errors of neighbours are independent and do not add up in one direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from ms_zero._compat import device_target
from ms_zero.errors import UserError
from ms_zero.memory.packing import DEFAULT_MIN_BYTES, PackedActivations, pack_activations

_LEVELS = 127
DEFAULT_BLOCK = 256


def compress_activations(
    model: nn.Cell,
    *,
    cells: str | Sequence[str] | None = None,
    min_bytes: int = DEFAULT_MIN_BYTES,
    block: int = DEFAULT_BLOCK,
    offload: bool = False,
) -> PackedActivations:
    """Keep what the chosen cells save in 8 bits; see the module for the error.

    Args:
        model, cells, min_bytes: see `ms_zero.memory.packing.pack_activations`. Masks stay as they are.
        block: elements that share a scale.
        offload: whether the 8-bit form is kept in host memory.

    Raises:
        UserError: a block below 1, and what `pack_activations` refuses.
    """
    if block < 1:
        raise UserError(f"memory: a compression block of {block} elements: expected at least 1")
    return pack_activations(model, Int8Codec(block, host=offload), cells=cells, min_bytes=min_bytes)


@dataclass(frozen=True)
class Compressed:
    """int8 [blocks, block] with zeros at the end, fp32 [blocks, 1], as tensors or arrays."""

    values: Tensor | np.ndarray
    scales: Tensor | np.ndarray
    shape: tuple[int, ...]
    dtype: ms.Type


@dataclass(frozen=True)
class Int8Codec:
    """8 bits an element; see the module."""

    block: int = DEFAULT_BLOCK
    host: bool = False

    def takes(self, tensor: Tensor) -> bool:
        """See `Codec`."""
        return tensor.is_floating_point() and tensor.size > 0

    def encode(self, tensor: Tensor) -> tuple[Compressed, int, int]:
        """See `Codec`."""
        quantise = quantise_on_host if device_target() == "CPU" else quantise_on_device
        values, scales = quantise(tensor, self.block)
        if self.host:
            values, scales = values.asnumpy(), scales.asnumpy()
        size = values.nbytes + scales.nbytes
        kept = Compressed(values, scales, tuple(tensor.shape), tensor.dtype)
        return kept, 0 if self.host else size, size if self.host else 0

    def decode(self, kept: Compressed) -> Tensor:
        """See `Codec`."""
        values, scales = kept.values, kept.scales
        if self.host:
            values, scales = Tensor.from_numpy(values), Tensor.from_numpy(scales)
        restore = restore_on_host if device_target() == "CPU" else restore_on_device
        flat = restore(values, scales).reshape(-1)
        size = prod(kept.shape)
        flat = flat if flat.size == size else flat[:size]
        return flat.reshape(kept.shape).astype(kept.dtype)


def quantise_on_host(tensor: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Values and scales by numpy: thirty times as fast as MindSpore's operators on CPU."""
    rows = np.zeros((-(-tensor.size // block), block), np.float32)
    rows.reshape(-1)[: tensor.size] = tensor.asnumpy().reshape(-1)
    with np.errstate(invalid="ignore", over="ignore"):
        scales = np.abs(rows).max(axis=1, keepdims=True) * np.float32(1 / _LEVELS)
        rows /= np.where(scales > 0, scales, np.float32(1))
        values = np.rint(rows, out=rows).astype(np.int8)
    return Tensor.from_numpy(values), Tensor.from_numpy(scales)


def quantise_on_device(tensor: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """The same by MindSpore's operators."""
    flat = tensor.reshape(-1).astype(ms.float32)
    missing = -flat.size % block
    if missing:
        flat = mint.cat((flat, mint.zeros((missing,), dtype=ms.float32)))
    rows = flat.reshape(-1, block)
    scales = ops.ReduceMax(keep_dims=True)(ops.abs(rows), 1) * (1 / _LEVELS)
    divisors = ops.select(scales > 0, scales, ops.ones_like(scales))
    return ops.round(rows / divisors).astype(ms.int8), scales


def restore_on_host(values: Tensor, scales: Tensor) -> Tensor:
    """The inverse by numpy."""
    with np.errstate(invalid="ignore"):
        return Tensor.from_numpy(values.asnumpy().astype(np.float32) * scales.asnumpy())


def restore_on_device(values: Tensor, scales: Tensor) -> Tensor:
    """The inverse by MindSpore's operators."""
    return values.astype(ms.float32) * scales
