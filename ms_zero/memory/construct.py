"""Replacing what a cell computes between its hooks, in layers that can be taken off again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mindspore import nn

from ms_zero.errors import UserError

Construct = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class Replacement:
    """Stands in for ``cell.construct``.

    Attributes:
        cell: the cell.
        verb: what is done to it, "recomputed" or "packed".
        run: the new computation.
        before: what stood in before, None for the cell's own method.
        saves: whether a call, now, is one that saves something until backward. Of a segment the first
            cell's call by the model does, and no call within the segment's run.
    """

    cell: nn.Cell
    verb: str
    run: Construct
    before: Replacement | None
    saves: Callable[[], bool] = lambda: True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute."""
        return self.run(*args, **kwargs)

    def remove(self) -> None:
        """Give the cell back what it computed before.

        Raises:
            UserError: something else was laid over this one, or it is removed already.
        """
        if replacement_of(self.cell) is not self:
            raise UserError(
                f"memory: this {type(self.cell).__name__} is not {self.verb} now, or something was applied "
                f"to it afterwards: remove in the reverse order"
            )
        del self.cell.construct
        if self.before is not None:
            self.cell.construct = self.before


def replacement_of(cell: nn.Cell) -> Replacement | None:
    """What stands in for the cell's own ``construct`` now."""
    return vars(cell).get("construct")


def is_recomputed(cell: nn.Cell) -> bool:
    """Whether recompute was applied to the cell, under whatever came later."""
    present = replacement_of(cell)
    while present is not None and present.verb != "recomputed":
        present = present.before
    return present is not None


def replace_construct(
    cell: nn.Cell, verb: str, run: Construct, *, saves: Callable[[], bool] = lambda: True
) -> Replacement:
    """Let `cell` compute `run`, which may call the present ``cell.construct`` (taken before).

    Raises:
        UserError: the same is done to the cell already, or recompute comes after packing.
    """
    before = replacement_of(cell)
    if before is not None:
        _check_order(cell, before, verb)
    replacement = Replacement(cell, verb, run, before, saves)
    if before is not None:
        del cell.construct
    cell.construct = replacement
    return replacement


def _check_order(cell: nn.Cell, before: Replacement, verb: str) -> None:
    """Inputs that recompute keeps can be packed; packing what a second forward makes would be for nothing."""
    if (before.verb, verb) == ("recomputed", "packed"):
        return
    hint = "apply it once" if before.verb == verb else "apply recompute first"
    raise UserError(f"memory: this {type(cell).__name__} is {before.verb} already: {hint}")
