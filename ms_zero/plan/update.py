"""What an optimizer step reads and writes, in bytes per parameter (AdamW).

Mixed precision, unfused: read the gradient (2), read and write master weights and both moments (24), read the
master again for the cast (4) and write the weight (2): 32; an unscale pass reads and writes the gradient (4)
and a norm pass reads it (2). Fused: the cast happens in the same pass (28), and one pass over the gradient
gathers norm and finiteness (2).
"""

from __future__ import annotations

from dataclasses import dataclass

from ms_zero.plan.layout import Precision


@dataclass(frozen=True, kw_only=True)
class UpdateBytes:
    """Bytes per parameter that an optimizer step moves: the update itself and the passes before it."""

    update: int
    passes: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.update + self.passes


def update_bytes(precision: Precision, *, fused: bool = True) -> UpdateBytes:
    """Count one AdamW step; without a master copy the weights themselves are updated."""
    master = precision.master or precision.weight
    update = precision.gradient + 2 * (master + precision.moments)
    if precision.master:
        update += precision.weight + (0 if fused else precision.master)
    passes = precision.gradient if fused else 3 * precision.gradient
    return UpdateBytes(update=update, passes=passes)


def without_master(precision: Precision) -> int:
    """Bytes of an update without a master copy, the gradient not counted: 20 in mixed precision."""
    return 2 * (precision.weight + precision.moments)


def update_seconds(parameters: float, bytes_per_parameter: float, memory_bandwidth: float) -> float:
    """Seconds of a pass at a rate of ``memory_bandwidth`` bytes per second."""
    return parameters * bytes_per_parameter / memory_bandwidth
