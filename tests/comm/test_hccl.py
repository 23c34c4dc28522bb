"""Which ``mint.distributed`` call each collective issues on Ascend, recorded by a stand-in."""

import inspect

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint
from mindspore.mint.distributed import distributed

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
        signature = inspect.signature(getattr(mint.distributed, name))

        def record(*args, **kwargs):
            signature.bind(*args, **kwargs)
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


@pytest.fixture
def native(monkeypatch):
    """(operator, arguments) of each call; `mint.distributed` itself runs, without its compiled operators."""
    calls = []
    for name in [name for name in vars(distributed) if name.startswith("dist_comm_")]:
        monkeypatch.setattr(distributed, name, lambda *args, name=name: calls.append((name, args)) or args[0])
    monkeypatch.setattr(distributed, "get_cache_group_size", lambda group: 2)
    monkeypatch.setattr(distributed, "get_cache_group_rank", lambda group=None: 2 if group is None else 0)
    for name in ("get_group_rank_from_world_rank", "_get_group_rank_from_world_rank_from_cache_helper"):
        monkeypatch.setattr(distributed, name, lambda rank, group: {2: 0, 3: 1}[rank])
    return calls


def test_the_framework_takes_the_arguments_to_its_operators(native):
    """Sizes, counts in elements and ranks within the group are what the framework makes of our calls."""
    comm = Communicator(HCCLBackend(create_group=lambda *args: None), rank=2, world_size=4)
    tp = comm.new_group((2, 3), "tp")
    comm.all_reduce(X, tp, "prod")
    comm.all_gather(X, tp)
    comm.reduce_scatter(X, tp)
    comm.all_to_all(X, tp, [8, 0], [8, 5])
    comm.broadcast(X, 3, tp)
    comm.send(X, 3, tp)
    comm.recv((8, 3), ms.float16, 3, tp)
    comm.barrier(tp)
    issued = {name: [a for a in args if not isinstance(a, Tensor)] for name, args in native}
    assert issued == {
        "dist_comm_all_reduce_op": ["prod", TP, True],
        "dist_comm_all_gather_into_tensor_op": [2, TP, True],
        "dist_comm_reduce_scatter_tensor_op": [2, "sum", TP, True],
        "dist_comm_all_to_all_v_single_op": [TP, [24, 0], [24, 15], 2, False, True],
        "dist_comm_broadcast_op": [1, 0, TP, True],
        "dist_comm_isend_op": [1, TP, 0],
        "dist_comm_irecv_op": [0, 1, TP],
        "dist_comm_barrier_op": [TP, False],
    }
