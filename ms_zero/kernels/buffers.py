"""Buffers, outside of autograd: joined, copied, overwritten, put in another order.

On CPU numpy does it, on the storage of the tensors. There ``ops.cat`` and ``copy_`` lose 0.7 KB of memory a
call, ``Tensor.copy`` takes 25 times as long, and ``copy_`` refuses a leading part of a tensor.
"""

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_zero._compat import finish_queued, host_view, numpy_dtype
from ms_zero.kernels.dispatch import resolve_target


def concat(parts: Sequence[Tensor]) -> Tensor:
    """A new tensor: flat parts of one dtype, one after another."""
    if not _on_cpu():
        return ops.cat(list(parts))
    joined = np.empty(sum(part.size for part in parts), _bits(parts[0]).dtype)
    start = 0
    for part in parts:
        joined[start : start + part.size] = _bits(part)
        start += part.size
    return _tensor(joined, parts[0].dtype)


def copy_range(flat: Tensor, start: int, stop: int) -> Tensor:
    """A new tensor with the elements ``[start, stop)``, on a storage of its own."""
    if not _on_cpu():
        return flat[start:stop].copy()
    return _tensor(_bits(flat)[start:stop].copy(), flat.dtype)


def overwrite(target: Tensor, values: Tensor) -> None:
    """Write as many values of the same dtype into a flat tensor that owns its storage; its views see them."""
    if not _on_cpu():
        target.copy_(values)
        return
    assert target.untyped_storage().size() == target.nbytes, "of a view a copy would be written"
    np.copyto(_bits(target), _bits(values))


def take_rows(rows: Tensor, order: np.ndarray) -> Tensor:
    """A new tensor: rows of the first dim by number; ``order`` is int32."""
    if not _on_cpu():
        return ops.gather(rows, Tensor(order), 0)
    return _tensor(np.take(_bits(rows.contiguous()), order, axis=0), rows.dtype)


def _on_cpu() -> bool:
    return resolve_target(None).startswith("CPU")


def _bits(tensor: Tensor) -> np.ndarray:
    """The values of a flat CPU tensor, on its storage unless it is a view; bf16 as its bits."""
    finish_queued()
    values = host_view(tensor)
    return values.view(np.uint16) if tensor.dtype == ms.bfloat16 else values


def _tensor(bits: np.ndarray, dtype: ms.Type) -> Tensor:
    return Tensor.from_numpy(bits.view(numpy_dtype(dtype)))
