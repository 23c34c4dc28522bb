"""How many samples a step takes: constant, or growing at the beginning of training.

The size is a function of the samples consumed so far, so a resumed run needs nothing beyond that count.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSchedule:
    """Global batch size of a step, as Megatron's batch ramp-up.

    It starts at ``start``, grows by ``increment`` and reaches ``full`` after ``samples`` samples; each size
    in between lasts for an equal share of them. ``samples`` 0 means ``full`` from the first step.

    Attributes:
        full: final global batch size.
        start: size of the first steps.
        increment: growth; divides ``full - start``.
        samples: samples over which the size grows.
    """

    full: int
    start: int = 0
    increment: int = 0
    samples: int = 0

    def __call__(self, consumed: int) -> int:
        """Size of the step that starts after ``consumed`` samples."""
        if consumed >= self.samples:
            return self.full
        increments = (self.full - self.start) // self.increment
        return self.start + consumed * increments // self.samples * self.increment
