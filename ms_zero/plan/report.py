"""What the planner's models answer: memory by part and stage, time by cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

_NONE: Mapping[str, float] = MappingProxyType({})

PARTS = (
    "weights",
    "gradients",
    "master",
    "moments",
    "activations",
    "logits",
    "unsharded",
    "buckets",
    "moe",
    "transient",
    "reserve",
)
"""Names of the parts of a device's memory, in the order in which they are shown."""



def size_unit(num_bytes: float) -> tuple[float, str]:
    """The unit in which a size of this order is shown: bytes of it, and its name."""
    return (1e9, "GB") if num_bytes >= 1e9 else (1e6, "MB")


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Memory of one device of a pipeline stage at the moment when it holds most, in bytes.

    Args:
        stage: pipeline rank.
        parts: name (one of PARTS) -> bytes at the peak; parts that are free at that moment are absent.
        phase: when the peak is: backward or optimizer.
        host: what lives in host memory, name -> bytes for this device.
        parameters: parameters of the stage on one device before data-parallel sharding.
        in_flight: microbatches held at the peak, for each chunk.
        uncertainty: bytes by which the estimate may be too low or too high; ``peak`` is the upper end.

    """

    stage: int
    parts: Mapping[str, float]
    phase: str
    parameters: int
    in_flight: tuple[int, ...]
    uncertainty: float
    host: Mapping[str, float] = field(default_factory=lambda: _NONE)

    @property
    def peak(self) -> float:
        """Upper end of the estimate: what must be available."""
        return sum(self.parts.values())

    @property
    def low(self) -> float:
        """Lower end of the estimate."""
        return self.peak - self.uncertainty

    def largest(self, *, besides: tuple[str, ...] = ("reserve",)) -> str:
        """Name of the largest part."""
        return max((name for name in self.parts if name not in besides), key=self.parts.__getitem__)


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Memory of every pipeline stage."""

    stages: tuple[StageMemory, ...]

    @property
    def worst(self) -> StageMemory:
        """The stage that needs most."""
        return max(self.stages, key=lambda stage: stage.peak)

    @property
    def peak(self) -> float:
        """Bytes that every device must have."""
        return self.worst.peak

    @property
    def host_peak(self) -> float:
        """Host bytes for one device, at most."""
        return max(sum(stage.host.values()) for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class TimeReport:
    """Seconds of one optimizer step, by cause, and what follows from them.

    ``step`` is the sum of all causes.

    Args:
        step: seconds of the whole step.
        compute: forward and backward of the busiest device, without recompute.
        recompute: what is computed again.
        bubble: idle time of the pipeline.
        exposed: axis (tp, cp, ep, pp, dp) -> communication that nothing hides.
        optimizer: the update.
        offload: transfers to and from the host that nothing hides.
        other: what a step costs once.
        tokens_per_second: over all devices.
        tokens_per_second_per_device: of one.
        flops_per_device: model FLOP/s of one device.
        hardware_flops_per_device: the same with recompute.
        mfu: share of the device's peak that model FLOP/s reach.
        simulated: whether the pipeline was run event by event, not estimated by its closed form.

    """

    step: float
    compute: float
    recompute: float
    bubble: float
    exposed: Mapping[str, float]
    optimizer: float
    offload: float
    other: float
    tokens_per_second: float
    tokens_per_second_per_device: float
    flops_per_device: float
    hardware_flops_per_device: float
    mfu: float
    simulated: bool

    def causes(self) -> dict[str, float]:
        """Seconds by cause, in the order in which they are shown; they add up to ``step``."""
        exposed = {f"{axis} communication": seconds for axis, seconds in self.exposed.items()}
        return {
            "compute": self.compute,
            "recompute": self.recompute,
            **exposed,
            "pipeline bubble": self.bubble,
            "optimizer": self.optimizer,
            "offload": self.offload,
            "other": self.other,
        }

    def days(self, tokens: float) -> float:
        """Days of training on a number of tokens."""
        return tokens / self.tokens_per_second / 86_400
