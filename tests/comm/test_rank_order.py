"""Reductions on CPU add in rank order at the owner, so their bits do not depend on the layout of calls."""

from itertools import pairwise

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_zero.testing import run_workers

SIZE = 4 * 120_001  # several pieces, shard bounds off the piece bounds


def contributions(world_size, dtype=np.float32):
    """Values over many magnitudes, so that a different order of addition gives different bits."""
    arrays = []
    for rank in range(world_size):
        random = np.random.RandomState(100 + rank)
        arrays.append((random.randn(SIZE) * 10.0 ** random.randint(-4, 5, SIZE)).astype(dtype))
    return arrays


def in_rank_order(arrays):
    total = arrays[0].astype(np.float32)
    for array in arrays[1:]:
        total = total + array.astype(np.float32)
    return total


def check_float32(comm):
    arrays = contributions(comm.world_size)
    expected = in_rank_order(arrays)
    reverse = in_rank_order(arrays[::-1])
    assert (expected != reverse).any(), "the data must be able to show a wrong order"
    x = Tensor(arrays[comm.rank])
    np.testing.assert_array_equal(comm.all_reduce(x, comm.world).asnumpy(), expected)
    mine = np.split(expected, comm.world_size)[comm.rank]
    np.testing.assert_array_equal(comm.reduce_scatter(x, comm.world).asnumpy(), mine)
    return expected


def check_splitting(comm, expected):
    """Any split into calls gives the same bits, through the small and the large path."""
    x = contributions(comm.world_size)[comm.rank]
    bounds = [0, 1, 900, 5_000, 300_000, SIZE]
    parts = [comm.all_reduce(Tensor(x[a:b]), comm.world).asnumpy() for a, b in pairwise(bounds)]
    np.testing.assert_array_equal(np.concatenate(parts), expected)
    for start in (4, 4 * 50_000):
        part = comm.reduce_scatter(Tensor(x[start : start + 4_000]), comm.world).asnumpy()
        block = 4_000 // comm.world_size
        begin = start + comm.rank * block
        np.testing.assert_array_equal(part, expected[begin : begin + block])


def check_half(comm, dtype):
    """Accumulated in float32 and rounded once."""
    rounded = [ops.cast(Tensor(a), dtype) for a in contributions(comm.world_size)]
    wide = in_rank_order([ops.cast(r, ms.float32).asnumpy() for r in rounded])
    expected = ops.cast(ops.cast(Tensor(wide), dtype), ms.float32).asnumpy()
    got = comm.all_reduce(rounded[comm.rank], comm.world)
    np.testing.assert_array_equal(ops.cast(got, ms.float32).asnumpy(), expected)


def worker(comm):
    expected = check_float32(comm)
    check_splitting(comm, expected)
    with np.errstate(over="ignore"):
        check_half(comm, ms.float16)
    check_half(comm, ms.bfloat16)
    return True


def test_bits_follow_rank_order_only():
    assert run_workers(4, worker, timeout_s=120) == [True] * 4
