"""Which ``mint.distributed`` call each collective issues on Ascend, recorded by a stand-in."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint

from ms_zero.comm import Communicator
from ms_zero.comm.hccl import HCCLBackend, group_name


class Work:
    def __init__(self):
        self.waits = 0

    def wait(self):
        self.waits += 1


class RecordingDist:
    """Records (function, tensors as (shape, dtype), other arguments) and fills nothing."""

    def __init__(self):
        self.calls, self.tensors, self.works = [], [], []

    def __getattr__(self, name):
        assert hasattr(mint.distributed, name), f"mint.distributed has no {name}"

        def record(*args, **kwargs):
            tensors = [a for a in args if isinstance(a, Tensor)]
            for t in tensors:
                assert t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes, "a view was passed"
            self.tensors += tensors
            shapes = [tuple(t.shape) for t in tensors]
            self.calls.append((name, shapes, [a for a in args if not isinstance(a, Tensor)], kwargs))
            self.works.append(Work())
            return self.works[-1]

        return record


@pytest.fixture
def dist():
    return RecordingDist()


@pytest.fixture
def created():
    return []


@pytest.fixture
def comm(dist, created):
    """Rank 2 of 4; its group "tp" is (2, 3)."""
    return Communicator(HCCLBackend(dist, lambda *args: created.append(args)), rank=2, world_size=4)


@pytest.fixture
def tp(comm):
    return comm.new_group((2, 3), "tp")


X = Tensor(np.arange(24, dtype=np.float32).reshape(8, 3))
TP = group_name((2, 3))


def test_groups_are_created_once_under_a_name_that_members_agree_on(comm, created):
    first, again = comm.new_group((2, 3)), comm.new_group((2, 3), "other")
    assert created == [(TP, [2, 3])]
    assert first.handle == again.handle == TP
    assert group_name((2, 3)) != group_name((23,))


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda c, g: c.all_reduce(X, g, "max"),
            ("all_reduce", [(8, 3)], [], {"op": "max", "group": TP, "async_op": True}),
        ),
        (
            lambda c, g: c.all_reduce(X, g, "avg"),
            ("all_reduce", [(8, 3)], [], {"op": "sum", "group": TP, "async_op": True}),
        ),
        (
            lambda c, g: c.all_gather(X, g),
            ("all_gather_into_tensor", [(16, 3), (8, 3)], [], {"group": TP, "async_op": True}),
        ),
        (
            lambda c, g: c.reduce_scatter(X, g, "avg"),
            ("reduce_scatter_tensor", [(4, 3), (8, 3)], [], {"op": "sum", "group": TP, "async_op": True}),
        ),
        (
            lambda c, g: c.all_to_all(X, g),
            (
                "all_to_all_single",
                [(8, 3), (8, 3)],
                [],
                {"output_split_sizes": [4, 4], "input_split_sizes": [4, 4], "group": TP, "async_op": True},
            ),
        ),
        (
            lambda c, g: c.all_to_all(X, g, [8, 0], [8, 5]),
            (
                "all_to_all_single",
                [(13, 3), (8, 3)],
                [],
                {"output_split_sizes": [8, 5], "input_split_sizes": [8, 0], "group": TP, "async_op": True},
            ),
        ),
        (
            lambda c, g: c.broadcast(X, 3, g),
            ("broadcast", [(8, 3)], [3], {"group": TP, "async_op": True}),
        ),
        (lambda c, g: c.send(X, 3, g), ("isend", [(8, 3)], [3], {"group": TP})),
        (lambda c, g: c.recv((8, 3), ms.bfloat16, 3, g), ("irecv", [(8, 3)], [3], {"group": TP})),
        (lambda c, g: c.barrier(g), ("barrier", [], [], {"group": TP})),
    ],
)
def test_each_collective_issues_one_native_call(comm, tp, dist, call, expected):
    call(comm, tp)
    assert dist.calls == [expected]


def test_outputs_are_fresh_and_inputs_dense(comm, tp, dist):
    for x in (X[2:6], X[:4], X.T, X):
        rows = x.shape[0] - x.shape[0] % 2
        for result in (comm.all_reduce(x, tp), comm.all_gather(x, tp), comm.broadcast(x, 2, tp)):
            assert result.data_ptr() != x.data_ptr()
        comm.reduce_scatter(x[:rows], tp)
        comm.send(x, 3, tp)
    np.testing.assert_array_equal(X.asnumpy(), np.arange(24).reshape(8, 3))


def test_contributions_hold_the_input_and_average_divides(comm, tp, dist):
    assert comm.all_reduce(X, tp).asnumpy().tolist() == X.asnumpy().tolist(), "the stand-in adds nothing"
    assert comm.all_reduce(X, tp, "avg").asnumpy().tolist() == (X.asnumpy() / 2).tolist()
    half = comm.all_reduce(X.astype(ms.bfloat16), tp, "avg")
    assert half.dtype == ms.bfloat16


def test_wait_reaches_the_native_handle_once(comm, tp, dist):
    handle = comm.all_gather_async(X, tp)
    assert dist.works[0].waits == 0
    handle.wait()
    handle.wait()
    assert dist.works[0].waits == 1


def test_the_world_uses_the_framework_group(comm, dist):
    comm.all_gather(X, comm.world)
    assert dist.calls[0][3]["group"] == comm.world.handle


def test_single_groups_call_nothing(comm, dist):
    comm.all_reduce(X, comm.new_group((2,)))
    assert dist.calls == []
