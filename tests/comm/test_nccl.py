"""Which legacy primitive each collective issues on GPU, recorded by stand-ins.

Each stand-in answers as if the other member of the two-member group held the same data.
"""

import inspect

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops
from mindspore.ops.operations import comm_ops

from ms_zero.comm import Communicator
from ms_zero.comm.hccl import group_name
from ms_zero.comm.nccl import NCCLBackend


class RecordingPrimitives:
    """Records (primitive, attributes, [(shape, dtype) of each input])."""

    def __init__(self):
        self.calls, self.built = [], 0

    def __getattr__(self, name):
        primitive = getattr(comm_ops, name)
        assert primitive.__call__ is ops.Primitive.__call__, f"{name} cannot be called outside of graphs"
        assert name in KERNELS, f"{name} has no GPU kernel outside of graphs"

        def build(**attributes):
            self.built += 1
            inspect.signature(primitive).bind(**attributes)

            def run(x):
                inputs = x if isinstance(x, tuple) else (x,)
                for t in inputs:
                    assert t.is_contiguous() and t.untyped_storage().nbytes() == t.nbytes, "a view was passed"
                described = [(tuple(t.shape), t.dtype) for t in inputs]
                self.calls.append((name, attributes, described))
                return ANSWERS[name](x, attributes)

            return run

        return build


# What the documentation of the primitives lists for GPU; AlltoAll and NeighborExchange only list Ascend.
KERNELS = {"AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Send", "Receive"}

ANSWERS = {
    "AllReduce": lambda x, a: x * 2 if a["op"] == "sum" else x * 1,
    "AllGather": lambda x, a: ops.concat((x, x)),
    "ReduceScatter": lambda x, a: x[: x.shape[0] // 2] * 2,
    "Broadcast": lambda xs, a: tuple(x * 1 for x in xs),
    "Send": lambda x, a: None,
    "Receive": lambda x, a: Tensor(np.full(a["shape"], 7), a["dtype"]),
}


@pytest.fixture
def primitives():
    return RecordingPrimitives()


@pytest.fixture
def comm(primitives):
    """Rank 2 of 4; its group "tp" is (2, 3)."""
    return Communicator(NCCLBackend(primitives, lambda *args: None), rank=2, world_size=4)


@pytest.fixture
def tp(comm):
    return comm.new_group((2, 3), "tp")


TP = group_name((2, 3))
VALUES = np.arange(8, dtype=np.float32).reshape(4, 2)
F32, F16, BF16, I32, I64 = ms.float32, ms.float16, ms.bfloat16, ms.int32, ms.int64


def x_of(dtype):
    return ops.cast(Tensor(VALUES), dtype)


def values(x):
    return ops.cast(x, F32).asnumpy().tolist()


@pytest.mark.parametrize(
    ("dtype", "call", "expected"),
    [
        (F32, lambda c, x, g: c.all_reduce(x, g),
         ("AllReduce", {"op": "sum", "group": TP}, [((4, 2), F32)])),
        (F32, lambda c, x, g: c.all_reduce(x, g, "avg"),
         ("AllReduce", {"op": "sum", "group": TP}, [((4, 2), F32)])),
        (I64, lambda c, x, g: c.all_reduce(x, g, "max"),
         ("AllReduce", {"op": "max", "group": TP}, [((4, 2), I64)])),
        (BF16, lambda c, x, g: c.all_reduce(x, g),
         ("AllReduce", {"op": "sum", "group": TP}, [((4, 2), F32)])),
        (F16, lambda c, x, g: c.reduce_scatter(x, g),
         ("ReduceScatter", {"op": "sum", "group": TP}, [((4, 2), F16)])),
        (BF16, lambda c, x, g: c.reduce_scatter(x, g, "min"),
         ("ReduceScatter", {"op": "min", "group": TP}, [((4, 2), F32)])),
        (I32, lambda c, x, g: c.all_gather(x, g), ("AllGather", {"group": TP}, [((4, 2), I32)])),
        (BF16, lambda c, x, g: c.all_gather(x, g), ("AllGather", {"group": TP}, [((4, 2), F16)])),
        (F32, lambda c, x, g: c.broadcast(x, 3, g),
         ("Broadcast", {"root_rank": 1, "group": TP}, [((4, 2), F32)])),
        (F32, lambda c, x, g: c.send(x, 3, g),
         ("Send", {"sr_tag": 0, "dest_rank": 1, "group": TP}, [((8,), F32)])),
        (BF16, lambda c, x, g: c.send(x, 3, g),
         ("Send", {"sr_tag": 0, "dest_rank": 1, "group": TP}, [((8,), F16)])),
        (I64, lambda c, x, g: c.send(x, 3, g),
         ("Send", {"sr_tag": 0, "dest_rank": 1, "group": TP}, [((16,), I32)])),
        (I64, lambda c, x, g: c.recv((4, 2), I64, 3, g),
         ("Receive", {"sr_tag": 0, "src_rank": 1, "shape": (16,), "dtype": I32, "group": TP}, [((), F32)])),
        (F32, lambda c, x, g: c.barrier(g), ("AllReduce", {"op": "sum", "group": TP}, [((1,), I32)])),
    ],
)  # fmt: skip
def test_each_collective_issues_one_primitive(comm, tp, primitives, dtype, call, expected):
    call(comm, x_of(dtype), tp)
    assert primitives.calls == [expected]


@pytest.mark.parametrize("dtype", [F32, F16, BF16, I32, I64])
def test_results_keep_dtype_and_shape(comm, tp, dtype):
    x, v = x_of(dtype), VALUES
    results = {
        "all_reduce": (comm.all_reduce(x, tp), v * 2),
        "all_gather": (comm.all_gather(x, tp), np.concatenate([v, v])),
        "reduce_scatter": (comm.reduce_scatter(x, tp), v[:2] * 2),
        "broadcast": (comm.broadcast(x, 2, tp), v),
    }
    for name, (result, expected) in results.items():
        assert result.dtype == dtype, name
        assert values(result) == expected.tolist(), name
    received = comm.recv((3, 2), dtype, 3, tp)
    assert received.dtype == dtype and received.shape == (3, 2)


def test_average_divides_the_sum(comm, tp):
    assert values(comm.all_reduce(x_of(BF16), tp, "avg")) == VALUES.tolist()
    assert values(comm.reduce_scatter(x_of(F32), tp, "avg")) == VALUES[:2].tolist()


@pytest.mark.parametrize(("dtype", "wire", "factor"), [(F32, F32, 1), (BF16, F16, 1), (I64, I32, 2)])
def test_all_to_all_swaps_blocks_and_keeps_its_own(comm, tp, primitives, dtype, wire, factor):
    out = comm.all_to_all(x_of(dtype), tp, [1, 3], [1, 2])
    peer = {"sr_tag": 0, "group": TP}
    assert primitives.calls == [
        ("Send", {**peer, "dest_rank": 1}, [((6 * factor,), wire)]),
        ("Receive", {**peer, "src_rank": 1, "shape": (4 * factor,), "dtype": wire}, [((), F32)]),
    ]
    assert out.dtype == dtype and out.shape == (3, 2)
    assert values(out[:1]) == VALUES[:1].tolist(), "one's own rows come first, from this process"


def test_the_higher_rank_of_a_pair_receives_first(comm, primitives):
    comm.all_to_all(x_of(F32), comm.world)
    order = [(name, a.get("dest_rank", a.get("src_rank"))) for name, a, _ in primitives.calls]
    assert order == [("Receive", 0), ("Send", 0), ("Receive", 1), ("Send", 1), ("Send", 3), ("Receive", 3)]


def test_members_without_rows_for_each_other_exchange_nothing(comm, primitives):
    out = comm.all_to_all(x_of(F32), comm.world, [2, 0, 1, 1], [0, 0, 1, 3])
    order = [(name, a.get("dest_rank", a.get("src_rank"))) for name, a, _ in primitives.calls]
    assert order == [("Send", 0), ("Send", 3), ("Receive", 3)]
    assert values(out) == [VALUES[2].tolist(), [7, 7], [7, 7], [7, 7]]


def test_nothing_to_exchange_issues_nothing(comm, tp, primitives):
    out = comm.all_to_all(x_of(F32)[:0], tp, [0, 0], [0, 0])
    assert out.shape == (0, 2) and primitives.calls == []
    own = comm.all_to_all(x_of(F32), tp, [4, 0], [4, 0])
    assert values(own) == VALUES.tolist() and primitives.calls == []


def test_views_are_made_dense(comm, tp, primitives):
    x = x_of(F32)
    for view in (x[2:], x[:2], x.T):
        comm.all_reduce(view, tp)
        comm.all_gather(view, tp)
        comm.send(view, 3, tp)
        comm.all_to_all(view, tp)
    assert {name for name, _, _ in primitives.calls} == {"AllReduce", "AllGather", "Send", "Receive"}


def test_primitives_are_built_once(comm, tp, primitives):
    for _ in range(3):
        comm.all_reduce(x_of(F32), tp)
    assert primitives.built == 1
    comm.all_reduce(x_of(F32), tp, "max")
    assert primitives.built == 2


def test_exchange_works_on_the_same_primitives(comm, tp, primitives):
    assert comm.exchange({"a": 1}, tp) == [{"a": 1}, {"a": 1}]
    assert [name for name, _, _ in primitives.calls] == ["AllGather", "AllGather"]
