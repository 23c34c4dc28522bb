"""Which blocks of a model go to which stage of a pipeline: one way for the planner and for training.

Blocks are consecutive, and every block is on exactly one stage. A stage may have none.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise

from ms_zero.errors import UserError

# Relative room for the rounding of sums of costs.
_ROUNDING = 1e-12


def balance(
    costs: Sequence[float], num_stages: int, *, first: float = 0.0, last: float = 0.0
) -> tuple[range, ...]:
    """Share blocks out: the most expensive stage costs as little as possible, then all are as even as can be.

    Even means: the sum of the squares of the costs is the least. Of equals, late stages get more blocks.

    Args:
        costs: of each block, in any unit: parameters, seconds.
        num_stages: stages; one without blocks is possible where others weigh more.
        first: what the first stage costs besides its blocks (embeddings).
        last: what the last stage costs besides its blocks (head and loss).

    Returns:
        The blocks of each stage.

    Raises:
        UserError: no stage, or a cost below zero.
    """
    if num_stages < 1 or any(not cost >= 0 for cost in (*costs, first, last)):
        raise UserError(
            f"pipeline: cannot balance {len(costs)} blocks over {num_stages} stages: expected at least one "
            f"stage and costs of at least 0"
        )
    sums = [0.0, *accumulate(costs)]
    extras = [0.0] * num_stages
    extras[0] += first
    extras[-1] += last
    limit = _least_maximum(sums, extras) * (1 + _ROUNDING)
    return _ranges(_evenest(sums, extras, limit))


def explicit(counts: Sequence[int], num_blocks: int, num_stages: int) -> tuple[range, ...]:
    """Share blocks out by a list: how many each stage gets, in model order; 0 is possible.

    Raises:
        UserError: see `refuse_counts`.
    """
    refusal = refuse_counts(counts, num_blocks, num_stages)
    if refusal:
        raise UserError(f"pipeline: {refusal}")
    return _ranges(accumulate(counts))


def even_split(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage, about equally many and at least one; the middle ones take the rest.

    Raises:
        UserError: there are fewer blocks than stages.
    """
    if num_blocks < num_stages:
        raise UserError(
            f"parallel.pp: {num_stages} chunks for {num_blocks} layers: the graph engine puts at least one "
            "into each: lower parallel.pp or parallel.virtual_stages"
        )
    least, rest = divmod(num_blocks, num_stages)
    first = (num_stages - rest) // 2
    return tuple(least + (first <= stage < first + rest) for stage in range(num_stages))


def refuse_counts(counts: Sequence[int], num_blocks: int, num_stages: int) -> str:
    """Say in one line why a list of blocks of the stages is wrong; "" if it is not."""
    if len(counts) == num_stages and all(count >= 0 for count in counts) and sum(counts) == num_blocks:
        return ""
    return (
        f"blocks {list(counts)} of the stages: expected {num_stages} numbers of at least 0 that add up to "
        f"the {num_blocks} blocks of the model, got {len(counts)} with a sum of {sum(counts)}"
    )


def stage_of(block: int, ranges: Sequence[range]) -> int:
    """The stage that holds a block."""
    return bisect_right([blocks.stop for blocks in ranges], block)


def _ranges(ends: Iterable[int]) -> tuple[range, ...]:
    return tuple(range(start, stop) for start, stop in pairwise((0, *ends)))


def _least_maximum(sums: Sequence[float], extras: Sequence[float]) -> float:
    """The least cost that the most expensive stage can have."""
    num_blocks = len(sums) - 1
    best = [total + extras[0] for total in sums]
    for extra in extras[1:]:
        # The stages before cost more with every block that they have, this one costs less: look where they
        # cross.
        best = [
            min(
                max(best[start], sums[stop] - sums[start] + extra)
                for start in _around_crossing(best, sums, stop, extra)
            )
            for stop in range(num_blocks + 1)
        ]
    return best[num_blocks]


def _around_crossing(best: Sequence[float], sums: Sequence[float], stop: int, extra: float) -> range:
    crossing = bisect_left(
        range(stop + 1), True, key=lambda start: best[start] >= sums[stop] - sums[start] + extra
    )
    return range(max(0, crossing - 1), min(stop, crossing) + 1)


def _evenest(sums: Sequence[float], extras: Sequence[float], limit: float) -> tuple[int, ...]:
    """The ends of the stages with the least sum of squares of all whose stages cost at most `limit`."""
    num_blocks = len(sums) - 1
    totals = [_square(total + extras[0], limit) for total in sums]
    starts: list[list[int]] = []
    for extra in extras[1:]:
        # A start before the earliest would make the stage too expensive.
        earliest = [bisect_left(sums, total + extra - limit, 0, stop) for stop, total in enumerate(sums)]
        found = [
            min(
                (totals[start] + _square(sums[stop] - sums[start] + extra, limit), start)
                for start in range(earliest[stop], stop + 1)
            )
            for stop in range(num_blocks + 1)
        ]
        totals = [total for total, _ in found]
        starts.append([start for _, start in found])
    ends = [num_blocks]
    for row in reversed(starts):
        ends.append(row[ends[-1]])
    return tuple(reversed(ends))


def _square(cost: float, limit: float) -> float:
    return cost * cost if cost <= limit else float("inf")
