"""The logic of debug_collectives: which sequences of calls are refused, at which call, with what words."""

import itertools
import random

import pytest

from ms_zero.comm.referee import Call, Referee


def call(rank, op="all_reduce", ranks=(0, 1), group="dp", *, peer=-1, site="", counts=((), ()), **agree):
    agree = {"shape": "(4,)", "dtype": "Float32", **agree}
    return Call(rank, op, op, group, ranks, agree, site or f"{op}.py:{rank}", peer, *counts)


def test_equal_calls_are_allowed_when_all_members_have_come():
    referee = Referee(3)
    assert referee.post(call(0, ranks=(0, 1, 2))) == {}
    assert referee.post(call(2, ranks=(0, 1, 2))) == {}
    assert referee.waiting
    assert referee.post(call(1, ranks=(0, 1, 2))) == {0: None, 1: None, 2: None}
    assert not referee.waiting


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ({}, {"op": "all_gather"}, "rank 0: all_reduce on group dp"),
        ({}, {"shape": "(5,)"}, "shape (5,)"),
        ({}, {"dtype": "Int32"}, "dtype Int32"),
        ({"reduction": "sum"}, {"reduction": "max"}, "reduction max"),
        ({"source": "0"}, {"source": "1"}, "source 1"),
        ({}, {"group": "tp"}, "group tp"),
        ({"counts": ((1, 2), (1, 3))}, {"counts": ((3, 1), (1, 1))}, "2 rows to rank 1, which expects 1"),
    ],
)
def test_every_difference_is_refused_on_all_ranks(first, second, words):
    referee = Referee(3)
    referee.post(call(0, **first))
    verdicts = referee.post(call(1, **second))
    assert verdicts.keys() == {0, 1}
    assert verdicts[0] == verdicts[1]
    assert words in verdicts[0]
    assert "call 1 of the ranks (0, 1) differs" in verdicts[0]
    assert f"{second.get('op', 'all_reduce')}.py:1" in verdicts[0]
    assert "all_reduce.py:0" in verdicts[0]
    assert referee.post(call(2, ranks=(1, 2))) == {2: verdicts[0]}
    assert referee.finish(2) == {2: verdicts[0]}


def test_equal_calls_are_told_together():
    referee = Referee(4)
    for rank in (0, 1, 3):
        referee.post(call(rank, ranks=(0, 1, 2, 3), site="a.py:1"))
    message = referee.post(call(2, ranks=(0, 1, 2, 3), site="b.py:2", shape="(9,)"))[0]
    assert "ranks 0, 1, 3: all_reduce" in message
    assert "rank 2: all_reduce on group dp (0, 1, 2, 3), shape (9,), dtype Float32, at b.py:2" in message


def test_two_groups_in_different_order_are_a_deadlock():
    referee = Referee(3)
    everybody = (0, 1, 2)
    assert referee.post(call(0, group="tp")) == {}
    assert referee.post(call(2, ranks=everybody, group="world")) == {}
    verdicts = referee.post(call(1, ranks=everybody, group="world"))
    assert verdicts.keys() == {0, 1, 2}
    assert "wait for each other" in verdicts[0]
    assert "rank 0: all_reduce on group tp" in verdicts[0]
    assert "rank 1: all_reduce on group world" in verdicts[0]


def test_a_circle_over_three_groups_is_found():
    referee = Referee(3)
    assert referee.post(call(0, ranks=(0, 1))) == {}
    assert referee.post(call(1, ranks=(1, 2))) == {}
    message = referee.post(call(2, ranks=(0, 2)))[1]
    assert all(f"rank {rank}: all_reduce" in message for rank in range(3))


def test_waiting_for_a_busy_rank_is_no_deadlock():
    referee = Referee(4)
    assert referee.post(call(0, ranks=(0, 1))) == {}
    assert referee.post(call(1, ranks=(1, 2))) == {}
    assert referee.post(call(2, ranks=(2, 3))) == {}
    assert referee.post(call(3, ranks=(2, 3))) == {2: None, 3: None}
    assert referee.post(call(2, ranks=(1, 2))) == {1: None, 2: None}
    assert referee.post(call(1, ranks=(0, 1))) == {0: None, 1: None}


def test_messages_are_matched_in_order_and_sends_do_not_wait():
    referee = Referee(2)
    assert referee.post(call(0, "send", peer=1, shape="(1,)")) == {0: None}
    assert referee.post(call(0, "send", peer=1, shape="(2,)")) == {0: None}
    assert referee.post(call(1, "recv", peer=0, shape="(1,)")) == {1: None}
    assert referee.post(call(1, "recv", peer=0, shape="(2,)")) == {1: None}
    assert referee.post(call(1, "recv", peer=0, shape="(3,)")) == {}
    assert referee.post(call(0, "send", peer=1, shape="(3,)")) == {0: None, 1: None}


@pytest.mark.parametrize("sends_first", [True, False])
def test_a_message_of_another_shape_is_refused(sends_first):
    referee = Referee(2)
    send, recv = call(0, "send", peer=1), call(1, "recv", peer=0, shape="(9,)")
    referee.post(send if sends_first else recv)
    verdicts = referee.post(recv if sends_first else send)
    assert "a message and its receiver disagree" in verdicts[1]
    assert "send.py:0" in verdicts[1] and "recv.py:1" in verdicts[1]
    assert "disagree" in referee.post(call(0))[0]


def test_a_message_must_be_received_before_the_next_collective():
    referee = Referee(2)
    referee.post(call(0, "send", peer=1))
    referee.post(call(0))
    message = referee.post(call(1))[1]
    assert "was not received in order: rank 0: send to rank 1" in message


def test_receiving_against_a_collective_is_a_deadlock():
    referee = Referee(2)
    referee.post(call(0))
    assert "wait for each other" in referee.post(call(1, "recv", peer=0))[0]
    both = Referee(2)
    both.post(call(0, "recv", peer=1))
    assert "wait for each other" in both.post(call(1, "recv", peer=0))[0]


@pytest.mark.parametrize("leave", [lambda r: r.finish(1), lambda r: r.abort(1, "ValueError: x")])
@pytest.mark.parametrize("waits_first", [True, False])
def test_a_rank_that_leaves_early_is_named(leave, waits_first):
    referee = Referee(2)
    referee.post(call(0))
    referee.post(call(1, site="last.py:7"))
    if waits_first:
        referee.post(call(0))
        verdicts = leave(referee)
    else:
        leave(referee)
        verdicts = referee.post(call(0))
    assert "but rank 1 " in verdicts[0]
    last = "all_reduce on group dp (0, 1), shape (4,), dtype Float32, at last.py:7"
    assert f"its last call was {last}" in verdicts[0]


def test_messages_that_nobody_will_receive():
    referee = Referee(2)
    referee.post(call(0, "send", peer=1))
    assert "without receiving it" in (referee.finish(1) and referee.failure)
    late = Referee(2)
    late.finish(1)
    assert "rank 1 has finished" in late.post(call(0, "send", peer=1))[0]


def test_all_finish_together():
    referee = Referee(3)
    assert referee.finish(0) == referee.finish(2) == {}
    assert referee.waiting
    assert referee.finish(1) == {0: None, 1: None, 2: None}


def test_no_progress_names_the_absent():
    referee = Referee(3)
    for rank in range(3):
        referee.post(call(rank, ranks=(0, 1, 2), site="before.py:3"))
    referee.finish(2)
    referee.post(call(0, ranks=(0, 1)))
    verdicts = referee.give_up(5)
    assert verdicts.keys() == {0, 2}
    assert "no progress for 5 s: rank 0: all_reduce" in verdicts[0]
    assert "rank 1: last call was all_reduce on group dp (0, 1, 2)" in verdicts[0]


def test_a_skipped_call_is_hinted_at_by_the_first_differing_lines():
    referee = Referee(2)
    for first, second in (("a.py:1", "a.py:1"), ("a.py:2", "a.py:3"), ("a.py:3", "a.py:4")):
        referee.post(call(0, site=first))
        assert referee.post(call(1, site=second)) == {0: None, 1: None}
    referee.post(call(0, site="a.py:4"))
    message = referee.finish(1)[0]
    assert "hint: the first calls that matched but came from different lines: call 2" in message
    assert "rank 0: all_reduce on group dp (0, 1), shape (4,), dtype Float32, at a.py:2" in message


def test_correct_programs_are_never_refused():
    """Random programs in one global order, with random timing of the ranks."""
    for seed in range(30):
        draw = random.Random(seed)
        programs = {rank: [] for rank in range(5)}
        for number in range(60):
            ranks = tuple(sorted(draw.sample(range(5), draw.randint(2, 5))))
            if draw.random() < 0.4:
                source, target = draw.sample(ranks, 2)
                programs[source].append(call(source, "send", ranks, peer=target, shape=str(number)))
                programs[target].append(call(target, "recv", ranks, peer=source, shape=str(number)))
            else:
                for rank in ranks:
                    programs[rank].append(call(rank, ranks=ranks, shape=str(number)))
        referee, ready = Referee(5), set(range(5))
        while ready:
            rank = draw.choice(sorted(ready))
            ready.discard(rank)
            verdicts = referee.post(programs[rank].pop(0)) if programs[rank] else referee.finish(rank)
            assert not any(verdicts.values()), referee.failure
            ready |= {r for r in verdicts if not referee.waiting or r not in referee._left}
            if len(referee._left) == 5:
                break
        assert len(referee._left) == 5


def test_one_swapped_pair_of_calls_is_always_refused():
    """Two neighbouring calls of one rank, exchanged, end in a failure (if their groups share two members)."""
    for seed in range(30):
        draw = random.Random(seed)
        programs = {rank: [] for rank in range(3)}
        for number in range(20):
            ranks = tuple(sorted(draw.sample(range(3), draw.randint(2, 3))))
            for rank in ranks:
                programs[rank].append(call(rank, ranks=ranks, shape=str(number)))
        wrong = programs[draw.randrange(3)]
        pairs = [set(a.ranks) & set(b.ranks) for a, b in itertools.pairwise(wrong)]
        place = draw.choice([index for index, common in enumerate(pairs) if len(common) > 1])
        wrong[place], wrong[place + 1] = wrong[place + 1], wrong[place]
        referee, ready = Referee(3), {0, 1, 2}
        while ready and not referee.failure:
            rank = draw.choice(sorted(ready))
            ready.discard(rank)
            verdicts = referee.post(programs[rank].pop(0)) if programs[rank] else referee.finish(rank)
            ready |= {r for r in verdicts if r not in referee._left}
        assert referee.failure, seed
