"""debug_collectives on real workers: each kind of mismatch ends at once, with one message on all ranks."""

import inspect
import os
import time

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import _compat
from ms_zero.comm import CollectiveError, autograd, checked, local
from ms_zero.testing.workers import WorkerError, run_workers

SITE = "tests/comm/test_debug.py:"


def ones(*shape, dtype=np.float32):
    return Tensor(np.ones(shape, dtype))


def other_operation(comm, rank):
    comm.all_gather(ones(4), comm.world) if rank == 1 else comm.all_reduce(ones(4), comm.world)


def other_shape(comm, rank):
    comm.all_reduce(ones(4 + rank), comm.world)


def other_dtype(comm, rank):
    comm.all_gather(ones(4, dtype=[np.float32, np.int32][rank % 2]), comm.world)


def other_reduction(comm, rank):
    comm.reduce_scatter(ones(6), comm.world, ["sum", "max"][rank % 2])


def other_source(comm, rank):
    comm.broadcast(ones(4), rank % 2, comm.world)


def other_counts(comm, rank):
    comm.all_to_all(ones(3), comm.world, [1, 1, 1], [1, 1, 1 + (rank == 0)])


def object_against_tensor(comm, rank):
    comm.exchange({"rank": rank}) if rank else comm.all_gather(ones(1, dtype=np.int32), comm.world)


def group_order(comm, rank):
    pair = comm.new_group((0, 1), "pair") if rank < 2 else None
    order = [comm.world, pair] if rank == 0 else [pair, comm.world]
    for group in filter(None, order):
        comm.all_reduce(ones(4), group)


def circle_of_four(comm, rank):
    """On a 2 x 2 mesh, ranks 0 and 3 use their two groups in the other order."""
    tp = comm.new_group((0, 1) if rank < 2 else (2, 3), "tp")
    dp = comm.new_group((rank % 2, rank % 2 + 2), "dp")
    for group in (dp, tp) if rank in (0, 3) else (tp, dp):
        comm.all_reduce(ones(4), group)


def creation_order(comm, rank):
    for ranks in ((0, 1, 2), (0, 1)) if rank == 0 else ((0, 1), (0, 1, 2)):
        if rank in ranks:
            comm.new_group(ranks)


def finishes_early(comm, rank):
    comm.all_reduce(ones(4), comm.world)
    if rank != 1:
        comm.all_reduce(ones(4), comm.world)


def skips_a_call(comm, rank):
    for _ in range(3):
        comm.all_reduce(ones(4), comm.world)
    if rank != 2:
        comm.all_reduce(ones(4), comm.world)
    comm.all_reduce(ones(4), comm.world)


def other_message(comm, rank):
    if rank == 0:
        comm.send(ones(4), 1, comm.world)
    if rank == 1:
        comm.recv((5,), ms.float32, 0, comm.world)
    comm.barrier()


def message_against_collective(comm, rank):
    if rank == 0:
        comm.send(ones(4), 1, comm.world)
    comm.all_reduce(ones(1), comm.world)
    if rank == 1:
        comm.recv((4,), ms.float32, 0, comm.world)


def lost_message(comm, rank):
    if rank == 0:
        comm.send(ones(4), 1, comm.world)


def hangs(comm, rank):
    if rank == 1:
        time.sleep(2.5)
    comm.barrier()


def backward_differs(comm, rank):
    x = ones(2)
    x.requires_grad_(True)
    with _compat.tape():
        y = autograd.copy_to_group(x, comm, comm.world)
        loss = (y * y).sum()
    if rank:
        _compat.backward(loss)
    else:
        comm.all_reduce(ones(3), comm.world)


MISMATCHES = {
    other_operation: (3, "call 1 of the ranks (0, 1, 2) differs", "all_gather on group world"),
    other_shape: (2, "shape (4,)", "shape (5,)"),
    other_dtype: (2, "dtype Float32", "dtype Int32"),
    other_reduction: (2, "reduction sum", "reduction max"),
    other_source: (2, "source 0", "source 1"),
    other_counts: (3, "rank 2 sends 1 rows to rank 0, which expects 2", ""),
    object_against_tensor: (2, "exchange on group world", "all_gather on group world"),
    group_order: (3, "the ranks wait for each other", "all_reduce on group pair (0, 1)"),
    circle_of_four: (4, "rank 0: all_reduce on group dp (0, 2)", "rank 1: all_reduce on group tp (0, 1)"),
    creation_order: (4, "the ranks wait for each other", "new_group on group new (0, 1)"),
    finishes_early: (2, "but rank 1 has finished; its last call was all_reduce", ""),
    skips_a_call: (3, "but rank 2 has finished", "hint: the first calls that matched but came"),
    other_message: (3, "a message and its receiver disagree: rank 0: send to rank 1", "shape (5,)"),
    message_against_collective: (2, "a message was not received in order: rank 0: send to rank 1", ""),
    lost_message: (2, "rank 0: send to rank 1", "but rank 1 has finished"),
    hangs: (2, "no progress for 1 s: rank 0: barrier on group world (0, 1)", "rank 1: last call was none"),
    backward_differs: (2, "shape (2,)", "shape (3,)"),
}
#: These leave a message in the channels, as a wrong program does: each gets its own workers.
ALONE = {other_message, message_against_collective, lost_message}


def outcomes(comm, names):
    """What each of the functions ends with on this rank, one after the other on the same workers."""
    found = {}
    for name in names:
        started = time.monotonic()
        try:
            with checked(comm, stall_s=1.0 if name == "hangs" else 60.0) as debug:
                globals()[name](debug, comm.rank)
            message = "no error"
        except CollectiveError as error:
            message = str(error)
        found[name] = [message, time.monotonic() - started]
        if len(names) > 1:
            comm.barrier()  # not checked: nothing of what was refused may be left in the channels
    return found


@pytest.fixture(scope="module")
def results():
    found = {}
    together = [[f for f in MISMATCHES if MISMATCHES[f][0] == size and f not in ALONE] for size in (2, 3, 4)]
    for functions in (*together, *([function] for function in ALONE)):
        names = [function.__name__ for function in functions]
        ranks = run_workers(MISMATCHES[functions[0]][0], outcomes, names)
        found |= {name: [rank[name] for rank in ranks] for name in names}
    return found


@pytest.mark.parametrize("function", MISMATCHES, ids=lambda function: function.__name__)
def test_a_mismatch_ends_every_rank_with_the_same_message(results, function):
    _, *words = MISMATCHES[function]
    (message, _), *others = results[function.__name__]
    assert message.startswith("debug_collectives: ")
    assert all(word in message for word in words), message
    assert all(other == message for other, _ in others)
    assert "\n" not in message
    lines, first = inspect.getsourcelines(function)
    sites = [int(part.split()[0].strip(";:,")) for part in message.split(f"{SITE}")[1:]]
    assert sites, message
    assert all(first <= line < first + len(lines) for line in sites)


def everything(comm):
    """Correct programs: same results as without the check."""
    with checked(comm) as debug:
        found = [use_all(debug)]
        assert debug.counters.total_calls() > 8
    found.append(use_all(comm))
    return found


def use_all(comm):
    rank, world = comm.rank, comm.world
    pair = comm.new_group((0, 1), "pair") if rank < 2 else comm.new_group((2, 3), "pair")
    x = Tensor(np.arange(8, dtype=np.float32) + 10 * rank)
    peer = pair.ranks[1 - pair.index]
    comm.send(x, peer, pair)
    send, receive = [0] * 4, [0] * 4
    send[(rank + 1) % 4], receive[(rank - 1) % 4] = 8, 8
    results = [
        comm.recv((8,), ms.float32, peer, pair),
        comm.all_reduce(x, world),
        comm.all_reduce(x, pair, "max"),
        comm.all_gather(x, pair),
        comm.reduce_scatter(x, world),
        comm.all_to_all(x, world, send, receive),
        comm.broadcast(x, 2, world),
    ]
    comm.barrier(pair)
    objects = [comm.exchange(rank), comm.broadcast_object("from 1", 1)]
    return [[result.asnumpy().tolist() for result in results], objects]


def test_correct_programs_give_the_same_results():
    for debug, plain in run_workers(4, everything):
        assert debug == plain


def one_fails(comm):
    try:
        with checked(comm) as debug:
            debug.barrier()
            if debug.rank == 1:
                raise KeyError("no such thing")
            debug.barrier()
    except (KeyError, CollectiveError) as error:
        return str(error)


def test_an_error_on_one_rank_is_told_to_those_who_wait():
    told, raised = run_workers(2, one_fails)
    assert "but rank 1 ended: KeyError: 'no such thing'; its last call was barrier" in told
    assert raised == "'no such thing'"


def one_dies(comm, victim):
    with checked(comm) as debug:
        debug.barrier()
        if debug.rank == victim:
            os._exit(7)
        try:
            debug.barrier()
        except CollectiveError as error:
            print(f"told: {error}", flush=True)
        time.sleep(1000)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_noticed(victim):
    with pytest.raises(WorkerError, match=f"rank {victim} failed:\nexited with status 7"):
        run_workers(2, one_dies, victim)


def test_one_process_is_not_checked():
    comm = local()
    with checked(comm) as same:
        assert same is comm
