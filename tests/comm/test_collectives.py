"""Every collective against numpy, on 2 and 4 workers, over overlapping groups, for every dtype."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from ms_zero.testing import run_workers

DTYPES = {name: getattr(ms, name) for name in ("float32", "float16", "bfloat16", "int32", "int64")}
SHAPES = [(4,), (8, 3), (4, 2, 3), (4096, 3)]


def numbers(rank, shape):
    """Small integers: exact in every dtype, also when summed or multiplied over a few ranks."""
    return np.random.RandomState(rank).randint(-3, 4, shape).astype(np.float32)


def tensor(array, dtype):
    return ops.cast(Tensor(array), dtype)


def values(x):
    return ops.cast(x, ms.float32).asnumpy()


def check(x, expected, dtype):
    assert x.dtype == dtype and x.is_contiguous()
    np.testing.assert_array_equal(values(x), expected)


def check_reductions(comm, group, dtype, shape):
    everybody = [numbers(r, shape) for r in group.ranks]
    x = tensor(everybody[group.index], dtype)
    references = {"sum": np.sum, "max": np.max, "min": np.min, "prod": np.prod}
    for op, reference in references.items():
        whole = reference(everybody, axis=0)
        check(comm.all_reduce(x, group, op), whole, dtype)
        check(comm.reduce_scatter(x, group, op), np.split(whole, group.size)[group.index], dtype)
    if "float" in str(dtype).lower():  # group sizes are powers of two: exact
        check(comm.all_reduce(x, group, "avg"), np.mean(everybody, axis=0), dtype)
    check(x, everybody[group.index], dtype)


def check_movement(comm, group, dtype, shape):
    everybody = [numbers(r, shape) for r in group.ranks]
    x = tensor(everybody[group.index], dtype)
    check(comm.all_gather(x, group), np.concatenate(everybody), dtype)
    blocks = [np.split(a, group.size)[group.index] for a in everybody]
    check(comm.all_to_all(x, group), np.concatenate(blocks), dtype)
    for src in group.ranks:
        check(comm.broadcast(x, src, group), numbers(src, shape), dtype)
    after, before = (group.ranks[(group.index + step) % group.size] for step in (1, -1))
    comm.send(x, after, group)
    check(comm.recv(shape, dtype, before, group), numbers(before, shape), dtype)
    check(x, everybody[group.index], dtype)


def check_uneven_all_to_all(comm, group, dtype):
    counts = [[(3 * i + 2 * j) % 4 for j in range(group.size)] for i in range(group.size)]
    everybody = [numbers(r, (sum(counts[i]), 5)) for i, r in enumerate(group.ranks)]
    me = group.index
    received = [np.split(everybody[i], np.cumsum(counts[i])[:-1])[me] for i in range(group.size)]
    x = tensor(everybody[me], dtype)
    out = comm.all_to_all(x, group, counts[me], [row[me] for row in counts])
    check(out, np.concatenate(received), dtype)


def check_views_and_odd_shapes(comm, group):
    """Inputs that are not dense, scalars, empty tensors, sizes that no piece or shard boundary divides."""
    base = [numbers(r, (6, 8)) for r in group.ranks]
    x = Tensor(base[group.index])
    check(comm.all_reduce(x.T, group), np.sum(base, axis=0).T, ms.float32)
    check(comm.all_gather(x[2:4], group), np.concatenate([b[2:4] for b in base]), ms.float32)
    corner = np.split(np.sum(base, axis=0)[:4, 2:5], group.size)[group.index]
    check(comm.reduce_scatter(x[:4, 2:5], group), corner, ms.float32)
    check(comm.all_reduce(Tensor(np.float32(2.5)), group), np.float32(2.5 * group.size), ms.float32)
    assert comm.all_gather(Tensor(np.zeros((0, 3), np.float32)), group).shape == (0, 3)
    assert comm.all_reduce(Tensor(np.zeros((0, 3), np.float32)), group).shape == (0, 3)
    odd = 3 * (1 << 18) + 7
    big = [np.arange(odd, dtype=np.int32) * (r + 1) for r in group.ranks]
    x = Tensor(big[group.index])
    for result, expected in (
        (comm.all_reduce(x, group), np.sum(big, axis=0, dtype=np.int32)),
        (comm.all_gather(x, group), np.concatenate(big)),
        (comm.broadcast(x, group.ranks[-1], group), big[-1]),
    ):
        np.testing.assert_array_equal(result.asnumpy(), expected)


def check_results_are_fresh(comm, group):
    """Out of place: the input keeps its values and no result shares its storage."""
    values = numbers(comm.rank, (4 * group.size, 3))
    x = Tensor(values.copy())
    for result in (
        comm.all_reduce(x, group),
        comm.all_gather(x, group),
        comm.reduce_scatter(x, group),
        comm.all_to_all(x, group),
        comm.broadcast(x, group.ranks[0], group),
    ):
        assert not np.shares_memory(result.asnumpy(), x.asnumpy())
        result.asnumpy()[...] = 7
    np.testing.assert_array_equal(x.asnumpy(), values)


def check_group(comm, group):
    for name, dtype in DTYPES.items():
        for shape in SHAPES if name in ("float32", "bfloat16") else SHAPES[1:2]:
            check_reductions(comm, group, dtype, shape)
            check_movement(comm, group, dtype, shape)
        check_uneven_all_to_all(comm, group, dtype)
    check_views_and_odd_shapes(comm, group)
    check_results_are_fresh(comm, group)
    comm.barrier(group)


def worker_checks(comm):
    """The world; with 4 workers also the rows and columns of a 2 x 2 grid and a group of one."""
    groups = [comm.world]
    if comm.world_size == 4:
        row, column = divmod(comm.rank, 2)
        groups += [comm.new_group((2 * row, 2 * row + 1)), comm.new_group((column, column + 2))]
    for group in groups:
        check_group(comm, group)
    return len(groups)


@pytest.mark.parametrize("world_size", [2, 4])
def test_collectives_equal_numpy(world_size):
    expected = {2: 1, 4: 3}[world_size]
    assert run_workers(world_size, worker_checks, timeout_s=120) == [expected] * world_size


def worker_asynchronous(comm):
    """Handles waited for out of order, and twice."""
    world, x = comm.world, Tensor(np.full(4, comm.rank + 1.0, np.float32))
    handles = [
        comm.all_reduce_async(x, world),
        comm.all_gather_async(x, world),
        comm.reduce_scatter_async(x, world),
        comm.all_to_all_async(x, world),
        comm.broadcast_async(x, 1, world),
        comm.send_async(x, 1 - comm.rank, world),
        comm.recv_async((4,), ms.float32, 1 - comm.rank, world),
    ]
    results = [h.wait() for h in reversed(handles)]
    assert handles[0].wait() is results[-1]
    return [None if r is None else r.asnumpy().tolist() for r in reversed(results)]


def test_asynchronous_handles_give_the_results():
    for rank, results in enumerate(run_workers(2, worker_asynchronous)):
        assert results == [
            [3, 3, 3, 3],
            [1, 1, 1, 1, 2, 2, 2, 2],
            [3, 3],
            [1, 1, 2, 2],
            [2, 2, 2, 2],
            None,
            [2 - rank] * 4,
        ]


def worker_large_messages(comm):
    """64 MB both ways between all workers, with nobody receiving first."""
    n = 1 << 24
    x = Tensor.from_numpy(np.full(n, comm.rank, np.float32))
    others = [r for r in range(comm.world_size) if r != comm.rank]
    for r in others:
        comm.send(x, r, comm.world)
    return [float(comm.recv((n,), ms.float32, r, comm.world).asnumpy()[-1]) == r for r in others]


def test_large_sends_before_receives_do_not_block():
    assert run_workers(2, worker_large_messages, timeout_s=60) == [[True], [True]]


def worker_records_nothing(comm):
    from ms_zero import _compat

    x = Tensor(np.ones(4, np.float32))
    x.requires_grad_(True)
    with _compat.tape():
        loss = (comm.all_reduce(x, comm.world) * x).sum()
    _compat.backward(loss)
    return x._grad.asnumpy().tolist()


@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_collectives_are_constants_for_autograd(world_size):
    assert run_workers(world_size, worker_records_nothing) == [[world_size] * 4] * world_size
