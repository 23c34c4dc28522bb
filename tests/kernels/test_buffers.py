"""Flat buffers: joined, copied, overwritten."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero.kernels import concat, copy_range, overwrite

DTYPES = (ms.float32, ms.float16, ms.bfloat16)


def flat(dtype, start=0, stop=24):
    return Tensor(np.arange(start, stop, dtype=np.float32)).astype(dtype)


def values(tensor):
    return tensor.astype(ms.float32).asnumpy().tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "stop"), [(0, 24), (0, 12), (12, 24), (5, 5)])
def test_a_copy_of_a_range_has_its_own_storage(dtype, start, stop):
    buffer = flat(dtype)
    part = copy_range(buffer, start, stop)
    overwrite(buffer, flat(dtype, 100, 124))
    assert (part.dtype, values(part)) == (dtype, list(range(start, stop)))
    assert part.untyped_storage().size() == part.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_are_joined_in_order_views_too(dtype):
    buffer = flat(dtype)
    joined = concat([buffer[3:5], buffer.reshape((4, 6))[1], buffer[:0], buffer[7:8]])
    overwrite(buffer, flat(dtype, 100, 124))
    assert (joined.dtype, values(joined)) == (dtype, [3, 4, 6, 7, 8, 9, 10, 11, 7])


@pytest.mark.parametrize("dtype", DTYPES)
def test_views_see_what_overwrites_their_buffer(dtype):
    buffer = flat(dtype)
    view = buffer[2:8].reshape((2, 3))
    overwrite(buffer, flat(dtype, 100, 124))
    assert values(view) == [[102, 103, 104], [105, 106, 107]]
    with pytest.raises(AssertionError, match="view"):
        overwrite(buffer[2:4], buffer[5:7])
