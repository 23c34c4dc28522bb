"""The optimizer's update of all parameters as one Cell, with the same arithmetic as the eager optimizers."""

from collections.abc import Sequence

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_zero._compat import keep_on_host
from ms_zero.kernels import reference
from ms_zero.kernels.dispatch import resolve_target
from ms_zero.kernels.graph_optimizer import FusedAdamW

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}
# Targets with an operator of this project for graphs; elsewhere MindSpore's operators are composed.
_FUSED = ("CPU", "GPU-custom", "Ascend-custom")
# Positions in the scalars of AdamW; see ops/README.md.
_KEEP, _BETA1, _ONE_MINUS_BETA1, _BETA2, _ONE_MINUS_BETA2 = range(5)
_INVERSE_ROOT, _EPS, _STEP_SIZE, _GRAD_SCALE = range(5, 9)
GRAD_SCALE_AT = {"adamw": _GRAD_SCALE, "sgd": 1}
"""Position of what multiplies the gradient in the scalars of an optimizer (sgd: with the learning rate)."""


class ComposedAdamW(nn.Cell):
    """What `ms_zero.kernels.graph_optimizer.FusedAdamW` does, of MindSpore's operators, on any shape."""

    def __init__(self) -> None:
        super().__init__()
        self.assign, self.select, self.depend = ops.Assign(), ops.Select(), ops.Depend()
        self.sqrt, self.square = ops.Sqrt(), ops.Square()

    def construct(
        self, param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, scalars: Tensor
    ) -> Tensor:
        """Update in place, or skip where the scalars say so; returns a token."""
        grad = grad.astype(param.dtype) * scalars[_GRAD_SCALE]
        skipped = scalars[reference.FOUND_INF] != 0
        mean = exp_avg * scalars[_BETA1] + grad * scalars[_ONE_MINUS_BETA1]
        mean_square = exp_avg_sq * scalars[_BETA2] + self.square(grad) * scalars[_ONE_MINUS_BETA2]
        divisor = self.sqrt(mean_square) * scalars[_INVERSE_ROOT] + scalars[_EPS]
        value = param * scalars[_KEEP] - mean / divisor * scalars[_STEP_SIZE]
        token = self.assign(param, self.select(skipped, param, value))
        token = self.depend(token, self.assign(exp_avg, self.select(skipped, exp_avg, mean)))
        return self.depend(token, self.assign(exp_avg_sq, self.select(skipped, exp_avg_sq, mean_square)))


class HostAdamW(nn.Cell):
    """What `ComposedAdamW` does, with moments and arithmetic in host memory and on the host's processor.

    Operators of a graph that are marked for "CPU" run there, whatever the graph's device. The gradient goes
    to the host, and what is to be taken from the parameter comes back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.multiply, self.add, self.divide = (_on_host(op()) for op in (ops.Mul, ops.Add, ops.Div))
        self.sqrt, self.square = _on_host(ops.Sqrt()), _on_host(ops.Square())
        self.select, self.assign = _on_host(ops.Select()), _on_host(ops.Assign())
        self.choose, self.set, self.depend = ops.Select(), ops.Assign(), ops.Depend()

    def construct(
        self, param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, scalars: Tensor
    ) -> Tensor:
        """Update in place, or skip where the scalars say so; returns a token."""
        multiply, add = self.multiply, self.add
        grad = multiply(grad.astype(exp_avg.dtype), scalars[_GRAD_SCALE])
        skipped = scalars[reference.FOUND_INF] != 0
        mean = add(multiply(exp_avg, scalars[_BETA1]), multiply(grad, scalars[_ONE_MINUS_BETA1]))
        square = multiply(self.square(grad), scalars[_ONE_MINUS_BETA2])
        mean_square = add(multiply(exp_avg_sq, scalars[_BETA2]), square)
        divisor = add(multiply(self.sqrt(mean_square), scalars[_INVERSE_ROOT]), scalars[_EPS])
        change = multiply(self.divide(mean, divisor), scalars[_STEP_SIZE])
        token = self.assign(exp_avg, self.select(skipped, exp_avg, mean))
        token = self.depend(token, self.assign(exp_avg_sq, self.select(skipped, exp_avg_sq, mean_square)))
        value = param * scalars[_KEEP] - change
        return self.depend(token, self.set(param, self.choose(skipped, param, value)))


def _on_host(operator: ops.Primitive) -> ops.Primitive:
    return operator.set_device("CPU")


def host_flags(sizes: Sequence[int], fraction: float) -> tuple[bool, ...]:
    """Which parameters have their state on the host: spread, so that each stage has about the share."""
    seen, taken, flags = 0, 0, []
    for size in sizes:
        seen += size
        flags.append(fraction > 0 and taken + size / 2 <= fraction * seen)
        taken += size if flags[-1] else 0
    return tuple(flags)


class ComposedSGD(nn.Cell):
    """Plain gradient descent with decay: see :func:`ms_zero.kernels.reference.sgd_scalars`."""

    def __init__(self) -> None:
        super().__init__()
        self.assign, self.select = ops.Assign(), ops.Select()

    def construct(self, param: Tensor, grad: Tensor, scalars: Tensor) -> Tensor:
        """Update in place, or skip where the scalars say so; returns a token."""
        value = param * scalars[0] - grad.astype(param.dtype) * scalars[1]
        return self.assign(param, self.select(scalars[reference.FOUND_INF] != 0, param, value))


class Update(nn.Cell):
    """One step of AdamW or SGD on every parameter.

    Args:
        params: fp32, with their values; the state is made beside them, under the names of MindSpore's
            optimizers ("exp_avg.<parameter>"), so that what cuts a parameter cuts its state.
        decays: for each parameter whether weight decay applies.
        kind: "adamw" or "sgd".
        target: see :mod:`ms_zero.kernels.dispatch`; None for the current device.
        on_host: for each parameter whether its state is kept and updated on the host (adamw only); (): none.
    """

    def __init__(
        self,
        params: ParameterTuple,
        decays: Sequence[bool],
        *,
        kind: str,
        target: str | None = None,
        on_host: Sequence[bool] = (),
    ) -> None:
        super().__init__(auto_prefix=False)
        self.params, self.decays = params, tuple(decays)
        self.on_host = tuple(on_host) or (False,) * len(params)
        for name in MOMENTS[kind]:
            setattr(self, name, params.clone(prefix=name, init="zeros"))
            for state, is_host in zip(getattr(self, name), self.on_host, strict=True):
                if is_host:
                    keep_on_host(state)
        self.kind, self.is_adam = kind, kind == "adamw"
        if self.is_adam:
            fused = resolve_target(target) in _FUSED
            self.rule = FusedAdamW(target=target) if fused else ComposedAdamW()
            self.host_rule = HostAdamW()
        else:
            self.rule = ComposedSGD()

    def construct(self, grads: tuple[Tensor, ...], decayed: Tensor, plain: Tensor) -> Tensor:
        """Update every parameter.

        Args:
            grads: one for each parameter.
            decayed: fp32 [16], the scalars of parameters with decay.
            plain: fp32 [16], those of the others.

        Returns:
            a token, to keep the update in the graph.
        """
        token = plain
        for index in range(len(self.params)):
            scalars = decayed if self.decays[index] else plain
            if self.is_adam:
                state = (self.exp_avg[index], self.exp_avg_sq[index])
                if self.on_host[index]:
                    done = self.host_rule(self.params[index], *state, grads[index], scalars)
                else:
                    done = self.rule(self.params[index], *state, grads[index], scalars)
            else:
                done = self.rule(self.params[index], grads[index], scalars)
            token = ops.depend(token, done)
        return token

    def state(self) -> dict[str, ParameterTuple]:
        """Kind -> the state of each parameter, in order."""
        return {name: getattr(self, name) for name in MOMENTS[self.kind]}


def step_scalars(
    kind: str,
    *,
    lr: float,
    step: int,
    weight_decay: float,
    grad_scale: float,
    beta1: float,
    beta2: float,
    eps: float,
    skip: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """The scalars of one step, with and without decay, see :class:`Update`.

    `step` counts from 1. `skip`: nothing is updated. The rates are used by "adamw" only.
    """
    common = {"lr": lr, "grad_scale": grad_scale, "found_inf": float(skip)}
    if kind == "sgd":
        return tuple(reference.sgd_scalars(weight_decay=decay, **common) for decay in (weight_decay, 0.0))
    common |= {"step": step, "beta1": beta1, "beta2": beta2, "eps": eps}
    return tuple(reference.adamw_scalars(weight_decay=decay, **common) for decay in (weight_decay, 0.0))


def scalars_parameter(name: str) -> Parameter:
    """Where the host puts the scalars of the next step."""
    return Parameter(Tensor(np.zeros(reference.NUM_SCALARS, np.float32)), name=name, requires_grad=False)
