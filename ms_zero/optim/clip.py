"""One decision for all ranks: is the gradient finite, how long is it, by how much is it scaled."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class GradientDecision:
    """What every rank does with the gradient of this step.

    Attributes:
        norm: Euclidean norm over all parameters, each counted once; inf or nan when not finite.
        finite: False means that the step is skipped everywhere.
        scale: factor the update multiplies gradients by; below 1 only when clipping.
        nonfinite: in a skipped step of :meth:`ms_zero.optim.AdamW.step` the first parameter, in definition
            order, whose gradient has an inf or nan; None if only the sum of all squares overflowed.
    """

    norm: float
    finite: bool
    scale: float
    nonfinite: str | None = None


def decide(sum_of_squares: float, clip_norm: float) -> GradientDecision:
    """Clip by global norm (Pascanu et al., 2013).

    Args:
        sum_of_squares: of all gradient elements, already summed over the ranks that own them.
        clip_norm: largest norm; 0 turns clipping off.
    """
    if not math.isfinite(sum_of_squares):
        return GradientDecision(norm=sum_of_squares, finite=False, scale=0.0)
    norm = math.sqrt(sum_of_squares)
    scale = clip_norm / norm if 0 < clip_norm < norm else 1.0
    return GradientDecision(norm=norm, finite=True, scale=scale)
