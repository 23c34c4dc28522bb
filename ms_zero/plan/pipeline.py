"""How long a pipeline takes: a closed form for the search, and the event simulation it is checked against.

Both take the seconds of each model chunk, forward, backward and weight gradient, and of a transfer between
neighbouring ranks. Chunk c is on rank c % p. Transfers run beside computation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ms_zero.pipeline.schedule import Schedule, Timeline, bubble_time, build, simulate


@dataclass(frozen=True, kw_only=True)
class ChunkSeconds:
    """One model chunk and one microbatch; ``weight`` is part of neither of the others."""

    forward: float
    backward: float
    weight: float

    @property
    def total(self) -> float:
        """All three."""
        return self.forward + self.backward + self.weight


@dataclass(frozen=True, kw_only=True)
class PipelineSeconds:
    """Seconds of all microbatches.

    Args:
        total: from the first forward to the last backward.
        busy: of the rank that computes longest.
        transfer: part of ``total`` that is due to transfers.

    """

    total: float
    busy: float
    transfer: float

    @property
    def bubble(self) -> float:
        """Idle time of the busiest rank that transfers do not explain."""
        return self.total - self.busy - self.transfer


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What the closed form needs of the chunks: one microbatch of the busiest rank, and of a mean rank.

    Args:
        busiest: all phases of the rank that computes longest.
        forward: forward of a mean rank.
        backward: its backward.
        weight: its weight gradients.

    """

    busiest: float
    forward: float
    backward: float
    weight: float


def pace_of(chunks: Sequence[ChunkSeconds], ranks: int) -> Pace:
    """Sum up the chunks of a pipeline."""
    totals = [chunk.total for chunk in chunks]
    return Pace(
        busiest=max(sum(totals[rank::ranks]) for rank in range(ranks)),
        forward=sum(chunk.forward for chunk in chunks) / ranks,
        backward=sum(chunk.backward for chunk in chunks) / ranks,
        weight=sum(chunk.weight for chunk in chunks) / ranks,
    )


def closed_form(
    name: str, ranks: int, microbatches: int, virtual: int, pace: Pace, transfer: float
) -> PipelineSeconds:
    """Estimate a published schedule in constant time.

    The busiest rank sets the pace; the others add the way to it and back. Exact for equal chunks and, of
    1f1b, microbatches that are a multiple of the ranks, as long as a transfer is short against a chunk.
    """
    busy = microbatches * pace.busiest
    if ranks == 1:
        return PipelineSeconds(total=busy, busy=busy, transfer=0.0)
    phases = {"forward": pace.forward, "backward": pace.backward, "weight": pace.weight}
    bubble = bubble_time(name, ranks, microbatches, virtual, **phases)
    waits = _exposed_transfers(name, ranks, microbatches, virtual) * transfer
    return PipelineSeconds(total=busy + bubble + waits, busy=busy, transfer=waits)


def _exposed_transfers(name: str, ranks: int, microbatches: int, virtual: int) -> float:
    """Count the transfers on the critical path.

    gpipe: once through the ranks and back. interleaved: once through the chunks and back. 1f1b waits for two
    in every microbatch but the p-th, since no rank holds more microbatches than the round trip without
    transfers takes; zb-h1 fills that wait with weight gradients after the start.
    """
    if name == "gpipe":
        return 2 * (ranks - 1)
    if name == "interleaved":
        return 2 * (ranks * virtual - 1)
    filled = min(ranks, microbatches)
    waits = 2 * (ranks - 1) * microbatches / filled + 2 * (filled - 2) if filled > 1 else 2 * (ranks - 1)
    return min(waits, 4 * (ranks - 1)) if name == "zb-h1" else waits


def simulated(schedule: Schedule, chunks: Sequence[ChunkSeconds], transfer: float) -> PipelineSeconds:
    """Run any schedule event by event, with and without transfers."""
    timeline = timeline_of(schedule, chunks, 0.0)
    busy = max(map(timeline.busy, range(schedule.num_ranks)))
    total = timeline_of(schedule, chunks, transfer).makespan if transfer else timeline.makespan
    return PipelineSeconds(total=total, busy=busy, transfer=total - timeline.makespan)


def timeline_of(schedule: Schedule, chunks: Sequence[ChunkSeconds], transfer: float) -> Timeline:
    """Simulate a schedule with the seconds of each chunk."""
    split = schedule.splits_backward()
    times = {
        "F": [chunk.forward for chunk in chunks],
        "B": [chunk.backward + (0.0 if split else chunk.weight) for chunk in chunks],
        "W": [chunk.weight for chunk in chunks],
    }
    return simulate(
        schedule,
        lambda action: times[action.kind][action.stage],
        (lambda message: transfer) if transfer else None,
    )


def simulated_by_name(
    name: str, ranks: int, microbatches: int, chunks: Sequence[ChunkSeconds], transfer: float
) -> PipelineSeconds:
    """Run a published schedule event by event; long ones are continued from their steady state.

    After the ramp-up a schedule repeats itself every p microbatches, so that two runs which differ by p
    microbatches tell how long any number of them takes.
    """
    busy = microbatches * max(sum(chunk.total for chunk in chunks[rank::ranks]) for rank in range(ranks))
    if ranks == 1:
        return PipelineSeconds(total=busy, busy=busy, transfer=0.0)
    still = _makespan(name, ranks, microbatches, chunks, 0.0)
    total = _makespan(name, ranks, microbatches, chunks, transfer)
    return PipelineSeconds(total=total, busy=busy, transfer=total - still)


def _makespan(
    name: str, ranks: int, microbatches: int, chunks: Sequence[ChunkSeconds], transfer: float
) -> float:
    virtual = len(chunks) // ranks
    rounds, rest = divmod(microbatches, ranks)
    if rounds <= _SIMULATED_ROUNDS + 1:
        return _run(_compiled(name, ranks, microbatches, virtual), ranks, chunks, transfer)
    short, longer = (
        _run(_compiled(name, ranks, count * ranks + rest, virtual), ranks, chunks, transfer)
        for count in (_SIMULATED_ROUNDS, _SIMULATED_ROUNDS + 1)
    )
    return short + (rounds - _SIMULATED_ROUNDS) * (longer - short)


class _Event(NamedTuple):
    """An action as numbers: rank, row in the table of times, the event before it, whether that one sends."""

    rank: int
    time: int
    before: int
    sends: bool


@lru_cache(maxsize=256)
def _compiled(name: str, ranks: int, microbatches: int, virtual: int) -> tuple[_Event, ...]:
    """The events of a schedule in an order that can be run through once.

    What is on the same rank waits for it anyway, so that of what an action needs only the stage before (or,
    backward, after) is written down. Built of numbers, because a search compiles long schedules.
    """
    schedule = build(name, ranks, microbatches, virtual)
    stages, placement = schedule.num_stages, schedule.placement
    number = [-1] * (3 * stages * microbatches)  # event of each action, by its code
    events: list[_Event] = []
    position, waiting, runnable = [0] * ranks, {}, deque(range(ranks))
    while runnable:
        rank = runnable.popleft()
        order = schedule.orders[rank]
        while position[rank] < len(order):
            kind, stage, microbatch = order[position[rank]]
            row = _ROWS[kind] * stages + stage
            step = _STEPS[kind]
            before = (row + step) * microbatches + microbatch if step and 0 <= stage + step < stages else -1
            if before >= 0 and number[before] < 0:
                waiting[before] = rank
                break
            sends = before >= 0 and placement[stage + step] != rank
            code = row * microbatches + microbatch
            number[code] = len(events)
            events.append(_Event(rank, row, number[before] if before >= 0 else -1, sends))
            position[rank] += 1
            if code in waiting:
                runnable.append(waiting.pop(code))
    return tuple(events)


def _run(
    events: tuple[_Event, ...], ranks: int, chunks: Sequence[ChunkSeconds], transfer: float
) -> float:
    # The last event of a schedule that splits backward is a weight gradient.
    split = events[-1].time >= 2 * len(chunks)
    times = [chunk.forward for chunk in chunks]
    times += [chunk.backward + (0.0 if split else chunk.weight) for chunk in chunks]
    times += [chunk.weight for chunk in chunks]
    free = [0.0] * ranks
    ends: list[float] = []
    for rank, time, before, sends in events:
        start = free[rank]
        if before >= 0:
            arrival = ends[before] + transfer if sends else ends[before]
            if arrival > start:
                start = arrival
        free[rank] = start + times[time]
        ends.append(free[rank])
    return max(free)


# Row of each kind in the table of times, and where what it needs comes from.
_ROWS = {"F": 0, "B": 1, "W": 2}
_STEPS = {"F": -1, "B": 1, "W": 0}
# Rounds of p microbatches after which every schedule is in its steady state.
_SIMULATED_ROUNDS = 3
