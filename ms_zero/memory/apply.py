"""Recompute of a model's blocks by a policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from mindspore import nn

from ms_zero import kernels
from ms_zero.errors import UserError
from ms_zero.memory.construct import Replacement
from ms_zero.memory.recompute import recompute
from ms_zero.memory.segment import Segment, SegmentedList, recompute_segments
from ms_zero.plan.recompute import BytesOf, RecomputePlan, peak_bytes, plan_recompute


@dataclass(frozen=True)
class Applied:
    """What `apply_recompute` did.

    Attributes:
        plan: the choice of blocks.
        cells: path in the model -> cell whose ``construct`` was replaced.
        text: one line for the log.
    """

    plan: RecomputePlan
    cells: dict[str, nn.Cell]
    text: str
    replacements: tuple[Replacement | Segment | SegmentedList, ...]

    def remove(self) -> None:
        """Undo it."""
        for replacement in reversed(self.replacements):
            replacement.remove()


def find_blocks(model: nn.Cell) -> dict[str, nn.Cell]:
    """The blocks of a model by path, in order: the members of its outermost ``nn.CellList``s.

    Raises:
        UserError: the model has none.
    """
    lists = {path: cell for path, cell in model.cells_and_names() if isinstance(cell, nn.CellList)}
    outer = {p: c for p, c in lists.items() if not any(p.startswith(f"{other}.") for other in lists)}
    blocks = {f"{path}.{index}": block for path, cells in outer.items() for index, block in enumerate(cells)}
    if not blocks:
        raise UserError(
            f"recompute: {type(model).__name__} has no nn.CellList of blocks: give the blocks as `blocks`"
        )
    return blocks


def apply_recompute(
    model: nn.Cell,
    kind: str,
    *,
    every: int | None = None,
    budget_bytes: float | None = None,
    bytes_of: BytesOf | None = None,
    in_flight: int = 1,
    blocks: dict[str, nn.Cell] | None = None,
    cores: tuple[type[nn.Cell], ...] = (kernels.CausalAttention,),
) -> Applied:
    """Recompute the blocks that a policy chooses; see `ms_zero.plan.recompute`.

    Args:
        model: any model; it keeps its cells, parameters and names.
        kind: one of ``RECOMPUTE_KINDS``.
        every: k of every_k.
        budget_bytes: bytes that the activations of all blocks of this rank may take, for budget.
        bytes_of: bytes that one block keeps of one microbatch, see `ms_zero.plan.recompute.BytesOf`.
        in_flight: microbatches whose activations are held at a time, for budget.
        blocks: path -> block, in the order of calls; None: `find_blocks`.
        cores: cell types that compute softmax(Q K^T) V, for selective and budget.

    Raises:
        UserError: what `plan_recompute` and `recompute` refuse; no core in a block for selective.
    """
    blocks = find_blocks(model) if blocks is None else blocks
    plan = plan_recompute(
        kind, len(blocks), every=every, budget_bytes=budget_bytes, bytes_of=bytes_of, in_flight=in_flight
    )
    paths = list(blocks)
    found: dict[str, nn.Cell] = {}
    for number in plan.selective:
        found |= _cores(paths[number], blocks[paths[number]], cores)
    replacements: list[Replacement | Segment | SegmentedList] = []
    with ExitStack() as undo:  # all or nothing
        for path, cell in found.items():
            replacements.append(recompute(cell, enclosing=_around(model, path)))
            undo.callback(replacements[-1].remove)
        members = [[paths[number] for number in segment] for segment in plan.segments]
        for made in _recompute_blocks(model, blocks, members):
            replacements.append(made)
            undo.callback(made.remove)
        found |= {path: blocks[path] for segment in members for path in segment}
        undo.pop_all()
    text = plan.describe(len(blocks))
    if budget_bytes is not None:
        peak = peak_bytes(plan, len(blocks), bytes_of, in_flight)
        text += f", {peak / 1e9:.6g} of {budget_bytes / 1e9:.6g} GB"
    return Applied(plan, found, text, tuple(replacements))


def _recompute_blocks(
    model: nn.Cell, blocks: dict[str, nn.Cell], segments: list[list[str]]
) -> Iterator[Replacement | Segment | SegmentedList]:
    if all(len(segment) == 1 for segment in segments):
        for (path,) in segments:
            yield recompute(blocks[path], enclosing=_around(model, path))
        return
    yield from recompute_segments(model, segments, _around(model, segments[0][0]))


def _cores(path: str, block: nn.Cell, types: tuple[type[nn.Cell], ...]) -> dict[str, nn.Cell]:
    found = {
        f"{path}.{name}" if name else path: cell
        for name, cell in block.cells_and_names()
        if isinstance(cell, types)
    }
    if not found:
        names = " or ".join(core.__name__ for core in types)
        raise UserError(
            f"recompute: {path} ({type(block).__name__}) contains no {names}:"
            f" name the cells of its attention core as `cores`, or choose full"
        )
    return found


def _around(model: nn.Cell, path: str) -> list[nn.Cell]:
    """The cells of `model` that contain the one at `path`, and `model`."""
    return [cell for other, cell in model.cells_and_names() if not other or path.startswith(f"{other}.")]
