"""Recompute (activation checkpointing): keep the inputs of a cell and run its forward again in backward.

``recompute(cell)`` replaces what ``cell.construct`` does. The first forward runs without recording, so that
nothing but the inputs stays alive. Backward runs the forward once more under a tape and back-propagates
through it at once (a backward nested in the outer one), so gradients of the inputs are returned and those of
the parameters arrive at the parameters, through their hooks, as in plain training.

Hooks of the cell itself lie outside: forward hooks fire once, around the first forward, and backward hooks
once, around re-forward and backward together. A technique that frees weights after forward and fetches them
in the backward-pre hook therefore serves the re-forward with the same fetch. Hooks of inner cells belong to
the computation and fire again.

PyNative only, and gradients are taken by ``_compat.backward``: under ``mindspore.value_and_grad`` the
parameters of a recomputed cell would get none, so that is refused. A tensor
that needs a gradient has to come in as an argument.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_zero._compat import (
    backward,
    device_target,
    function_class,
    is_recording,
    is_taped,
    leaf,
    needs_gradient,
    nested_backward,
    no_grad,
    tape,
)
from ms_zero.errors import UserError
from ms_zero.memory.construct import Construct, Replacement, replace_construct
from ms_zero.memory.tree import flatten, unflatten

_OWN_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class ReplayedState(Protocol):
    """What the output of a cell depends on besides its inputs and parameters, such as a dropout position.

    A cell names it in its attribute ``replayed_state``.
    """

    def capture(self) -> Any:
        """The state as it is now; later changes of the object do not change what was returned."""

    def restore(self, captured: Any) -> None:
        """Return to a captured state."""


def recompute(cell: nn.Cell, *, enclosing: Sequence[nn.Cell] = ()) -> Replacement:
    """Keep only the inputs of `cell` for backward and run its forward again there.

    Arguments and results may be tensors, anything else, and tuples, lists and dicts of them; keyword
    arguments too. The forward must have no side effects, for they would happen twice. The state of
    MindSpore's random generator and of every ``replayed_state`` within the cell (collected now) is that of
    the first forward during the second. `enclosing`: the cells that `cell` is a part of and that may have
    backward hooks; MindSpore would call those in the middle of their backward.

    Raises:
        UserError: the cell is recomputed already, contains a dropout that cannot be repeated on this device,
            or graph mode is on.
    """
    return replace_construct(cell, "recomputed", RecomputedCall(cell.construct, [cell], enclosing))


class RecomputedCall:
    """A function whose forward is run again in backward."""

    def __init__(self, construct: Construct, cells: Sequence[nn.Cell], enclosing: Sequence[nn.Cell]) -> None:
        """`cells` are those that `construct` runs, `enclosing` those that they are a part of."""
        if ms.get_context("mode") == ms.GRAPH_MODE:
            raise UserError("recompute: graph mode has its own recompute: this one is for PyNative mode")
        self._construct = construct
        inner = [found for cell in cells for _, found in cell.cells_and_names()]
        for found in inner:
            _check_repeatable(found)
        self._around = (*cells, *enclosing)
        self._states = _unique([found.replayed_state for found in inner if hasattr(found, "replayed_state")])
        self._params: list[Parameter] = [param for cell in cells for param in cell.get_parameters()]
        # Without an input that needs a gradient nothing would be recorded and the parameters would get none.
        self._anchor = leaf(Tensor(np.zeros(1, np.float32)), requires_grad=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function and keep its arguments."""
        tensors, spec = flatten((args, kwargs), leave=_is_narrow)
        passed = [tensor for tensor in flatten((args, kwargs))[0] if _is_narrow(tensor)]
        trainable = any(param.requires_grad for param in (*self._params, *passed))
        if trainable and is_recording() and not is_taped():
            raise UserError(
                "recompute: under mindspore.value_and_grad the parameters of a recomputed cell get no "
                "gradient: record by model.record() of ms_zero.zero.shard, or use mindspore's recompute"
            )
        run = _Run(self._construct, spec, self._states, self._around)
        outputs = _Recompute.apply(run, self._anchor if trainable else None, *tensors)
        return unflatten(iter(outputs), run.output_spec)


@dataclass
class _Run:
    """One call: what it takes to run it again."""

    construct: Construct
    spec: Any
    states: Sequence[ReplayedState]
    around: Sequence[nn.Cell]
    output_spec: Any = None
    captured: list[Any] = field(default_factory=list)

    def first(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        self.captured = _capture(self.states)
        return self._outputs(tensors)

    def again(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with _at(self.states, self.captured):
            return self._outputs(tensors)

    def _outputs(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        args, kwargs = unflatten(iter(tensors), self.spec)
        outputs, self.output_spec = flatten(self.construct(*args, **kwargs))
        return outputs


class _Recompute(function_class):
    @staticmethod
    def forward(ctx: Any, run: _Run, anchor: Tensor | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        with no_grad():
            outputs = run.first(tensors)
        ctx.mark_non_differentiable(*[out for out in outputs if not out.is_floating_point()])
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad[2:]
        received: list[Tensor | None] = [None] * len(needs)
        with tape():
            inputs = [
                _Entry.apply(leaf(tensor, requires_grad=True), received, index) if need else tensor.data
                for index, (tensor, need) in enumerate(zip(ctx.saved_tensors, needs, strict=True))
            ]
            outputs = ctx.run.again(inputs)
        pairs = zip(outputs, grads, strict=True)
        reached = [(out, grad) for out, grad in pairs if grad is not None and needs_gradient(out)]
        if reached:
            with nested_backward(ctx.run.around):
                backward([out for out, _ in reached], [grad for _, grad in reached])
        return None, None, *received


class _Entry(function_class):
    """An input of the second forward, whose gradient is put down in `received`.

    Accumulating it on a leaf would copy it, by a kernel that CPU lacks, whenever it is shared.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, received: list[Tensor | None], index: int) -> Tensor:
        ctx.received, ctx.index = received, index
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        ctx.received[ctx.index] = grad
        return None, None, None


def _is_narrow(tensor: Tensor) -> bool:
    """Whether a tensor is a 16-bit parameter: it gets its gradients like the cell's own, one from each call.

    As the input of a function it would get them in the dtype that it was created with, mostly fp32, and the
    framework does not add those to the ones of native operators (MindSpore 2.10.0).
    """
    return isinstance(tensor, Parameter) and tensor.dtype in (ms.float16, ms.bfloat16)


def _capture(states: Sequence[ReplayedState]) -> list[Any]:
    return [ms.get_rng_state(), *[state.capture() for state in states]]


@contextmanager
def _at(states: Sequence[ReplayedState], captured: Sequence[Any]) -> Iterator[None]:
    """Return to captured random states for the duration of the context."""
    present = _capture(states)
    _restore(states, captured)
    try:
        yield
    finally:
        _restore(states, present)


def _restore(states: Sequence[ReplayedState], captured: Sequence[Any]) -> None:
    ms.set_rng_state(captured[0])
    for state, value in zip(states, captured[1:], strict=True):
        state.restore(value)


def _unique(objects: Sequence[Any]) -> list[Any]:
    return list({id(found): found for found in objects}.values())


def _check_repeatable(cell: nn.Cell) -> None:
    """MindSpore's dropout kernel on CPU draws from a state of its own, which nothing can restore."""
    if isinstance(cell, _OWN_DROPOUT) and _dropout_rate(cell) > 0 and device_target() == "CPU":
        raise UserError(
            f"recompute: a {type(cell).__name__} cannot repeat its mask on CPU: "
            f"use ms_zero.models.Dropout or leave this cell out"
        )


def _dropout_rate(cell: nn.Cell) -> float:
    rate = getattr(cell, "p", None)
    return 1.0 - cell.keep_prob if rate is None else rate
