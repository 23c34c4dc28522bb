"""Recompute of a model's blocks by a policy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_zero import kernels
from ms_zero._compat import has_backward_hooks, leaf
from ms_zero.errors import UserError
from ms_zero.memory.construct import Construct, Replacement, replace_construct
from ms_zero.memory.recompute import RecomputedCall, recompute
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
    replacements: tuple[Replacement, ...]

    def remove(self) -> None:
        """Undo it."""
        for replacement in self.replacements:
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
    replacements: list[Replacement] = []
    with ExitStack() as undo:  # all or nothing
        for path, cell in found.items():
            replacements.append(recompute(cell, enclosing=_around(model, path)))
            undo.callback(replacements[-1].remove)
        for segment in plan.segments:
            members = {paths[number]: blocks[paths[number]] for number in segment}
            for replacement in _recompute_segment(list(members.values()), _around(model, paths[segment[0]])):
                replacements.append(replacement)
                undo.callback(replacement.remove)
            found |= members
        undo.pop_all()
    text = plan.describe(len(blocks))
    if budget_bytes is not None:
        peak = peak_bytes(plan, len(blocks), bytes_of, in_flight)
        text += f", {peak / 1e9:.6g} of {budget_bytes / 1e9:.6g} GB"
    return Applied(plan, found, text, tuple(replacements))


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


def _recompute_segment(cells: list[nn.Cell], around: list[nn.Cell]) -> Iterator[Replacement]:
    if len(cells) == 1:
        yield recompute(cells[0], enclosing=around)
        return
    segment = _Segment(cells, around)
    for number, cell in enumerate(cells):
        run = segment.member(number) if number else segment.run
        saves = (lambda: False) if number else segment.is_called_by_model
        yield replace_construct(cell, "recomputed", run, saves=saves)


class _Segment:
    """Consecutive blocks that run again as one.

    The model goes on calling each block. The first call runs the whole segment and returns its result; the
    other blocks then hand on what they are given, which has to be that result. Forward hooks of the blocks
    fire in both calls, so they must not change a value that they have already changed (rounding may).
    """

    def __init__(self, cells: list[nn.Cell], around: list[nn.Cell]) -> None:
        self._cells = cells
        self._constructs: list[Construct] = [cell.construct for cell in cells]
        self._call = RecomputedCall(self._forward, cells, around)
        self._inside = False
        self._passed: tuple[Any, ...] = ()

    def is_called_by_model(self) -> bool:
        return not self._inside

    def run(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._inside:
            return self._constructs[0](x, *args, **kwargs)
        hooked = next((cell for cell in self._cells if has_backward_hooks(cell)), None)
        if hooked is not None:
            raise UserError(
                f"recompute: a {type(hooked).__name__} in a segment has backward hooks (as stage 3 registers "
                f"them), and a segment has one backward: choose full instead of sqrt"
            )
        out = self._call(x, *args, **kwargs)
        self._passed = (out, *args, *kwargs.values())
        return out

    def _forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        outside, self._inside = self._inside, True
        try:
            for cell in self._cells:  # with their hooks: what they change lies between the blocks
                x = cell(x, *args, **kwargs)
            return x
        finally:
            self._inside = outside

    def member(self, number: int) -> Construct:
        def construct(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if self._inside:
                return self._constructs[number](x, *args, **kwargs)
            if not _same((x, *args, *kwargs.values()), self._passed):
                name = type(self._cells[number]).__name__
                raise UserError(
                    f"recompute: block {number} of a segment ({name}) is not given the result of the block "
                    f"before it and its other arguments: choose full instead of sqrt"
                )
            if number == len(self._cells) - 1:
                self._passed = ()
            return x

        return construct


def _same(given: tuple[Any, ...], expected: tuple[Any, ...]) -> bool:
    if len(given) != len(expected):
        return False
    return all(a is b or _equal(a, b) for a, b in zip(given, expected, strict=True))


def _equal(left: Any, right: Any) -> bool:
    """Whether a hook left the values as they were."""
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return False
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    pair = [leaf(tensor, requires_grad=False).astype(ms.float32).asnumpy() for tensor in (left, right)]
    return np.array_equal(*pair, equal_nan=True)
