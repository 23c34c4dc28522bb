"""Where each parameter lies inside a flat bucket: pure arithmetic, no tensors.

A bucket is the unit of communication and of the optimizer: a one-dimensional buffer that holds several
parameters one after another, padded so that it cuts into equal chunks, one per data-parallel rank. Chunk r
belongs to the rank with index r. Reduction, optimizer state and checkpoint pieces all follow this map.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any


@dataclass(frozen=True)
class ParamSpec:
    """A parameter to place: its logical name, global shape and the key that buckets must not mix."""

    name: str
    shape: tuple[int, ...]
    key: Hashable = None

    @property
    def numel(self) -> int:
        """Number of elements; a 0-dim parameter has one."""
        return prod(self.shape)


@dataclass(frozen=True)
class Slot:
    """The range ``[start, stop)`` of a bucket that holds one parameter in row-major order."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int

    def view(self, full: Any) -> Any:
        """The parameter inside the whole buffer (an array or a tensor), in its own shape."""
        return full[self.start : self.stop].reshape(self.shape)


@dataclass(frozen=True)
class Piece:
    """The part of one parameter inside a range of a bucket, as a flat range of that parameter."""

    slot: Slot
    start: int
    stop: int


@dataclass(frozen=True)
class BucketLayout:
    """The slots of one bucket. ``padded_size`` is the least multiple of ``degree`` that holds them."""

    slots: tuple[Slot, ...]
    degree: int
    key: Hashable = None

    @property
    def size(self) -> int:
        """Elements that belong to parameters."""
        return self.slots[-1].stop

    @property
    def padded_size(self) -> int:
        """Elements of the buffer."""
        return -(-self.size // self.degree) * self.degree

    def chunk(self, index: int) -> tuple[int, int]:
        """The range ``[start, stop)`` of the buffer owned by the rank with this index."""
        length = self.padded_size // self.degree
        return index * length, (index + 1) * length

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The parameter parts inside ``[start, stop)`` of the buffer; padding yields nothing."""
        for slot in self.slots:
            low, high = max(start, slot.start), min(stop, slot.stop)
            if low < high:
                yield Piece(slot, low - slot.start, high - slot.start)


def plan_buckets(params: Sequence[ParamSpec], *, max_elements: int, degree: int) -> list[BucketLayout]:
    """Place parameters into buckets in the order in which backward is expected to finish them.

    Backward meets parameters roughly in reverse order of definition, so buckets are filled from the last
    parameter to the first and returned by the position of their last-finished parameter. Keys are never mixed
    (for example weight decay on and off). A parameter larger than ``max_elements`` gets its own bucket.

    Args:
        params: parameters in definition order; names must be unique.
        max_elements: a bucket is closed before it would exceed this many elements.
        degree: number of chunks; the buffer is padded to a multiple of it.
    """
    assert len({spec.name for spec in params}) == len(params), "parameter names must be unique"
    buckets: list[list[Slot]] = []
    finished_at: list[int] = []  # per bucket, the position of its last parameter
    open_bucket: dict[Hashable, int] = {}
    keys: list[Hashable] = []
    for position, spec in enumerate(reversed(params)):
        index = open_bucket.get(spec.key)
        if index is None or buckets[index][-1].stop + spec.numel > max_elements:
            index = open_bucket[spec.key] = len(buckets)
            buckets.append([])
            finished_at.append(position)
            keys.append(spec.key)
        start = buckets[index][-1].stop if buckets[index] else 0
        buckets[index].append(Slot(spec.name, spec.shape, start, start + spec.numel))
        finished_at[index] = position
    order = sorted(range(len(buckets)), key=finished_at.__getitem__)
    return [BucketLayout(tuple(buckets[i]), degree, keys[i]) for i in order]
