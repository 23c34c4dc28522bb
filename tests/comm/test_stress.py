"""Several hundred random collectives over overlapping groups, the same sequence on all workers."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from ms_zero.testing import run_workers

DTYPES = (ms.float32, ms.float16, ms.bfloat16, ms.int32, ms.int64)
OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "send_recv",
    "exchange",
)


def partition(random, world_size):
    """A random partition of the world into groups."""
    labels = random.randint(0, 1 + random.randint(world_size), world_size)
    return [tuple(np.flatnonzero(labels == label).tolist()) for label in np.unique(labels)]


def data(step, rank, rows, columns):
    return np.random.RandomState(1000 * step + rank).randint(-4, 5, (rows, columns)).astype(np.float32)


def run_operation(name, comm, group, dtype, arrays, counts):
    """Issue one operation; return (result, expected) as float32 arrays."""
    size, me = group.size, group.index
    x = ops.cast(Tensor(arrays[me]), dtype)
    if name == "all_reduce":
        return comm.all_reduce(x, group), np.sum(arrays, axis=0)
    if name == "all_gather":
        return comm.all_gather(x, group), np.concatenate(arrays)
    if name == "reduce_scatter":
        return comm.reduce_scatter(x, group, "max"), np.split(np.max(arrays, axis=0), size)[me]
    if name == "broadcast":
        root = int(counts[0, 0]) % size
        return comm.broadcast(x, group.ranks[root], group), arrays[root]
    if name == "send_recv":
        return ring(comm, group, x), arrays[(me - 1) % size]
    sends = [np.split(a[: c.sum()], np.cumsum(c)[:-1])[me] for a, c in zip(arrays, counts)]
    x = x[: int(counts[me].sum())]
    return comm.all_to_all(x, group, counts[me].tolist(), counts[:, me].tolist()), np.concatenate(sends)


def ring(comm, group, x):
    if group.size == 1:
        return x
    comm.send(x, group.ranks[(group.index + 1) % group.size], group)
    return comm.recv(x.shape, x.dtype, group.ranks[(group.index - 1) % group.size], group)


def worker(comm, seed, steps):
    random = np.random.RandomState(seed)
    for step in range(steps):
        groups = partition(random, comm.world_size)
        name = OPERATIONS[random.randint(len(OPERATIONS))]
        dtype = DTYPES[random.randint(len(DTYPES))]
        scale, columns = int(2 ** random.randint(0, 12)), int(random.randint(1, 4))
        ranks = next(g for g in groups if comm.rank in g)
        counts = np.random.RandomState(seed + step).randint(0, 1 + scale, (len(ranks), len(ranks)))
        group = comm.new_group(ranks)
        if name == "exchange":
            assert comm.exchange({"é": [step, comm.rank]}, group) == [{"é": [step, r]} for r in ranks]
            continue
        arrays = [data(step, r, scale * len(ranks), columns) for r in ranks]
        result, expected = run_operation(name, comm, group, dtype, arrays, counts)
        got = ops.cast(result, ms.float32).asnumpy()
        np.testing.assert_array_equal(got, expected, err_msg=f"step {step}: {name} {dtype} on {ranks}")
    return steps


@pytest.mark.parametrize("world_size", [2, 4])
def test_random_operations_equal_numpy(world_size):
    assert run_workers(world_size, worker, 7 + world_size, 300, timeout_s=120) == [300] * world_size
