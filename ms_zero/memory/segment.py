"""Several blocks recomputed as one.

A model that calls its blocks one after another, each on the result of the one before (a tensor, or a tuple
of the first arguments of the next) and with the same further arguments, says so by an attribute of the cell
that holds the list::

    chained_blocks = ("h",)   # names of nn.CellLists, iterated once a forward

Only then can a loop over the list be shortened: iterating it gives one `Segment` in place of the blocks that
are recomputed together. Each block is still called as a cell, once in forward and once more before its
backward, so that its hooks fire there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mindspore import Tensor, nn

from ms_zero.errors import UserError
from ms_zero.memory.construct import Construct, Replacement, replace_construct
from ms_zero.memory.recompute import RecomputedCall

CHAINED = "chained_blocks"


class Segment(nn.Cell):
    """Runs consecutive blocks; holds no parameters of its own."""

    def __init__(self, blocks: Sequence[nn.Cell], enclosing: Sequence[nn.Cell]) -> None:
        """Replace the blocks' constructs by ones that only work inside; ``enclosing`` contains the blocks."""
        super().__init__(auto_prefix=False)
        # Not attributes that the framework would register: the blocks stay cells of the model alone.
        vars(self)["blocks"] = tuple(blocks)
        vars(self)["is_running"] = False
        run = RecomputedCall(self._run_blocks, list(blocks), enclosing)
        replace_construct(self, "recomputed", run)
        vars(self)["guards"] = [
            replace_construct(block, "recomputed", self._guard(block.construct), saves=lambda: False)
            for block in blocks
        ]

    def construct(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        """Run the blocks without recompute; replaced while this object lives."""
        return self._run_blocks(*args, **kwargs)

    def remove(self) -> None:
        """Give the blocks their own constructs back."""
        for guard in reversed(self.guards):
            guard.remove()

    def _run_blocks(self, *args: Any, **kwargs: Any) -> Tensor | tuple[Tensor, ...]:
        outside, vars(self)["is_running"] = self.is_running, True
        try:
            for block in self.blocks:
                result = block(*args, **kwargs)
                passed_on = result if isinstance(result, tuple) else (result,)
                args = (*passed_on, *args[len(passed_on) :])
            return result
        finally:
            vars(self)["is_running"] = outside

    def _guard(self, construct: Construct) -> Construct:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.is_running:
                raise UserError(
                    f"recompute: a block of a segment is called by itself; with sqrt a model has to loop "
                    f"over the lists that it names in {CHAINED}: correct that, or choose full"
                )
            return construct(*args, **kwargs)

        return run


class SegmentedList:
    """Lets iteration over an ``nn.CellList`` give segments; everything else about the list stays."""

    def __init__(self, blocks: nn.CellList, items: Sequence[nn.Cell]) -> None:
        """``items``: what a loop over the list gets."""
        self._list, self._class = blocks, type(blocks)

        def iterate(_: nn.CellList) -> Iterator[nn.Cell]:
            return iter(items)

        # A loop asks the class, so the list gets one of its own.
        blocks.__class__ = type("SegmentedCellList", (self._class,), {"__iter__": iterate})

    def remove(self) -> None:
        """Loops get the blocks again."""
        self._list.__class__ = self._class


def chained_lists(model: nn.Cell) -> dict[str, nn.CellList]:
    """The lists that cells of ``model`` name in ``chained_blocks``, by path."""
    return {
        f"{path}.{name}".lstrip("."): getattr(cell, name)
        for path, cell in model.cells_and_names()
        for name in getattr(cell, CHAINED, ())
    }


def recompute_segments(
    model: nn.Cell, segments: Sequence[Sequence[str]], enclosing: Sequence[nn.Cell]
) -> list[Replacement | Segment | SegmentedList]:
    """Recompute runs of blocks, given by their paths, as one each; what to remove, in reverse order.

    Raises:
        UserError: the blocks are not those of one list that the model names in ``chained_blocks``.
    """
    lists = chained_lists(model)
    paths = [path for segment in segments for path in segment]
    owners = {path.rpartition(".")[0] for path in paths}
    if len(owners) != 1 or not owners <= lists.keys():
        raise UserError(
            f"recompute: sqrt runs blocks together, so {type(model).__name__} has to say that it calls them "
            f"one after another: {CHAINED} = (name of their nn.CellList,) in the cell that holds the list; "
            f"or choose full"
        )
    blocks = lists[owners.pop()]
    by_number = {int(path.rpartition(".")[2]): path for path in paths}
    first = {int(segment[0].rpartition(".")[2]): segment for segment in segments}
    made, items = [], []
    for number, block in enumerate(list(blocks)):
        if number in first:
            members = [blocks[int(path.rpartition(".")[2])] for path in first[number]]
            made.append(Segment(members, enclosing))
            items.append(made[-1])
        elif number not in by_number:
            items.append(block)
    return [*made, SegmentedList(blocks, items)]
