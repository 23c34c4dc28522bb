"""The record of one optimizer step and its console line."""

from dataclasses import dataclass

from ms_zero.monitor.units import format_bytes, format_count, format_duration


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """Facts about one step; None is "not known here" and shows as n/a.

    Attributes:
        step: optimizer steps done, this one included.
        total_steps: steps of the whole run.
        consumed_samples: samples since the beginning of training, over all ranks.
        consumed_tokens: tokens likewise.
        loss: mean over the valid tokens of the global batch, in nats.
        lr: learning rate of this step.
        grad_norm: global gradient norm before clipping.
        tokens_per_second_per_device: over the last steps.
        tflops_per_device: model FLOPs (no recompute) of forward and backward, in 1e12 per second.
        mfu: share of the device's peak, 0 to 1; None where the catalogue has no peak.
        memory_bytes: held by this rank.
        eta_seconds: until the last step.
    """

    step: int
    total_steps: int | None = None
    consumed_samples: int
    consumed_tokens: int
    loss: float | None
    lr: float
    grad_norm: float | None
    tokens_per_second_per_device: float | None
    tflops_per_device: float | None
    mfu: float | None
    memory_bytes: int | None
    eta_seconds: float | None


def format_line(record: StepRecord) -> str:
    """One console line, at most 120 columns for runs below 100,000 steps. Rates are per device."""
    total = "" if record.total_steps is None else f"/{record.total_steps}"
    step = f"{record.step:>{max(1, len(total) - 1)}}{total}"
    mfu = "n/a" if record.mfu is None else f"{record.mfu:.0%}"
    groups = (
        step,
        f"{format_count(record.consumed_samples):>5} smp {format_count(record.consumed_tokens):>5} tok",
        f"loss {_loss(record.loss):>6} lr {record.lr:.1e} norm {format_count(record.grad_norm):>5}",
        f"{format_count(record.tokens_per_second_per_device):>5} tok/s "
        f"{format_count(record.tflops_per_device):>5} TF/s MFU {mfu:>3} "
        f"{format_bytes(record.memory_bytes):>7}",
        f"eta {format_duration(record.eta_seconds)}",
    )
    return "  ".join(groups)


def _loss(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.{4 if value < 10 else 3}f}"
