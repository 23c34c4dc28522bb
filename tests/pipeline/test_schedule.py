"""Pipeline schedules: published orders, formulas, what is refused, and proofs that lists can be executed."""

import random
from dataclasses import replace
from fractions import Fraction
from itertools import product

import pytest

from ms_zero.errors import UserError
from ms_zero.pipeline.schedule import (
    NAMES,
    Action,
    Schedule,
    bubble_time,
    build,
    check,
    dependencies,
    in_flight_bound,
    peak_in_flight,
    read_csv,
    refuse,
    simulate,
    steps,
    warmup_forwards,
    write_csv,
)


def all_cases(max_ranks=6, max_microbatches=13):
    for name, ranks, microbatches in product(NAMES, range(1, max_ranks + 1), range(1, max_microbatches + 1)):
        for virtual in (2, 3, 4) if name == "interleaved" else (1,):
            if not refuse(name, ranks, microbatches, virtual):
                yield name, ranks, microbatches, virtual


def row(order, with_stage):
    return " ".join(str(action) if with_stage else str(action)[1:] for action in order)


def uniform(name, virtual, forward=1, backward=1, weight=1):
    """Durations of actions when all layers of a rank take `forward`, `backward` and `weight`."""
    whole = backward if name == "zb-h1" else backward + weight
    times = {"F": Fraction(forward, virtual), "B": Fraction(whole, virtual), "W": Fraction(weight)}
    return lambda action: times[action.kind]


def test_orders_of_1f1b():
    orders = build("1f1b", 4, 8).orders
    assert row(orders[0], False) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7"
    assert row(orders[3], False) == " ".join(f"F{m} B{m}" for m in range(8))


def test_orders_of_interleaved():
    first, second = build("interleaved", 2, 4, 2).orders
    assert row(first, True) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert row(second, True) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"


def test_orders_of_gpipe_and_zero_bubble():
    for order in build("gpipe", 3, 4).orders:
        assert row(order, False) == "F0 F1 F2 F3 B0 B1 B2 B3"
    first, *_, last = build("zb-h1", 3, 4).orders
    assert row(first, False) == "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3"
    assert row(last, False) == "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3"


def test_every_built_schedule_is_valid_and_keeps_its_bound():
    for name, ranks, microbatches, virtual in all_cases():
        schedule = build(name, ranks, microbatches, virtual)
        bounds = [in_flight_bound(name, rank, ranks, microbatches, virtual) for rank in range(ranks)]
        assert peak_in_flight(schedule) == tuple(bounds)
        kept = [min(ranks, microbatches)] * ranks if name == "zb-h1" else bounds
        check(schedule, kept)
        with pytest.raises(UserError, match=f"rank 0 holds {kept[0]} microbatches at once, more than its"):
            check(schedule, [kept[0] - 1, *kept[1:]])


def test_bounds_of_the_published_schedules():
    assert [in_flight_bound("1f1b", rank, 4, 8) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight_bound("1f1b", rank, 4, 2) for rank in range(4)] == [2, 2, 2, 1]
    assert in_flight_bound("gpipe", 3, 4, 8) == 8
    ranks, virtual = 4, 3  # of the whole rank's layers: p (1 + (p - 1) / (p v))
    first = Fraction(in_flight_bound("interleaved", 0, ranks, 8, virtual), virtual)
    assert first == ranks * (1 + Fraction(ranks - 1, ranks * virtual))
    assert [warmup_forwards("1f1b", rank, 4, 8) for rank in range(4)] == [3, 2, 1, 0]
    assert [warmup_forwards("interleaved", rank, 4, 8, 2) for rank in range(4)] == [10, 8, 6, 4]


def test_simulated_bubbles_equal_the_formulas():
    for name, ranks, microbatches, virtual in all_cases():
        timeline = simulate(build(name, ranks, microbatches, virtual), uniform(name, virtual))
        expected = bubble_time(name, ranks, microbatches, virtual)
        assert [timeline.bubble(rank) for rank in range(ranks)] == [expected] * ranks
        if name in ("gpipe", "1f1b"):
            assert timeline.bubble_over_ideal() == Fraction(ranks - 1, microbatches)
        if name == "interleaved":
            assert timeline.bubble_over_ideal() == Fraction(ranks - 1, virtual * microbatches)
        if name == "zb-h1" and microbatches >= ranks:
            assert 3 * expected == bubble_time("1f1b", ranks, microbatches)


@pytest.mark.parametrize("times", [(2, 3, 2), (4, 5, 3), (1, 2, 1), (2, 2, 1)])
def test_bubbles_of_unequal_phases(times):
    kinds = dict(zip(("forward", "backward", "weight"), times, strict=True))
    for name, ranks, microbatches, virtual in all_cases(4, 9):
        timeline = simulate(build(name, ranks, microbatches, virtual), uniform(name, virtual, *times))
        exact = {kind: Fraction(time) for kind, time in kinds.items()}
        assert timeline.bubble(0) == bubble_time(name, ranks, microbatches, virtual, **exact)


def test_transfers_delay_the_pipeline():
    schedule = build("1f1b", 2, 1)
    timeline = simulate(schedule, lambda action: 1, lambda message: 10)
    assert timeline.starts == ((0, 23), (11, 12))
    assert timeline.makespan == 24
    assert timeline.busy(0) == 2


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        (("interleaved", 4, 6, 2), "6 microbatches are not a multiple of 4; use 8, or 1f1b"),
        (("interleaved", 4, 8, 1), "at least 2 virtual stages"),
        (("1f1b", 4, 8, 2), "use interleaved"),
        (("1f1b", 4, 0, 1), "0 microbatches"),
        (("gpipe", 0, 4, 1), "0 stages"),
        (("dualpipe", 4, 8, 1), "expected one of gpipe, 1f1b, interleaved, zb-h1"),
    ],
)
def test_refused_numbers(numbers, reason):
    assert reason in refuse(*numbers)
    with pytest.raises(UserError, match=reason.split(";")[0]):
        build(*numbers)


def test_sends_meet_receives_in_order():
    for name, ranks, microbatches, virtual in all_cases(4, 8):
        program = steps(build(name, ranks, microbatches, virtual))
        sent, received = {}, {}
        for rank, order in enumerate(program):
            for step in order:
                assert {message.source for message in step.sends} <= {rank}
                assert {message.target for message in step.receives} <= {rank}
                for table, messages in ((sent, step.sends), (received, step.receives)):
                    for message in messages:
                        table.setdefault((message.source, message.target), []).append(message)
        assert sent == received
        # Every border between ranks is crossed by each microbatch once in each direction.
        borders = ranks * virtual - 1 if ranks > 1 else 0
        assert sum(map(len, sent.values())) == 2 * borders * microbatches


def test_what_an_action_needs_is_received_by_then():
    schedule = build("interleaved", 2, 4, 2)
    for order in steps(schedule):
        arrived = set()
        for step in order:
            arrived.update(message[2:] for message in step.receives)
            if step.action.kind == "F" and step.action.stage > 0:
                assert tuple(step.action) in arrived


def random_order(seed, ranks, virtual, microbatches):
    """A random valid list: any action that can run, run in any order, each rank on its own."""
    choose = random.Random(seed)
    placement = tuple(choose.choice(range(ranks)) for _ in range(ranks * virtual))
    placement = placement[:-ranks] + tuple(choose.sample(range(ranks), ranks))
    left = {
        Action(kind, stage, microbatch)
        for kind, stage, microbatch in product("FBW", range(len(placement)), range(microbatches))
    }
    orders, done = [[] for _ in range(ranks)], set()
    while left:
        ready = sorted(action for action in left if set(dependencies(action, len(placement))) <= done)
        action = choose.choice(ready)
        left.remove(action)
        done.add(action)
        orders[placement[action.stage]].append(action)
    return Schedule("random", microbatches, placement, tuple(map(tuple, orders)))


def test_any_order_that_respects_dependencies_is_accepted():
    for seed in range(30):
        schedule = random_order(seed, 1 + seed % 4, 1 + seed % 3, 1 + seed % 5)
        check(schedule)
        timeline = simulate(schedule, lambda action: 1)
        finish = {
            action: end
            for order, ends in zip(schedule.orders, timeline.ends, strict=True)
            for action, end in zip(order, ends, strict=True)
        }
        for action, end in finish.items():
            assert all(finish[other] <= end - 1 for other in dependencies(action, schedule.num_stages))


def swapped(schedule, rank, first, second):
    order = list(schedule.orders[rank])
    order[first], order[second] = order[second], order[first]
    return with_order(schedule, rank, order)


def with_order(schedule, rank, order):
    orders = [*schedule.orders[:rank], tuple(order), *schedule.orders[rank + 1 :]]
    return replace(schedule, orders=tuple(orders))


def test_the_validator_refuses_broken_lists():
    good = build("zb-h1", 2, 3)
    first, second = good.orders
    broken = {
        "rank 1: 1B0 comes before 1F0": swapped(good, 1, 0, 1),
        "rank 0: 0B0 comes before 0F0": with_order(good, 0, [first[2], *first[:2], *first[3:]]),
        "rank 1: 1B2 is missing": with_order(good, 1, [a for a in second if str(a) not in ("1B2", "1W2")]),
        "rank 0: 0F1 appears twice": with_order(good, 0, [*first, first[1]]),
        "1F0 belongs to rank 1": with_order(good, 0, [*first, second[0]]),
        "0F7 names a microbatch beyond": with_order(good, 0, [*first, Action("F", 0, 7)]),
        "9F0 names a stage beyond": with_order(good, 0, [*first, Action("F", 9, 0)]),
        "0X0 is of an unknown kind": with_order(good, 0, [*first, Action("X", 0, 0)]),
        "rank 1 has no actions": with_order(good, 1, []),
    }
    for message, schedule in broken.items():
        with pytest.raises(UserError, match=message):
            check(schedule)


def test_a_weight_gradient_comes_after_its_backward():
    good = build("zb-h1", 2, 3)
    order = list(good.orders[0])
    order.insert(0, order.pop(order.index(Action("W", 0, 0))))
    with pytest.raises(UserError, match="0W0 comes before 0B0"):
        check(with_order(good, 0, order))


def test_a_deadlock_is_found_and_named():
    # Rank 0 wants the gradient of microbatch 1 first, rank 1 takes microbatch 0 back before it forwards 1.
    schedule = build("1f1b", 2, 2)
    wrong = [Action("F", 0, 0), Action("B", 0, 0), Action("F", 0, 1), Action("B", 0, 1)]
    late = [Action("F", 1, 0), Action("F", 1, 1), Action("B", 1, 0), Action("B", 1, 1)]
    with pytest.raises(UserError, match="deadlocks: rank 0 at 0B0, rank 1 at 1F1 wait for each other"):
        check(with_order(with_order(schedule, 0, wrong), 1, late))


def test_files_keep_the_schedule(tmp_path):
    path = tmp_path / "s.csv"
    for name, ranks, microbatches, virtual in all_cases(3, 6):
        schedule = build(name, ranks, microbatches, virtual)
        write_csv(schedule, path)
        assert read_csv(path) == replace(schedule, name="s.csv")
    path.write_text("0F0,0F1,,,0B0,0B1\n,1F0,1B0,1F1,1B1\n")
    assert row(read_csv(path).orders[1], True) == "1F0 1B0 1F1 1B1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no actions found"),
        ("0F0,0B0\n,,\n", "no actions found"),
        ("0F0,frog\n", "row 1, column 2: 'frog' is not an action"),
        ("0F0,0I0\n", "row 1, column 2: '0I0' is not an action"),
        ("0F0,0F-1\n", "'0F-1' is not an action"),
        ("0F0,0B0\n2F0,2B0\n", "stage 1 has no actions, but stage 2 has"),
        ("0F0,0B0\n1B0,1F0\n", "1B0 comes before 1F0"),
        ("0F999999999,0B0\n", "not an action"),
        ("0F1,0B1\n", "0F0 is missing"),
        ("0F0\n0B0\n", "belongs to rank"),
    ],
)
def test_broken_files_are_refused(tmp_path, text, message):
    path = tmp_path / "broken.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_csv(path)
    assert "\n" not in str(caught.value)


def test_a_missing_or_binary_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read as a schedule"):
        read_csv(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(UserError, match="cannot be read as a schedule"):
        read_csv(tmp_path / "binary.csv")
