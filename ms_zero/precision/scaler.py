"""Loss scaling as Cells: the loss is multiplied by a scale so that fp16 gradients do not vanish.

Micikevicius et al. 2018, arXiv:1710.03740. A scaler is told once a step whether the gradient was finite on
ALL ranks and returns the scale of the next step; it communicates nothing, so with equal decisions the scales
of all ranks stay equal. The Cells work in PyNative and in graph mode.

The conventions, which differ in when the scale doubles (w: window, h: hysteresis):

- "deepspeed": on clean step w + 1 after the start or an overflow, then every w clean steps.
- "megatron" and "torch": on clean step w, then every w clean steps.

All halve on an overflow when no more than one overflow is left of the h, and else only take one from the h
(the first h - 1 overflows leave the scale alone). The h are refilled when the scale doubles; with "deepspeed"
and ``consecutive_hysteresis`` already by a clean step, so that only overflows in a row count.

The scale never falls below the minimum. A step that overflows with the scale there is skipped like any other
and counted: see `DynamicLossScaler.skips_at_minimum`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, nn, ops

from ms_zero.errors import UserError

# Beyond this the reciprocal of the scale would no longer be a normal fp32 number.
_LARGEST_SCALE = 2.0**126
_INT32_MAX = 2**31 - 1


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _require(condition: bool, name: str, value: object, expected: str) -> None:
    if not condition:
        raise UserError(f"loss scaling: {name} is {value!r}: expected {expected}")


@dataclass(frozen=True)
class ScalingRule:
    """When and by how much the scale changes.

    Raises UserError for values outside of what each attribute states.

    Attributes:
        initial: Scale of the first step; at least ``minimum``.
        window: Clean steps before the scale grows; at least 1.
        hysteresis: Overflows until the scale falls, counted since it last grew; at least 1.
        minimum: The scale does not fall below this; above 0.
        growth: Factor when it grows; above 1.
        backoff: Factor when it falls; between 0 and 1.
        delay: Extra clean steps before the first growth after the start and after each overflow; 0 or 1.
        refill_when_clean: Whether each clean step restores the hysteresis, not only growth.
    """

    initial: float
    window: int
    hysteresis: int
    minimum: float
    growth: float = 2.0
    backoff: float = 0.5
    delay: int = 0
    refill_when_clean: bool = False

    def __post_init__(self) -> None:
        _require(_is_number(self.minimum) and self.minimum > 0, "minimum", self.minimum, "a number above 0")
        inside = _is_number(self.initial) and self.minimum <= self.initial <= _LARGEST_SCALE
        _require(inside, "initial scale", self.initial, f"from the minimum {self.minimum:g} to 2^126")
        for name in ("window", "hysteresis"):
            value = getattr(self, name)
            whole = isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= _INT32_MAX
            _require(whole, name, value, "a whole number, at least 1")
        _require(_is_number(self.growth) and self.growth > 1, "growth", self.growth, "a number above 1")
        share = _is_number(self.backoff) and 0 < self.backoff < 1
        _require(share, "backoff", self.backoff, "a number between 0 and 1")
        _require(self.delay in (0, 1), "delay", self.delay, "0 or 1")


_CONVENTIONS = {
    # Defaults of the fp16 section of a DeepSpeed config: initial_scale_power 16.
    "deepspeed": ScalingRule(initial=2.0**16, window=1000, hysteresis=2, minimum=1.0, delay=1),
    # Megatron-LM's arguments initial-loss-scale, loss-scale-window, hysteresis and min-loss-scale.
    "megatron": ScalingRule(initial=2.0**32, window=1000, hysteresis=2, minimum=1.0),
    # torch.amp.GradScaler: growth_interval 2000, every overflow halves. It has no minimum; here it is 1.
    "torch": ScalingRule(initial=2.0**16, window=2000, hysteresis=1, minimum=1.0),
}


def scaling_rule(
    convention: str,
    *,
    initial: float | None = None,
    window: int | None = None,
    hysteresis: int | None = None,
    minimum: float | None = None,
    consecutive_hysteresis: bool = False,
) -> ScalingRule:
    """The rule of a convention, with other values where they are given.

    Args:
        convention: "deepspeed" (initial 2^16, window 1000, hysteresis 2, minimum 1), "megatron" (2^32, 1000,
            2, 1) or "torch" (2^16, 2000, 1, 1).
        initial: scale of the first step.
        window: clean steps before the scale doubles.
        hysteresis: overflows until it halves.
        minimum: lower end of the scale.
        consecutive_hysteresis: only overflows in a row use up the hysteresis ("deepspeed" only).

    Raises:
        UserError: an unknown convention, or a value that :class:`ScalingRule` refuses.
    """
    if convention not in _CONVENTIONS:
        known = ", ".join(_CONVENTIONS)
        raise UserError(f"loss scaling: unknown convention {convention!r}: expected one of {known}")
    if consecutive_hysteresis and convention != "deepspeed":
        raise UserError(
            f"loss scaling: consecutive_hysteresis belongs to the convention deepspeed, not to {convention}: "
            f"leave it out"
        )
    base = _CONVENTIONS[convention]
    return ScalingRule(
        initial=base.initial if initial is None else initial,
        window=base.window if window is None else window,
        hysteresis=base.hysteresis if hysteresis is None else hysteresis,
        minimum=base.minimum if minimum is None else minimum,
        delay=base.delay,
        refill_when_clean=consecutive_hysteresis,
    )


class LossScaler(nn.Cell):
    """What static and dynamic scaling share; the state is in 0-d Parameters without gradient."""

    def __init__(self, scale: float, counters: dict[str, int]) -> None:
        """Start with a scale and the int32 counters, a name and a value each."""
        super().__init__()
        self.current = Parameter(Tensor(np.float32(scale)), name="scale", requires_grad=False)
        for name, value in counters.items():
            setattr(self, name, Parameter(Tensor(np.int32(value)), name=name, requires_grad=False))
        self._counters = tuple(counters)
        self.assign, self.select = ops.Assign(), ops.Select()
        self.zero = Tensor(np.int32(0))

    @property
    def scale(self) -> float:
        """The factor on the loss of the next step."""
        return float(self.current.asnumpy())

    @property
    def skips_at_minimum(self) -> int:
        """Overflows in a row that the scale could not follow, because it was at its minimum or is fixed.

        Training makes no progress while this grows; whoever drives it decides when to give up.
        """
        return int(self.stuck.asnumpy())

    def update(self, finite: bool) -> float:
        """Record one step, `finite` as decided for all ranks, and return the scale of the next one."""
        return float(self(Tensor(bool(finite))).asnumpy())

    def state(self) -> dict:
        """What a resumed run needs, as JSON values."""
        counters = {name: int(getattr(self, name).asnumpy()) for name in self._counters}
        return {"kind": type(self).__name__, "scale": self.scale, **counters}

    def load_state(self, state: dict) -> None:
        """Continue where `state` was taken.

        Raises:
            UserError: `state` is that of another kind of scaler or has other entries.
        """
        own = self.state()
        if state.get("kind") != own["kind"] or set(state) != set(own):
            raise UserError(
                f"loss scaling: the saved state is {state}, this run uses a {own['kind']}: "
                f"resume with the loss scaling of the run that saved it"
            )
        self.current.set_data(Tensor(np.float32(state["scale"])))
        for name in self._counters:
            getattr(self, name).set_data(Tensor(np.int32(state[name])))


class StaticLossScaler(LossScaler):
    """A fixed scale; 1 for policies that need none, so that skipped steps are counted in every precision."""

    def __init__(self, scale: float = 1.0) -> None:
        """Use `scale` throughout; UserError unless 0 < scale <= 2^126."""
        good = _is_number(scale) and 0 < scale <= _LARGEST_SCALE
        _require(good, "scale", scale, "a number above 0, at most 2^126")
        super().__init__(scale, {"stuck": 0})

    def construct(self, finite: Tensor) -> Tensor:
        """Record one step and return the scale, fp32 0-d; see `DynamicLossScaler.construct`."""
        self.assign(self.stuck, self.select(finite.astype(ms.bool_), self.zero, self.stuck + 1))
        return self.current * 1.0


class DynamicLossScaler(LossScaler):
    """A scale that halves on overflow and doubles after a window of clean steps; see the module."""

    def __init__(self, rule: ScalingRule) -> None:
        """Start at the initial scale with full hysteresis."""
        super().__init__(
            rule.initial,
            # clean: progress in the window, negative during the extra steps of `delay`.
            {"clean": -rule.delay, "hysteresis_left": rule.hysteresis, "stuck": 0},
        )
        self.rule = rule
        self.full = Tensor(np.int32(rule.hysteresis))
        self.restart = Tensor(np.int32(-rule.delay))
        self.minimum = Tensor(np.float32(rule.minimum))
        self.maximum, self.both = ops.Maximum(), ops.LogicalAnd()

    def construct(self, finite: Tensor) -> Tensor:
        """Record one step and return the scale of the next one, fp32 0-d.

        finite: 0-d bool or number, not 0 when the gradients of all ranks were finite.
        """
        finite = finite.astype(ms.bool_)
        grown, clean, refilled = self.after_clean_step()
        fallen, left, stuck = self.after_overflow()
        scale = self.select(finite, grown, fallen)
        self.assign(self.clean, self.select(finite, clean, self.restart))
        self.assign(self.hysteresis_left, self.select(finite, refilled, left))
        self.assign(self.stuck, self.select(finite, self.zero, stuck))
        self.assign(self.current, scale)
        return scale

    def after_clean_step(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scale, progress in the window and hysteresis if this step is clean."""
        clean = self.clean + 1
        grows = clean >= self.rule.window
        larger = self.current * self.rule.growth
        scale = self.select(self.both(grows, larger <= _LARGEST_SCALE), larger, self.current)
        left = self.select(grows, self.full, self.hysteresis_left)
        if self.rule.refill_when_clean:
            left = self.full
        return scale, self.select(grows, self.zero, clean), left

    def after_overflow(self) -> tuple[Tensor, Tensor, Tensor]:
        """Scale, hysteresis and overflows at the minimum if this step is not clean."""
        falls = self.hysteresis_left <= 1
        scale = self.select(falls, self.maximum(self.current * self.rule.backoff, self.minimum), self.current)
        left = self.select(falls, self.hysteresis_left, self.hysteresis_left - 1)
        at_minimum = self.both(falls, self.current <= self.minimum)
        return scale, left, self.select(at_minimum, self.stuck + 1, self.zero)


class Unscale(nn.Cell):
    """Gradients of the scaled loss -> (gradients in fp32, whether all were finite).

    For train steps that are compiled as a whole. The finiteness is this rank's: reduce it over the ranks
    before it reaches a scaler.
    """

    def construct(self, grads: tuple[Tensor, ...], scale: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """grads: of any float dtype and shape; scale: 0-d. The second result is a 0-d bool."""
        finite = amp.all_finite(grads)
        inverse = 1.0 / scale
        return tuple([grad.astype(ms.float32) * inverse for grad in grads]), finite

