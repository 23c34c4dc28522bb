"""Pairwise covering arrays: few rows in which every allowed pair of values of two axes occurs.

The greedy construction of AETG (Cohen et al. 1997): a row starts from a pair that no row has yet, and each
further axis takes the value that adds most new pairs among those with which the row can still be completed.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from itertools import combinations, product

Axes = Mapping[str, Sequence[Hashable]]
Row = dict[str, Hashable]
Pair = frozenset[tuple[str, Hashable]]
#: Whether what is in a row, complete or not, breaks no rule. A rule about axes that are missing holds.
Allows = Callable[[Row], bool]


def allowed_pairs(axes: Axes, allows: Allows) -> list[Pair]:
    """The pairs of values of two axes that occur in some complete row, in the order of the axes."""
    return [frozenset(pair.items()) for pair in _pairs(axes) if _completes(pair, axes, allows)]


def pairs_of(row: Mapping[str, Hashable]) -> set[Pair]:
    """The pairs that a row covers."""
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def covering_rows(axes: Axes, allows: Allows) -> list[Row]:
    """Rows that together cover every allowed pair; the same ones each time."""
    wanted = dict.fromkeys(allowed_pairs(axes, allows))
    used: Counter[tuple[str, Hashable]] = Counter()
    rows = []
    while wanted:
        row = _extend(dict(next(iter(wanted))), axes, allows, wanted, used)
        for pair in pairs_of(row):
            wanted.pop(pair, None)
        used.update(row.items())
        rows.append({axis: row[axis] for axis in axes})
    return rows


def _pairs(axes: Axes) -> Iterator[Row]:
    for first, second in combinations(axes, 2):
        for left, right in product(axes[first], axes[second]):
            yield {first: left, second: right}


def _extend(
    row: Row, axes: Axes, allows: Allows, wanted: Mapping[Pair, None], used: Counter[tuple[str, Hashable]]
) -> Row:
    """Complete a row, axis by axis."""
    for axis in axes:
        if axis in row:
            continue
        possible = [value for value in axes[axis] if _completes({**row, axis: value}, axes, allows)]

        def gain(value: Hashable, axis: str = axis) -> tuple[int, int]:
            new = sum(frozenset(((axis, value), other)) in wanted for other in row.items())
            return new, -used[axis, value]

        row[axis] = max(possible, key=gain)
    return row


def _completes(row: Row, axes: Axes, allows: Allows) -> bool:
    """Whether a row can be completed without breaking a rule."""
    if not allows(row):
        return False
    axis = next((axis for axis in axes if axis not in row), None)
    return axis is None or any(_completes({**row, axis: value}, axes, allows) for value in axes[axis])
