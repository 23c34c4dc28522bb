"""Dtype conversion of buffers and parts of them, outside of autograd."""

import mindspore as ms
from mindspore import Tensor

from ms_zero import kernels
from ms_zero._compat import device_target, host_view
from ms_zero.zero.layout import Slot


def as_dtype(x: Tensor, dtype: ms.Type) -> Tensor:
    """``x`` itself if it has the dtype, else a new tensor; rounds to nearest even."""
    return x if x.dtype == dtype else kernels.convert(x, dtype)


def part_of(full: Tensor, slot: Slot) -> Tensor:
    """The parameter inside the whole buffer, in its own shape, on the buffer's storage.

    On CPU it is no view for the framework. Operators copy a view first, and autograd keeps that copy, or the
    whole storage, until backward; of a parameter that is no view it keeps the Parameter, so that its data can
    be freed and fetched again.
    """
    if device_target() == "CPU":
        return Tensor.from_numpy(slot.view(host_view(full)))
    return slot.view(full)
