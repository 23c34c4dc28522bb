"""Where a shard lies in its global tensor, and how shards of different layouts overlap.

Every layout the project knows cuts a tensor into *boxes* (tensor, expert and pipeline parallelism) and then
cuts the row-major elements of a box into *flat ranges* (ZeRO). A flat range of a box is a union of at most
``2 * ndim - 1`` boxes, so everything here is boxes: coverage and copying between layouts are intersections.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from ms_zero.errors import UserError


@dataclass(frozen=True)
class Shard:
    """A part of a global tensor.

    Attributes:
        name: logical name of the tensor, the same in every layout.
        global_shape: shape of the whole tensor; ``()`` for a scalar.
        dtype: name of the stored dtype, a key of :data:`ms_zero.checkpoint.tensorfile.DTYPES`.
        offset: first corner of the box inside the global tensor, one number per dim.
        shape: extent of the box.
        flat_start: first element of the shard, counted row-major inside the box.
        flat_stop: one past the last; ``prod(shape)`` together with ``flat_start=0`` means the whole box.

    Raises:
        UserError: if the box leaves the tensor or the range leaves the box.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    flat_start: int
    flat_stop: int

    def __post_init__(self) -> None:
        for field in ("global_shape", "offset", "shape"):
            object.__setattr__(self, field, tuple(int(n) for n in getattr(self, field)))
        for field in ("flat_start", "flat_stop"):
            object.__setattr__(self, field, int(getattr(self, field)))
        same_rank = len(self.global_shape) == len(self.offset) == len(self.shape)
        if not same_rank or any(
            low < 0 or extent < 0 or low + extent > size
            for low, extent, size in zip(self.offset, self.shape, self.global_shape)
        ):
            raise UserError(
                f"{self.name}: box at {self.offset} of shape {self.shape} lies outside the tensor "
                f"of shape {self.global_shape}"
            )
        if not 0 <= self.flat_start <= self.flat_stop <= prod(self.shape):
            raise UserError(
                f"{self.name}: flat range {self.flat_start}..{self.flat_stop} lies outside its box "
                f"of {prod(self.shape)} elements"
            )

    @classmethod
    def whole(cls, name: str, shape: Sequence[int], dtype: str) -> "Shard":
        """The shard that is the whole tensor."""
        shape = tuple(shape)
        return cls(name, shape, dtype, (0,) * len(shape), shape, 0, prod(shape))

    @classmethod
    def flat(cls, name: str, shape: Sequence[int], dtype: str, start: int, stop: int) -> "Shard":
        """Elements ``start`` to ``stop`` of the whole tensor in row-major order."""
        shape = tuple(shape)
        return cls(name, shape, dtype, (0,) * len(shape), shape, start, stop)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.flat_stop - self.flat_start

    @property
    def array_shape(self) -> tuple[int, ...]:
        """Shape of the array that holds the shard: the box, or one-dimensional for a part of it."""
        return self.shape if self.size == prod(self.shape) else (self.size,)


@dataclass(frozen=True)
class Piece:
    """A box of the global tensor that is one contiguous run of a shard's elements, from ``start`` on."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    start: int

    def overlap(self, other: "Piece") -> tuple[tuple[int, int], ...] | None:
        """Per dim the common range ``(low, high)`` in global coordinates, or None if there is none."""
        ranges = tuple(
            (max(a, b), min(a + m, b + n))
            for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape)
        )
        return None if any(low >= high for low, high in ranges) else ranges

    def view(self, flat: np.ndarray, ranges: Sequence[tuple[int, int]]) -> np.ndarray:
        """The elements of ``ranges`` (global coordinates) as a view of the shard's flat array."""
        box = flat[self.start : self.start + prod(self.shape)].reshape(self.shape)
        # The ellipsis keeps a view where there is no dim to slice.
        return box[(..., *(slice(low - at, high - at) for (low, high), at in zip(ranges, self.offset)))]


def pieces(shard: Shard) -> list[Piece]:
    """Cut a shard into boxes of the global tensor, in the order of its elements."""
    boxes = _boxes_of_range(shard.shape, shard.flat_start, shard.flat_stop)
    found, start = [], 0
    for offset, shape in boxes:
        found.append(Piece(tuple(a + b for a, b in zip(shard.offset, offset)), shape, start))
        start += prod(shape)
    return found


def _boxes_of_range(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offset, shape) of the boxes that make up row-major elements ``start`` to ``stop``."""
    if start >= stop:
        return
    if not shape:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows [first, last)
    if first > last:  # inside one row
        yield from _boxes_in_row(shape, last, start, stop)
        return
    yield from _boxes_in_row(shape, first - 1, start, first * row)
    if first < last:
        yield (first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:])
    yield from _boxes_in_row(shape, last, last * row, stop)


def _boxes_in_row(
    shape: tuple[int, ...], index: int, start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    base = index * prod(shape[1:])
    for offset, extent in _boxes_of_range(shape[1:], start - base, stop - base):
        yield (index, *offset), (1, *extent)


@dataclass(frozen=True)
class Intersection:
    """A box that a target and a source shard share: the pieces it lies in and its global coordinates."""

    target: Piece
    source: Piece
    ranges: tuple[tuple[int, int], ...]

    def copy(self, target_flat: np.ndarray, source_flat: np.ndarray) -> int:
        """Copy the box between the flat arrays of the two shards; returns the number of elements."""
        part = self.source.view(source_flat, self.ranges)
        self.target.view(target_flat, self.ranges)[...] = part
        return part.size


def intersections(target: Shard, source: Shard) -> list[Intersection]:
    """The disjoint boxes that make up what two shards of one tensor share."""
    source_pieces = pieces(source)
    return [
        Intersection(to, piece, ranges)
        for to in pieces(target)
        for piece in source_pieces
        if (ranges := to.overlap(piece)) is not None
    ]


def check_coverage(shards: Sequence[Shard], labels: Sequence[Any]) -> None:
    """Check that the shards of one tensor agree and tile it: each element exactly once.

    Args:
        shards: all shards of one name, at least one.
        labels: per shard, who holds it; used in messages.

    Raises:
        UserError: naming the tensor and the holders in disagreement.
    """
    first = shards[0]
    for shard, label in zip(shards, labels):
        if (shard.global_shape, shard.dtype) != (first.global_shape, first.dtype):
            raise UserError(
                f"{first.name}: {labels[0]} calls it {first.dtype}{list(first.global_shape)}, "
                f"{label} {shard.dtype}{list(shard.global_shape)}; every rank must describe one tensor"
            )
    placed = [(piece, label) for shard, label in zip(shards, labels) for piece in pieces(shard)]
    _check_disjoint(first.name, placed)
    covered, total = sum(prod(piece.shape) for piece, _ in placed), prod(first.global_shape)
    if covered < total:
        raise UserError(f"{first.name}: {total - covered} of {total} elements are held by no rank")


def _check_disjoint(name: str, placed: list[tuple[Piece, Any]]) -> None:
    """Sweep along the dim with the most cuts, so that only neighbours are compared."""
    if not placed:
        return
    dims = range(len(placed[0][0].offset))
    dim = max(dims, key=lambda d: len({piece.offset[d] for piece, _ in placed}), default=None)
    if dim is not None:
        placed = sorted(placed, key=lambda entry: entry[0].offset[dim])
    for i, (piece, label) in enumerate(placed):
        for other, other_label in placed[i + 1 :]:
            if dim is not None and other.offset[dim] >= piece.offset[dim] + piece.shape[dim]:
                break
            shared = piece.overlap(other)
            if shared is not None:
                raise UserError(
                    f"{name}: {label} and {other_label} both hold the element at "
                    f"{tuple(low for low, _ in shared)}; each element is saved by one rank"
                )
