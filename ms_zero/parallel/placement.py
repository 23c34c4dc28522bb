"""Where the part of a parameter that one rank holds lies in the whole, and who holds the same part.

A technique that cuts parameters describes each local one by a :class:`Placement`; initial values, checkpoints
and the gradient norm follow from that alone. A parameter without one is whole, and nobody but the
data-parallel ranks holds it too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ms_zero.comm import Group

#: (name, start, stop) -> elements start ... stop-1 of a parameter in row-major order, fp32.
FlatValues = Callable[[str, int, int], np.ndarray]


def split_evenly(size: int, parts: int, index: int) -> tuple[int, int]:
    """The range [start, stop) of part `index`; parts differ by at most one element.

    Nothing is padded: with 7 elements in 3 parts they have 2, 2 and 3.
    """
    return size * index // parts, size * (index + 1) // parts


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor.

    Attributes:
        global_shape: of the whole tensor.
        offset: its first corner there, one number per dim.
        shape: its extent.
    """

    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        assert len(self.global_shape) == len(self.offset) == len(self.shape), self
        sides = zip(self.global_shape, self.offset, self.shape, strict=True)
        assert all(0 <= low <= low + extent <= size for size, low, extent in sides), self

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor."""
        return cls(tuple(shape), (0,) * len(shape), tuple(shape))

    def cut(self, dim: int, start: int, stop: int) -> Box:
        """The part of this box whose coordinates on `dim`, counted from its corner, are in [start, stop)."""
        assert 0 <= start <= stop <= self.shape[dim], (self, dim, start, stop)
        offset, shape = list(self.offset), list(self.shape)
        offset[dim] += start
        shape[dim] = stop - start
        return Box(self.global_shape, tuple(offset), tuple(shape))

    def take(self, whole: np.ndarray) -> np.ndarray:
        """This part of a whole array, as a view."""
        corners = zip(self.offset, self.shape, strict=True)
        return whole[(..., *(slice(low, low + extent) for low, extent in corners))]

    def runs(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Elements start ... stop-1 of the box, row-major, as runs (first, number) of the whole tensor."""
        row = self._row()
        while start < stop:
            index, within = divmod(start, row)
            count = min(row - within, stop - start)
            yield self._first_of_row(index) + within, count
            start += count

    def _row(self) -> int:
        """Elements that are consecutive in the box and in the whole tensor."""
        row = 1
        for size, extent in zip(reversed(self.global_shape), reversed(self.shape), strict=True):
            row *= extent
            if extent != size:
                break
        return row

    def _first_of_row(self, index: int) -> int:
        """Number in the whole tensor of the first element of a row of :meth:`_row` elements."""
        index *= self._row()
        first, stride = 0, 1
        for size, low, extent in zip(
            reversed(self.global_shape), reversed(self.offset), reversed(self.shape), strict=True
        ):
            index, coordinate = divmod(index, extent)
            first += (low + coordinate) * stride
            stride *= size
        return first


@dataclass(frozen=True)
class Replicas:
    """Ranks of one model replica that hold the same box, on one axis.

    Attributes:
        group: these ranks.
        is_partial: whether the gradient of the parameter is the sum of theirs, rather than what each of them
            has.
    """

    group: Group
    is_partial: bool


@dataclass(frozen=True)
class Placement:
    """One parameter on one rank.

    Attributes:
        box: its part.
        replicas: who holds it too, axis by axis; ranks that differ only in their data are left out.
        parts: the ranks that hold one part each though they see different data (expert parallelism); None:
            all ranks that differ only in their data hold the same.
    """

    box: Box
    replicas: tuple[Replicas, ...] = ()
    parts: Group | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank is the one of its replicas that counts and saves the parameter."""
        return is_first(self.replicas)


def is_first(replicas: tuple[Replicas, ...]) -> bool:
    """Whether this process is the first of every group."""
    return all(axis.group.index == 0 for axis in replicas)


@dataclass(frozen=True)
class Placements:
    """The placements of a model's parameters by logical name.

    Attributes:
        by_name: those that are not simply whole.
        groups: groups over which this process has to sum to reach every part of the model once, one for each
            axis that cuts it. Parts of ranks that see different data are reached by a sum over these.
    """

    by_name: Mapping[str, Placement] = field(default_factory=dict)
    groups: tuple[Group, ...] = ()

    def box(self, name: str, shape: tuple[int, ...]) -> Box:
        """The box of a parameter whose local shape is `shape`."""
        placement = self.by_name.get(name)
        assert placement is None or placement.box.shape == tuple(shape), (name, placement, shape)
        return Box.whole(shape) if placement is None else placement.box

    def replicas(self, name: str) -> tuple[Replicas, ...]:
        """Who holds the same part of a parameter."""
        placement = self.by_name.get(name)
        return () if placement is None else placement.replicas

    def parts(self, name: str) -> Group | None:
        """The ranks that hold one part each of a parameter though they see different data."""
        placement = self.by_name.get(name)
        return None if placement is None else placement.parts

    def local_values(self, values: FlatValues) -> FlatValues:
        """Flat ranges of local parameters, given a source of the whole ones."""

        def local(name: str, start: int, stop: int) -> np.ndarray:
            if name not in self.by_name:
                return values(name, start, stop)
            out, at = np.empty(stop - start, np.float32), 0
            for first, count in self.by_name[name].box.runs(start, stop):
                out[at : at + count] = values(name, first, first + count)
                at += count
            return out

        return local
