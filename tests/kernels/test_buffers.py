"""Parts of flat buffers: what shares a storage and what owns one."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero.kernels import as_parameter, copy_range

DTYPES = (ms.float32, ms.float16, ms.bfloat16)


def flat(dtype):
    return Tensor(np.arange(24, dtype=np.float32)).astype(dtype)


def values(tensor):
    return tensor.astype(ms.float32).asnumpy().tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_parameter_sees_what_is_written_into_the_buffer(dtype):
    buffer = flat(dtype)
    param, scalar = as_parameter(buffer, 2, 8, (2, 3)), as_parameter(buffer, 23, 24, ())
    assert values(param) == [[2, 3, 4], [5, 6, 7]]
    buffer.copy_(flat(dtype) + flat(dtype))
    assert values(param) == [[4, 6, 8], [10, 12, 14]]
    assert (scalar.shape, values(scalar)) == ((), 46)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "stop"), [(0, 24), (0, 12), (12, 24), (5, 5)])
def test_a_copy_of_a_range_has_its_own_storage(dtype, start, stop):
    buffer = flat(dtype)
    part = copy_range(buffer, start, stop)
    buffer.copy_(flat(dtype) + flat(dtype))
    assert (part.dtype, values(part)) == (dtype, list(range(start, stop)))
    assert part.untyped_storage().size() == part.nbytes
