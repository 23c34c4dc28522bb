"""Which part of each parameter a rank holds under AutoParallel, as checkpoints name it.

MindSpore says for each parameter how the devices of a pipeline stage are arranged ("device matrix"), which of
these axes cuts which dim ("tensor map": counted from the last axis, -1 for none), and which ranks then share
the rows of that part (the group of hsdp).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ms_zero.comm import Communicator
from ms_zero.errors import UserError
from ms_zero.parallel.placement import Box

_UNEVEN = 0


@dataclass(frozen=True)
class ParameterLayout:
    """How a parameter is cut.

    Attributes:
        devices: extents of the axes of a stage, slowest first.
        axes: for each dim the axes that cut it, outermost first.
        shape: of the whole parameter.
        row_group: name of the group whose ranks share the rows of a part; "" for none.
    """

    devices: tuple[int, ...]
    axes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    row_group: str = ""

    def box(self, rank: int, row_part: tuple[int, int] = (0, 1)) -> Box:
        """The part of a rank.

        Args:
            rank: of the job.
            row_part: index and number of parts in the group of rows.
        """
        box = Box.whole(self.shape)
        coordinates = _coordinates(rank, self.devices)
        for dim, axes in enumerate(self.axes):
            for axis in axes:
                box = _nth(box, dim, coordinates[axis], self.devices[axis])
        return _nth(box, 0, *row_part) if row_part[1] > 1 else box


def read_layout(name: str, layout: Sequence[Any]) -> ParameterLayout:
    """Read an entry of ``Cell.parameter_layout_dict``.

    Raises:
        UserError: parts of unequal size, which MindSpore can compile but not save.
    """
    devices, tensor_map, _, _, uniform, row_group, shape = layout[:7]
    if uniform == _UNEVEN:
        raise UserError(f"graph: parameter {name} is cut in unequal parts: choose degrees that divide it")
    last = len(devices) - 1
    axes = []
    for entry in tensor_map:
        entries = entry if isinstance(entry, list | tuple) else (entry,)
        axes.append(tuple(last - each for each in entries if each != -1))
    return ParameterLayout(tuple(devices), tuple(axes), tuple(shape), row_group or "")


def held_boxes(
    layouts: Mapping[str, Sequence[Any]], rank: int, row_part: Callable[[str], tuple[int, int]]
) -> dict[str, Box]:
    """The part of each parameter that a rank holds.

    Args:
        layouts: ``parameter_layout_dict`` of the compiled Cell.
        rank: of the job.
        row_part: name of a group of rows -> this rank's index in it, and its size.
    """
    boxes = {}
    for name, entry in layouts.items():
        layout = read_layout(name, entry)
        boxes[name] = layout.box(rank, row_part(layout.row_group) if layout.row_group else (0, 1))
    return boxes


def saved_here(comm: Communicator, boxes: Mapping[str, Box]) -> set[str]:
    """Parameters whose part this rank writes: the first rank that holds a part does. Collective."""
    parts = comm.exchange([[name, list(box.offset)] for name, box in boxes.items()])
    first: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank, held in enumerate(parts):
        for name, offset in held:
            first.setdefault((name, tuple(offset)), rank)
    return {name for name, box in boxes.items() if first[name, box.offset] == comm.rank}


def _coordinates(rank: int, devices: Sequence[int]) -> list[int]:
    coordinates = []
    for extent in reversed(devices):
        rank, coordinate = divmod(rank, extent)
        coordinates.insert(0, coordinate)
    return coordinates


def _nth(box: Box, dim: int, index: int, parts: int) -> Box:
    size, rest = divmod(box.shape[dim], parts)
    assert rest == 0, (box, dim, parts)
    return box.cut(dim, index * size, (index + 1) * size)
