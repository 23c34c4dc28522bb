"""What the communicator refuses, before anything is sent."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero.comm import Communicator, Group, local
from ms_zero.comm.backend import SingleBackend
from ms_zero.errors import UserError


class SilentBackend(SingleBackend):
    """Stands in for a backend of four workers: the checks must come before it is used."""

    def create_group(self, ranks):
        return "handle"


@pytest.fixture
def comm():
    return Communicator(SilentBackend(), rank=1, world_size=4)


X = Tensor(np.ones((4, 2), np.float32))


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ((0, 2), "rank 1 is not a member"),
        ((2, 1), "distinct ascending ranks"),
        ((1, 1), "distinct ascending ranks"),
        ((1, 4), "in 0..3"),
        ((-1, 1), "in 0..3"),
        ((), "distinct ascending ranks"),
    ],
)
def test_bad_groups_are_refused(comm, ranks, message):
    with pytest.raises(UserError, match=message):
        comm.new_group(ranks)


def test_a_group_of_another_rank_is_refused(comm):
    stolen = Group("tp", (0, 1), 0, "handle")
    with pytest.raises(UserError, match=r"all_reduce: group tp \(0, 1\) was made by rank 0, this is rank 1"):
        comm.all_reduce(X, stolen)
    with pytest.raises(UserError, match="expected a Group, got str"):
        comm.all_reduce(X, "tp")
    with pytest.raises(UserError, match="barrier: group tp"):
        comm.barrier(stolen)


@pytest.mark.parametrize("dtype", [ms.float64, ms.uint8, ms.int8, ms.bool_])
def test_unsupported_dtypes_are_refused(comm, dtype):
    x = Tensor(np.ones((4, 2)), dtype)
    calls = [
        lambda: comm.all_reduce(x, comm.world),
        lambda: comm.all_gather(x, comm.world),
        lambda: comm.reduce_scatter(x, comm.world),
        lambda: comm.all_to_all(x, comm.world),
        lambda: comm.broadcast(x, 0, comm.world),
        lambda: comm.send(x, 0, comm.world),
        lambda: comm.recv((1,), dtype, 0, comm.world),
    ]
    for call in calls:
        with pytest.raises(UserError, match=f"dtype {dtype} is not supported"):
            call()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: c.reduce_scatter(X[:3], c.world), r"dim 0 of \(3, 2\) is not divisible by 4 members"),
        (lambda c: c.all_to_all(X[:3], c.world), "not divisible by 4 members"),
        (lambda c: c.all_gather(Tensor(1.0), c.world), "at least 1 dim"),
        (lambda c: c.all_reduce(np.ones(3), c.world), "expected a Tensor, got ndarray"),
        (lambda c: c.all_reduce(X, c.world, "mean"), "'mean' is unknown; expected one of sum, avg"),
        (lambda c: c.all_reduce(Tensor([1, 2]), c.world, "avg"), "expects a floating-point tensor"),
        (lambda c: c.broadcast(X, 4, c.world), r"rank 4 is not in group world \(0, 1, 2, 3\)"),
        (lambda c: c.broadcast_object(1, 7), "rank 7 is not in group world"),
        (lambda c: c.send(X, 1, c.world), "rank 1 is this process itself"),
        (lambda c: c.recv((1,), ms.float32, 1, c.world), "rank 1 is this process itself"),
        (lambda c: c.send(X, 3, c.new_group((0, 1), "tp")), r"rank 3 is not in group tp \(0, 1\)"),
        (lambda c: c.all_to_all(X, c.world, [1, 1, 1, 1]), "both send_counts and recv_counts"),
        (lambda c: c.all_to_all(X, c.world, [1, 1, 2], [1, 1, 2]), "must be 4 numbers"),
        (lambda c: c.all_to_all(X, c.world, [1, 4, 0, -1], [1, 4, 0, 1]), "of at least 0"),
        (lambda c: c.all_to_all(X, c.world, [1, 1, 1, 2], [1, 1, 1, 2]), "must add up to dim 0"),
        (lambda c: c.all_to_all(X, c.world, [1, 2, 1, 0], [1, 1, 1, 0]), "2 rows to itself but expects 1"),
    ],
)
def test_bad_arguments_are_refused(comm, call, message):
    with pytest.raises(UserError, match=message):
        call(comm)


def test_a_refused_call_is_not_counted(comm):
    with pytest.raises(UserError):
        comm.reduce_scatter(X[:3], comm.world)
    assert comm.counters.total_calls() == 0


def test_the_single_process_communicator_copies():
    comm = local()
    x = Tensor(np.arange(6, dtype=np.float32).reshape(3, 2))
    results = [
        comm.all_reduce(x, comm.world, "avg"),
        comm.all_gather(x, comm.world),
        comm.reduce_scatter(x, comm.world),
        comm.all_to_all(x, comm.world),
        comm.broadcast(x, 0, comm.world),
    ]
    for result in results:
        np.testing.assert_array_equal(result.asnumpy(), x.asnumpy())
        assert result.data_ptr() != x.data_ptr()
    comm.barrier()
    prefix = comm.all_reduce(x[:2], comm.world)
    np.testing.assert_array_equal(prefix.asnumpy(), x.asnumpy()[:2])
