"""Learning-rate schedules as pure functions of the step.

A step is counted from 0; the value returned for step s is the one used by the (s+1)-th update. Warm-up is
linear from ``lr / warmup_steps`` to ``lr``; what follows is

- ``constant``: ``lr``
- ``linear``: straight line to ``min_lr`` at the last step
- ``cosine``: half a cosine to ``min_lr`` at the last step (Loshchilov and Hutter, 2017)
- ``wsd``: warm-up, stable, decay: ``lr`` until ``decay_steps`` before the end, then linear to ``min_lr``
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """The values that define a schedule; call it with a step to get the learning rate."""

    kind: str
    lr: float
    min_lr: float
    warmup_steps: int
    total_steps: int
    decay_steps: int = 0

    def __call__(self, step: int) -> float:
        """Learning rate of the update made at ``step`` (0-based)."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        return _SHAPES[self.kind](self, step)

    def between(self, share: float) -> float:
        """``lr`` for share 1, ``min_lr`` for share 0."""
        return self.min_lr + (self.lr - self.min_lr) * share


def _progress(start: int, stop: int, step: int) -> float:
    """Share of the way from ``start`` to the last step before ``stop``, within 0..1."""
    return min(1.0, max(0.0, (step + 1 - start) / max(1, stop - start)))


def _constant(schedule: Schedule, step: int) -> float:
    return schedule.lr


def _linear(schedule: Schedule, step: int) -> float:
    return schedule.between(1 - _progress(schedule.warmup_steps, schedule.total_steps, step))


def _cosine(schedule: Schedule, step: int) -> float:
    progress = _progress(schedule.warmup_steps, schedule.total_steps, step)
    return schedule.between((1 + math.cos(math.pi * progress)) / 2)


def _wsd(schedule: Schedule, step: int) -> float:
    start = max(schedule.warmup_steps, schedule.total_steps - schedule.decay_steps)
    return schedule.between(1 - _progress(start, schedule.total_steps, step))


_SHAPES: dict[str, Callable[[Schedule, int], float]] = {
    "constant": _constant,
    "linear": _linear,
    "cosine": _cosine,
    "wsd": _wsd,
}
