import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_zero.comm import Counters, local
from ms_zero.testing import run_workers


def worker(comm):
    """One call of everything with a tensor of 16 rows of 4 float32: 256 bytes."""
    group = comm.new_group(range(comm.world_size), "dp_shard")
    x = Tensor(np.ones((16, 4), np.float32))
    comm.all_reduce(x, group)
    comm.all_gather(x, group)
    comm.reduce_scatter(x, group)
    comm.all_to_all(x, group)
    uneven = [0] * 4
    uneven[comm.rank], uneven[(comm.rank + 1) % 4] = 10, 6
    arriving = [0] * 4
    arriving[comm.rank], arriving[(comm.rank - 1) % 4] = 10, 6
    comm.all_to_all(x, comm.world, uneven, arriving)
    comm.broadcast(x, 2, group)
    if comm.rank < 2:
        comm.send(x[:1], 1 - comm.rank, group)
        comm.recv((1, 4), ms.float32, 1 - comm.rank, group)
    return sorted([op, name, n] for (op, name), n in comm.counters.bytes.items() if op != "barrier")


def test_bytes_follow_the_ring_formulas_per_operation_and_group():
    for rank, entries in enumerate(run_workers(4, worker)):
        expected = {
            ("all_reduce", "dp_shard"): 2 * 256 * 3 // 4,
            ("all_gather", "dp_shard"): 256 * 3,  # 3/4 of the gathered 1024
            ("reduce_scatter", "dp_shard"): 256 * 3 // 4,
            ("all_to_all", "dp_shard"): 256 * 3 // 4,
            ("all_to_all", "world"): 6 * 16,
            ("broadcast", "dp_shard"): 256 if rank == 2 else 0,
        }
        if rank < 2:
            expected |= {("send", "dp_shard"): 16, ("recv", "dp_shard"): 0}
        assert {(op, name): n for op, name, n in entries} == expected


def worker_objects(comm):
    comm.exchange("x" * 85)  # {"value": "xxx"} takes 13 characters more: 98, padded to 100
    comm.broadcast_object("x" * 85, 0)
    return [comm.counters.bytes["exchange", "world"], comm.counters.bytes["broadcast_object", "world"]]


def test_objects_are_counted_under_their_own_name():
    assert run_workers(2, worker_objects) == [[100, 100], [100, 0]]


def test_a_group_of_one_sends_nothing_but_counts_calls():
    comm = local()
    comm.all_reduce(Tensor(np.ones(8, np.float32)), comm.world)
    comm.broadcast(Tensor(np.ones(8, np.float32)), 0, comm.world)
    comm.exchange([1])
    comm.broadcast_object([1], 0)
    assert comm.counters.total_bytes() == 0
    assert comm.counters.total_calls() == 4


def test_totals_filter_by_operation_and_group():
    counters = Counters()
    counters.record("all_reduce", "tp", 10)
    counters.record("all_reduce", "dp", 5)
    counters.record("send", "pp", 1)
    counters.record("send", "pp", 1)
    assert counters.total_bytes() == 17
    assert counters.total_bytes(op="all_reduce") == 15
    assert counters.total_bytes(group="pp") == 2
    assert counters.total_calls(op="send", group="pp") == 2
    assert counters.total_calls(op="send", group="tp") == 0
    counters.reset()
    assert counters.total_bytes() == counters.total_calls() == 0
