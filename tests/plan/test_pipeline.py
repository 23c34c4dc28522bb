"""The closed form of a pipeline against the event simulation, and both against the formulas."""

import random
from fractions import Fraction

import pytest

from ms_zero.pipeline.schedule import bubble_time, build
from ms_zero.plan.pipeline import (
    ChunkSeconds,
    closed_form,
    pace_of,
    simulated,
    simulated_by_name,
    timeline_of,
)

PUBLISHED = (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 4))


def uniform(count, virtual, forward=1.0, backward=1.25, weight=0.75):
    chunk = ChunkSeconds(forward=forward / virtual, backward=backward / virtual, weight=weight / virtual)
    return (chunk,) * (count * virtual)


def uneven(seed, ranks, virtual):
    choose = random.Random(seed)
    base = choose.uniform(0.5, 2) / virtual
    chunks = [
        ChunkSeconds(
            forward=base * choose.uniform(0.95, 1.05),
            backward=1.15 * base * choose.uniform(0.95, 1.05),
            weight=0.9 * base,
        )
        for _ in range(ranks * virtual)
    ]
    last = chunks[-1]
    chunks[-1] = ChunkSeconds(forward=1.1 * last.forward, backward=1.1 * last.backward, weight=last.weight)
    return chunks


@pytest.mark.parametrize(("name", "virtual"), PUBLISHED)
def test_equal_chunks_without_transfers_are_exact(name, virtual):
    for ranks, microbatches in ((1, 4), (2, 2), (4, 8), (4, 40), (8, 64)):
        chunks = uniform(ranks, virtual)
        closed = closed_form(name, ranks, microbatches, virtual, pace_of(chunks, ranks), 0.0)
        events = simulated(build(name, ranks, microbatches, virtual), chunks, 0.0)
        phases = {"forward": Fraction(1), "backward": Fraction(5, 4), "weight": Fraction(3, 4)}
        assert closed.total == pytest.approx(events.total, rel=1e-12)
        idle = bubble_time(name, ranks, microbatches, virtual, **phases)
        assert events.bubble == pytest.approx(float(idle))


@pytest.mark.parametrize(("name", "virtual"), PUBLISHED)
def test_short_transfers_between_equal_chunks_are_exact(name, virtual):
    for ranks, microbatches in ((2, 4), (4, 8), (4, 32), (8, 64)):
        chunks = uniform(ranks, virtual)
        closed = closed_form(name, ranks, microbatches, virtual, pace_of(chunks, ranks), 0.01)
        events = simulated(build(name, ranks, microbatches, virtual), chunks, 0.01)
        assert closed.transfer == pytest.approx(events.transfer, rel=1e-9)


@pytest.mark.parametrize(("name", "virtual"), PUBLISHED)
def test_closed_form_and_events_agree_for_uneven_chunks(name, virtual):
    for seed in range(30):
        choose = random.Random(1000 + seed)
        ranks = choose.choice((2, 3, 4, 8, 16))
        microbatches = ranks * choose.choice((1, 2, 4, 8))
        chunks = uneven(seed, ranks, virtual)
        transfer = choose.choice((0.0, 0.02, 0.1)) * chunks[0].forward
        closed = closed_form(name, ranks, microbatches, virtual, pace_of(chunks, ranks), transfer)
        events = simulated_by_name(name, ranks, microbatches, chunks, transfer)
        assert closed.total == pytest.approx(events.total, rel=0.07)


@pytest.mark.parametrize(("name", "virtual"), PUBLISHED)
def test_long_schedules_are_continued_exactly(name, virtual):
    for seed, (ranks, microbatches) in enumerate(((2, 40), (3, 36), (4, 64), (5, 100))):
        chunks = uneven(seed, ranks, virtual)
        quick = simulated_by_name(name, ranks, microbatches, chunks, 0.05)
        whole = simulated(build(name, ranks, microbatches, virtual), chunks, 0.05)
        assert quick.total == pytest.approx(whole.total, rel=1e-9)
        assert quick.busy == pytest.approx(whole.busy, rel=1e-9)
        assert quick.transfer == pytest.approx(whole.transfer, rel=1e-6)


def test_other_numbers_of_microbatches_work():
    for microbatches in (1, 2, 3, 5, 9, 31):
        chunks = uneven(microbatches, 4, 1)
        for name in ("gpipe", "1f1b", "zb-h1"):
            quick = simulated_by_name(name, 4, microbatches, chunks, 0.0)
            whole = timeline_of(build(name, 4, microbatches), chunks, 0.0)
            assert quick.total == pytest.approx(whole.makespan, rel=1e-9)


def test_the_bubble_falls_with_microbatches_and_virtual_stages():
    def share(name, microbatches, virtual):
        run = simulated_by_name(name, 4, microbatches, uniform(4, virtual), 0.0)
        return run.bubble / run.total

    for name, virtual in PUBLISHED:
        shares = [share(name, microbatches, virtual) for microbatches in (4, 8, 16, 64, 256)]
        assert shares == sorted(shares, reverse=True)
    assert share("interleaved", 16, 4) < share("interleaved", 16, 2) < share("1f1b", 16, 1)
    assert share("zb-h1", 16, 1) < share("1f1b", 16, 1)
