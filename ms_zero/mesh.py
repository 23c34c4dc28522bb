"""The mesh: a named grid of ranks, as arithmetic.

A rank is a number in mixed radix whose digits are its coordinates. Axes, slowest first: ``pp``,
``dp_replicate``, ``dp_shard``, ``cp``, ``tp``; ``tp`` varies fastest, so tensor-parallel neighbours are
consecutive ranks and stay inside a node. Expert parallelism takes no ranks of its own: it re-reads the two
digits (``dp_shard``, ``cp``) as one number and splits that into ``edp`` (slow) and ``ep`` (fast), so an
expert group is a contiguous run of ``ep`` positions of that fold.

Nothing here creates communication groups or enumerates the world; every answer costs only its own size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

from ms_zero.errors import UserError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Mesh axes, slowest first."""

EXPERT_AXES = ("edp", "ep")
"""The expert reading of the (``dp_shard``, ``cp``) fold, slowest first."""

_EXPERT_VIEW = ("pp", "dp_replicate", *EXPERT_AXES, "tp")


class _Digit(NamedTuple):
    """One coordinate of a rank: it takes ``size`` values and weighs ``stride`` ranks each."""

    size: int
    stride: int


@dataclass(frozen=True)
class Mesh:
    """Degrees of every axis; the world is their product, ``ep`` excluded because it folds into others.

    Args:
        pp: pipeline stages.
        dp_replicate: data-parallel replicas of the parameter shards.
        dp_shard: data-parallel ranks that parameters, gradients or optimizer states are sharded over.
        cp: context parallel degree.
        tp: tensor parallel degree.
        ep: expert parallel degree; divides ``dp_shard * cp``.

    Raises:
        UserError: a degree is not a positive integer, or ``ep`` does not divide ``dp_shard * cp``.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep"):
            degree = getattr(self, axis)
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise UserError(f"mesh degree {axis}={degree!r}: expected an integer of at least 1")
        fold = self.dp_shard * self.cp
        if fold % self.ep:
            raise UserError(
                f"mesh degree ep={self.ep} does not divide dp_shard x cp = {self.dp_shard} x {self.cp} = "
                f"{fold}, the ranks it folds into: choose ep among the divisors of {fold}"
            )

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def dp(self) -> int:
        """Data-parallel degree: how many ranks see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def edp(self) -> int:
        """Copies of each expert within one replica: ``dp_shard * cp / ep``."""
        return self.dp_shard * self.cp // self.ep

    def degree(self, axis: str) -> int:
        """Size of one axis, expert axes included."""
        self._check_axes((axis,))
        return getattr(self, axis)

    def coords(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank` on the five mesh axes, slowest first."""
        self._check_rank(rank)
        return {axis: rank // digit.stride % digit.size for axis, digit in self._digits(AXES).items()}

    def rank_of(self, **coords: int) -> int:
        """Inverse of :meth:`coords`. An axis of degree 1 may be left out; any other must be given."""
        self._check_axes(tuple(coords), allowed=AXES)
        rank = 0
        for axis, digit in self._digits(AXES).items():
            if axis not in coords and digit.size > 1:
                raise UserError(f"coordinate {axis} is missing: it may be 0 to {digit.size - 1}")
            coordinate = coords.get(axis, 0)
            if not 0 <= coordinate < digit.size:
                raise UserError(f"coordinate {axis}={coordinate} is outside 0 to {digit.size - 1}")
            rank += coordinate * digit.stride
        return rank

    def members(self, rank: int, axes: Sequence[str]) -> tuple[int, ...]:
        """Ranks of the group that contains `rank` and spans `axes`, ascending.

        The order of `axes` does not matter: members always come in mesh order.
        """
        self._check_rank(rank)
        spanned, _ = self._split(axes)
        first = rank - sum(rank // digit.stride % digit.size * digit.stride for digit in spanned)
        return tuple(first + offset for offset in _offsets(spanned))

    def index_in(self, rank: int, axes: Sequence[str]) -> int:
        """Position of `rank` in ``members(rank, axes)``."""
        self._check_rank(rank)
        index = 0
        for digit in self._split(axes)[0]:
            index = index * digit.size + rank // digit.stride % digit.size
        return index

    def groups(self, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
        """All groups that span `axes`, ascending by their first rank: a partition of the world."""
        spanned, fixed = self._split(axes)
        for first in _offsets(fixed):
            yield tuple(first + offset for offset in _offsets(spanned))

    def dp_rank(self, rank: int) -> int:
        """Index of `rank` among the ranks that see different samples, ``0 <= dp_rank < dp``."""
        return self.index_in(rank, ("dp_replicate", "dp_shard"))

    def describe(self) -> str:
        """Short text such as ``16 ranks: pp 4 x dp_shard 2 x tp 2``; axes of degree 1 are left out."""
        parts = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        expert = f" (ep {self.ep} in dp_shard x cp)" if self.ep > 1 else ""
        noun = "rank" if self.world_size == 1 else "ranks"
        return f"{self.world_size} {noun}" + (": " + " x ".join(parts) if parts else "") + expert

    def _digits(self, view: tuple[str, ...]) -> dict[str, _Digit]:
        """Digits of a view of the world, slowest first."""
        digits, stride = {}, 1
        for axis in reversed(view):
            digits[axis] = _Digit(getattr(self, axis), stride)
            stride *= digits[axis].size
        return {axis: digits[axis] for axis in view}

    def _split(self, axes: Sequence[str]) -> tuple[list[_Digit], list[_Digit]]:
        """Digits that `axes` span and those they leave fixed, each slowest first."""
        self._check_axes(axes)
        expert = any(axis in EXPERT_AXES for axis in axes)
        mixed = [axis for axis in axes if axis in ("dp_shard", "cp")]
        if expert and mixed:
            raise UserError(
                f"axes {tuple(axes)}: {mixed[0]} cannot be combined with ep or edp, which re-read the same "
                "ranks; ep and edp together span dp_shard x cp"
            )
        digits = self._digits(_EXPERT_VIEW if expert else AXES)
        spanned = [digit for axis, digit in digits.items() if axis in axes]
        fixed = [digit for axis, digit in digits.items() if axis not in axes]
        return spanned, fixed

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise UserError(f"rank {rank} is outside the mesh ({self.describe()})")

    def _check_axes(self, axes: Sequence[str], allowed: tuple[str, ...] = (*AXES, *EXPERT_AXES)) -> None:
        if isinstance(axes, str):
            raise UserError(f"axes {axes!r}: expected a tuple of axis names, such as ({axes!r},)")
        for axis in axes:
            if axis not in allowed:
                raise UserError(f"unknown mesh axis {axis!r}: expected one of {', '.join(allowed)}")
        if len(set(axes)) != len(axes):
            raise UserError(f"axes {tuple(axes)} name an axis twice")


def _offsets(digits: Sequence[_Digit]) -> Iterator[int]:
    """Rank offsets of every combination of coordinates, ascending (the last digit varies fastest)."""
    for steps in product(*(range(0, digit.size * digit.stride, digit.stride) for digit in digits)):
        yield sum(steps)
