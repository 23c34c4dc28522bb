"""exchange and broadcast_object: JSON of unequal sizes."""

import pytest

from ms_zero.comm import local
from ms_zero.testing import run_workers

TEXT = "naïve 中文 😀 \ud800 \u0000 \" \\ "


def worker_exchange(comm):
    long = {"rank": comm.rank, "text": TEXT * (1 + 5000 * comm.rank), "nested": [None, True, 1.5, -(10**30)]}
    everybody = comm.exchange(long)
    for rank, got in enumerate(everybody):
        assert got == {**long, "rank": rank, "text": TEXT * (1 + 5000 * rank)}
    assert comm.exchange((1, 2)) == [[1, 2]] * comm.world_size, "tuples arrive as lists"
    assert comm.exchange(None) == [None] * comm.world_size
    pair = comm.new_group((comm.rank // 2 * 2, comm.rank // 2 * 2 + 1))
    assert comm.exchange(comm.rank, pair) == list(pair.ranks)
    return len(everybody)


def test_exchange_gives_every_object_in_group_order():
    assert run_workers(4, worker_exchange) == [4] * 4


def worker_broadcast(comm):
    mine = {"text": TEXT, "rank": comm.rank}
    assert comm.broadcast_object(mine, 1) == {"text": TEXT, "rank": 1}
    ignored = object() if comm.rank != 2 else ["x" * 100_000]
    assert comm.broadcast_object(ignored, 2) == ["x" * 100_000]
    return True


def test_broadcast_object_comes_from_the_source():
    assert run_workers(3, worker_broadcast) == [True] * 3


def worker_not_json(comm):
    """One bad object raises on all members, and communication goes on afterwards."""
    messages = []
    for call in (
        lambda: comm.exchange({1, 2} if comm.rank == 1 else 0),
        lambda: comm.broadcast_object({1, 2}, 1),
    ):
        with pytest.raises(ValueError) as caught:
            call()
        messages.append(str(caught.value))
    return [messages, comm.exchange(comm.rank)]


def test_an_object_that_is_not_json_is_refused_by_all():
    message = "the object of rank 1 cannot be sent as JSON: Object of type set is not JSON serializable"
    assert run_workers(2, worker_not_json) == [[[message, message], [0, 1]]] * 2


def test_single_process():
    comm = local()
    assert comm.exchange({"a": "é"}) == [{"a": "é"}]
    assert comm.broadcast_object([1], 0) == [1]
