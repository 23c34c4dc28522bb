"""Which of the blocks are recomputed, and what that keeps: arithmetic for the recipe and for the planner.

Kinds (L blocks, `b` bytes kept by a block as it is, `i` bytes of its input)::

    none       every block keeps what its operators save              L b
    selective  as none, but softmax(Q K^T) V is run again             L (b less the attention core)
    every_k    blocks 0, k, 2k ... keep only their input
    full       every block keeps only its input                       L i, and b in backward
    sqrt       segments of ceil(sqrt(L)) consecutive blocks keep the input of their first block and run again
               as one (Chen et al. 2016, arXiv:1604.06174)            sqrt(L) i, and sqrt(L) b in backward
    budget     the fewest operations run again so that the kept bytes stay within a budget

Transformer blocks save 17 and more times their input, so sqrt needs less than full only for L above 290.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ms_zero.errors import UserError

RECOMPUTE_KINDS = ("none", "selective", "full", "every_k", "sqrt", "budget")

#: Bytes that one block keeps under "none", "selective" and "full".
BytesOf = Callable[[str], float]


@dataclass(frozen=True, kw_only=True)
class RecomputePlan:
    """What is run again.

    Attributes:
        kind: as asked for, "budget" included.
        segments: runs of consecutive block numbers; a segment keeps the input of its first block.
        selective: blocks whose attention core alone is run again.
    """

    kind: str
    segments: tuple[tuple[int, ...], ...] = ()
    selective: tuple[int, ...] = ()

    def kinds(self, num_layers: int) -> tuple[str, ...]:
        """"none", "selective" or "full" for each block."""
        full = {block for segment in self.segments for block in segment}
        return tuple(
            "full" if block in full else "selective" if block in self.selective else "none"
            for block in range(num_layers)
        )

    def describe(self, num_layers: int) -> str:
        """One line for the log."""
        full, selective = sum(map(len, self.segments)), len(self.selective)
        text = f"recompute {self.kind}: {full} of {num_layers} blocks in full"
        if len(self.segments) not in (0, full):
            text += f" in {len(self.segments)} segments"
        return text + (f", the attention of {selective}" if selective else "")


def plan_recompute(
    kind: str,
    num_layers: int,
    *,
    every: int | None = None,
    budget_bytes: float | None = None,
    bytes_of: BytesOf | None = None,
    in_flight: int = 1,
) -> RecomputePlan:
    """Choose the blocks.

    Args:
        kind: one of RECOMPUTE_KINDS.
        num_layers: blocks of this rank.
        every: k of every_k.
        budget_bytes: what the blocks may take at the peak of backward, of budget.
        bytes_of: see BytesOf; of budget.
        in_flight: microbatches between their forward and their backward at a time, of budget.

    Raises:
        UserError: unknown kind, an argument missing or without use, a budget below the least possible.
    """
    if kind not in RECOMPUTE_KINDS:
        raise UserError(f"recompute: unknown kind {kind!r}: expected one of {', '.join(RECOMPUTE_KINDS)}")
    if (every is not None) != (kind == "every_k"):
        raise UserError(f"recompute: every = {every} with kind {kind}: give it for every_k and only there")
    if (budget_bytes is not None) != (kind == "budget"):
        raise UserError(f"recompute: budget = {budget_bytes} bytes, kind {kind}: give it for budget alone")
    if kind == "budget":
        assert bytes_of is not None, "a budget needs the bytes of a block"
        return _within(float(budget_bytes), num_layers, bytes_of, in_flight)
    if kind == "selective":
        return RecomputePlan(kind=kind, selective=tuple(range(num_layers)))
    return RecomputePlan(kind=kind, segments=_segments(kind, num_layers, every))


def _segments(kind: str, num_layers: int, every: int | None) -> tuple[tuple[int, ...], ...]:
    if kind == "none":
        return ()
    if kind == "every_k":
        if every < 1:
            raise UserError(f"recompute: every = {every}: expected at least 1")
        return tuple((block,) for block in range(0, num_layers, every))
    length = 1 if kind == "full" else math.isqrt(max(0, num_layers - 1)) + 1
    starts = range(0, num_layers, length)
    return tuple(tuple(range(start, min(start + length, num_layers))) for start in starts)


def held_bytes(plan: RecomputePlan, num_layers: int, bytes_of: BytesOf) -> float:
    """Bytes that the blocks keep between forward and backward of one microbatch."""
    kinds = plan.kinds(num_layers)
    kept = sum(kinds.count(kind) * bytes_of(kind) for kind in ("none", "selective"))
    return kept + len(plan.segments) * bytes_of("full")


def transient_bytes(plan: RecomputePlan, num_layers: int, bytes_of: BytesOf) -> float:
    """Bytes that a re-forward rebuilds at most at a time, on top of :func:`held_bytes`.

    The input of the segment, which the re-forward shares, is counted in both: the sum errs high by it.
    """
    longest = max(map(len, plan.segments), default=0)
    core = bytes_of("none") - bytes_of("selective") if plan.selective else 0
    return max(longest * bytes_of("none"), core)


def peak_bytes(plan: RecomputePlan, num_layers: int, bytes_of: BytesOf, in_flight: int = 1) -> float:
    """Bytes of the blocks' activations at the peak of backward."""
    held = held_bytes(plan, num_layers, bytes_of)
    return in_flight * held + transient_bytes(plan, num_layers, bytes_of)


def _within(budget: float, num_layers: int, bytes_of: BytesOf, in_flight: int) -> RecomputePlan:
    """The plan with the least re-forward whose peak fits.

    The attention core is the cheapest to run again for the bytes it frees, so it goes first, block by block,
    and whole blocks follow.
    """
    candidates = _from_none_to_full(num_layers)
    peaks = [peak_bytes(plan, num_layers, bytes_of, in_flight) for plan in candidates]
    for plan, peak in zip(candidates, peaks, strict=True):
        if peak <= budget:
            return plan
    raise UserError(
        f"recompute: a budget of {budget / 1e9:.6g} GB is below the least possible, "
        f"{min(peaks) / 1e9:.6g} GB for {num_layers} blocks and {in_flight} microbatches in flight: "
        f"raise it or lower micro_batch_size"
    )


def _from_none_to_full(num_layers: int) -> list[RecomputePlan]:
    """Plans of growing re-forward: k attention cores, then k whole blocks and the cores of the others."""
    every = range(num_layers)
    cores = [RecomputePlan(kind="budget", selective=tuple(range(k))) for k in range(num_layers + 1)]
    blocks = [
        RecomputePlan(
            kind="budget", segments=tuple((b,) for b in range(k)), selective=tuple(b for b in every if b >= k)
        )
        for k in range(1, num_layers + 1)
    ]
    return cores + blocks
