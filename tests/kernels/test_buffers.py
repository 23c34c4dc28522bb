"""Copies of parts of flat buffers."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero.kernels import copy_range

DTYPES = (ms.float32, ms.float16, ms.bfloat16)


def flat(dtype):
    return Tensor(np.arange(24, dtype=np.float32)).astype(dtype)


def values(tensor):
    return tensor.astype(ms.float32).asnumpy().tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "stop"), [(0, 24), (0, 12), (12, 24), (5, 5)])
def test_a_copy_of_a_range_has_its_own_storage(dtype, start, stop):
    buffer = flat(dtype)
    part = copy_range(buffer, start, stop)
    buffer.copy_(flat(dtype) + flat(dtype))
    assert (part.dtype, values(part)) == (dtype, list(range(start, stop)))
    assert part.untyped_storage().size() == part.nbytes
