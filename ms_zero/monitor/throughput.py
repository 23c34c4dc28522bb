"""Speed of a run over its last steps."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Rates:
    """Speed per device; None before a step was measured.

    Attributes:
        seconds_per_step: mean over the window.
        tokens_per_second_per_device: tokens of all ranks over time and number of devices.
        tflops_per_device: model FLOPs in 1e12 per second.
        mfu: share of the peak, 0 to 1; None without a known peak.
    """

    seconds_per_step: float | None = None
    tokens_per_second_per_device: float | None = None
    tflops_per_device: float | None = None
    mfu: float | None = None

    def eta_seconds(self, steps_left: int) -> float | None:
        """Time for the steps that are left, without evaluations and checkpoints."""
        return None if self.seconds_per_step is None else self.seconds_per_step * steps_left


class Throughput:
    """Measures training steps in a sliding window; time inside :meth:`paused` does not count.

    The first step pays once for compilation and allocation and is dropped as soon as there is another.
    """

    def __init__(
        self,
        *,
        num_devices: int,
        flops_per_token: float,
        peak_flops: float | None,
        window: int = 20,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start the clock.

        Args:
            num_devices: devices that share the global batch.
            flops_per_token: model FLOPs of training per token.
            peak_flops: of one device in FLOP/s, or None if unknown.
            window: number of steps averaged over.
            clock: monotonic seconds.
        """
        self._num_devices, self._flops_per_token, self._peak = num_devices, flops_per_token, peak_flops
        self._clock = clock
        self._steps: deque[tuple[float, int]] = deque(maxlen=window)
        self._measured = 0
        self._excluded = 0.0
        self._begin = clock()

    def step(self, num_tokens: int) -> Rates:
        """End a step and begin the next.

        Args:
            num_tokens: tokens of the global batch of the step that ended.
        """
        now = self._clock()
        if self._measured == 1:
            self._steps.clear()
        self._steps.append((now - self._begin - self._excluded, num_tokens))
        self._measured += 1
        self._begin, self._excluded = now, 0.0
        return self.rates()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens inside (evaluation, saving) out of the step's time; do not nest."""
        begin = self._clock()
        try:
            yield
        finally:
            self._excluded += self._clock() - begin

    def rates(self) -> Rates:
        """Speed over the window."""
        seconds = sum(step[0] for step in self._steps)
        if seconds <= 0:
            return Rates()
        tokens = sum(step[1] for step in self._steps) / seconds / self._num_devices
        flops = tokens * self._flops_per_token
        return Rates(
            seconds_per_step=seconds / len(self._steps),
            tokens_per_second_per_device=tokens,
            tflops_per_device=flops / 1e12,
            mfu=None if self._peak is None else flops / self._peak,
        )
