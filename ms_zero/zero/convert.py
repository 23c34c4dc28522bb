"""Dtype conversion of buffers, outside of autograd."""

import mindspore as ms
from mindspore import Tensor

from ms_zero import kernels


def as_dtype(x: Tensor, dtype: ms.Type) -> Tensor:
    """``x`` itself if it has the dtype, else a new tensor; rounds to nearest even."""
    return x if x.dtype == dtype else kernels.convert(x, dtype)
