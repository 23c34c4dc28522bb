"""AdamW and SGD over the buckets of a sharded model.

Each rank updates the range of every trained bucket that it owns and gives the result to the ranks that store
it. The state of a bucket is a few fp32 vectors of that range: the master weights, where weights are stored in
16 bits, and the moments. The initial master weights are the unrounded initial values; afterwards only
the update writes them, and the stored weights are always a rounding of them.

Elements are updated one by one, so that neither the cut into buckets and chunks nor the place where state
lives changes a bit of the result.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_zero import kernels
from ms_zero.errors import UserError
from ms_zero.optim.clip import GradientDecision, decide
from ms_zero.zero.convert import as_dtype
from ms_zero.zero.sharded import Sharded
from ms_zero.zero.states import DEVICE, DeviceStates, StateStore

MASTER = "master"


@dataclass(frozen=True)
class GroupOptions:
    """What differs for one group of parameters: its decay, and a factor on the learning rate."""

    weight_decay: float
    lr_scale: float = 1.0


@dataclass(frozen=True)
class _Part:
    """The elements ``[start, stop)`` of a bucket's owned range, whose state is in ``store``."""

    start: int
    stop: int
    store: StateStore


class _Optimizer:
    """What AdamW and SGD share: state, order of updates, publishing."""

    moments: tuple[str, ...]

    def __init__(
        self,
        sharded: Sharded,
        *,
        weight_decay: float,
        groups: Mapping[Hashable, GroupOptions] | None,
        offload: StateStore | None,
        fraction: float,
    ) -> None:
        """Create the state; see AdamW."""
        if not isinstance(sharded, Sharded):
            found = type(sharded).__name__
            raise UserError(f"optimizer: the model is {found}: expected what zero.shard(cell, mesh) returns")
        if not sharded.holds_initial_values:
            raise UserError("optimizer: this model has an optimizer already: make one for each sharded model")
        self.sharded, self.num_updates, self.num_skipped = sharded, 0, 0
        self._device, self._offload = DeviceStates(), offload
        decay = _number("weight_decay", weight_decay, _is_positive_or_0, "a finite number, at least 0")
        default = GroupOptions(decay)
        keys = [bucket.layout.key[1] for bucket in sharded.buckets]
        _check_groups(groups or {}, keys)
        _check_store(offload)
        fraction = _number("fraction", fraction, _is_share, "a number from 0 to 1")
        self._groups = [(groups or {}).get(key, default) for key in keys]
        self._parts = [self._create(index, fraction) for index in range(len(sharded.buckets))]
        sharded.forget_initial_values()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the vectors of each bucket's state."""
        return ((MASTER,) if self.sharded.options.policy.keeps_master else ()) + self.moments

    def apply(self, *, lr: float, grad_scale: float = 1.0) -> None:
        """Update from the reduced gradients, multiplied by ``grad_scale``; the loss scale is taken out."""
        self.num_updates += 1
        grad_scale /= self.sharded.loss_scale
        with ExitStack() as sweeps:
            for store in self._stores():
                sweeps.enter_context(store.sweep())
            for index, bucket in enumerate(self.sharded.buckets):
                values, grad = self.sharded.owned_values(index), self.sharded.gradient(index)
                bucket.drop_gradients()
                self._update_bucket(index, values, grad, _Hyper(lr, grad_scale, self.num_updates))
                self.sharded.publish(index, values)
        self.sharded.end_step(applied=True)

    def step(self, *, lr: float, clip_norm: float = 0.0) -> GradientDecision:
        """Reduce, decide once for all ranks, and update, or skip when a gradient is not finite. Collective.

        Args:
            lr: learning rate.
            clip_norm: largest gradient norm; 0: no clipping.

        Raises:
            UserError: one of them is not finite, or ``clip_norm`` is negative; or see
                :meth:`ms_zero.zero.ShardedModel.reduce`.
        """
        lr = _number("lr", lr, math.isfinite, "a finite number")
        clip_norm = _number("clip_norm", clip_norm, _is_positive_or_0, "a finite number, at least 0")
        self.sharded.reduce()
        decision = decide(self.sharded.sum_of_squares(), clip_norm)
        if decision.finite:
            self.apply(lr=lr, grad_scale=decision.scale)
            return decision
        nonfinite = self.sharded.first_nonfinite()
        self.sharded.end_step(applied=False)
        self.num_skipped += 1
        return replace(decision, nonfinite=nonfinite)

    def read(self, index: int, kind: str) -> np.ndarray:
        """A copy of one vector of a bucket's state over the owned range."""
        return np.concatenate([part.store.read(index, kind) for part in self._parts[index]])

    def write(self, index: int, kind: str, values: np.ndarray) -> None:
        """Overwrite one vector of a bucket's state."""
        for part in self._parts[index]:
            part.store.write(index, kind, values[part.start : part.stop])

    def held_bytes(self) -> dict[str, dict[str, int]]:
        """Bytes of state by place and kind."""
        return {store.place: dict(store.held_bytes()) for store in self._stores()}

    def close(self) -> None:
        """Let go of the state, including files."""
        for store in self._stores():
            store.close()

    def _stores(self) -> list[StateStore]:
        return [self._device] if self._offload is None else [self._offload, self._device]

    def _create(self, index: int, fraction: float) -> list[_Part]:
        start, stop = self.sharded.owned(index)
        length = stop - start
        cut = 0 if self._offload is None else round(length * fraction)
        parts = [_Part(0, cut, self._offload), _Part(cut, length, self._device)]
        parts = [part for part in parts if part.start < part.stop]
        master = self.sharded.initial_values(index) if MASTER in self.kinds else None
        for part in parts:
            vectors = {kind: np.zeros(part.stop - part.start, np.float32) for kind in self.moments}
            if master is not None:
                vectors = {MASTER: master[part.start : part.stop].copy(), **vectors}
            part.store.create(index, vectors)
        return parts

    def _update_bucket(self, index: int, values: Tensor, grad: Tensor, hyper: "_Hyper") -> None:
        """Update ``values`` in place, part by part."""
        group, parts = self._groups[index], self._parts[index]
        scalars = {
            "lr": hyper.lr * group.lr_scale,
            "weight_decay": group.weight_decay,
            "grad_scale": hyper.grad_scale,
        }
        if len(parts) == 1:
            self._update_part(index, parts[0], values, grad, hyper.step, scalars)
            return
        updated = []
        for part in parts:
            piece = kernels.copy_range(values, part.start, part.stop)
            grad_piece = kernels.copy_range(grad, part.start, part.stop)
            self._update_part(index, part, piece, grad_piece, hyper.step, scalars)
            updated.append(piece)
        kernels.overwrite(values, kernels.concat(updated))

    def _update_part(
        self, index: int, part: _Part, values: Tensor, grad: Tensor, step: int, scalars: dict[str, float]
    ) -> None:
        with part.store.borrow(index) as state:
            moments = [state[kind] for kind in self.moments]
            if part.store.place == DEVICE:
                self._update_on_device(state.get(MASTER), moments, values, grad, step, scalars)
            else:
                self._update_on_host(state.get(MASTER), moments, values, grad, step, scalars)

    def _update_on_device(
        self,
        master: Tensor | None,
        moments: list[Tensor],
        values: Tensor,
        grad: Tensor,
        step: int,
        scalars: dict[str, float],
    ) -> None:
        if values.dtype == ms.float32:
            self._rule(values, *moments, grad, step=step, **scalars)
            return
        target = as_dtype(values, ms.float32) if master is None else master
        self._rule(target, *moments, grad, step=step, low_precision=values, **scalars)

    def _update_on_host(
        self,
        master: np.ndarray | None,
        moments: list[np.ndarray],
        values: Tensor,
        grad: Tensor,
        step: int,
        scalars: dict[str, float],
    ) -> None:
        rounded = None if values.dtype == ms.float32 else _to_host(values)
        target = _to_host(as_dtype(values, ms.float32)) if master is None else master
        self._host_rule(target, *moments, _to_host(grad), step=step, low_precision=rounded, **scalars)
        kernels.overwrite(values, Tensor.from_numpy(target if rounded is None else rounded))

    def _rule(self, param: Tensor, *vectors: Tensor, step: int, **scalars: Any) -> None:
        raise NotImplementedError

    def _host_rule(self, param: np.ndarray, *vectors: np.ndarray, step: int, **scalars: Any) -> None:
        raise NotImplementedError


@dataclass(frozen=True)
class _Hyper:
    """What one update has in common for all buckets."""

    lr: float
    grad_scale: float
    step: int


class AdamW(_Optimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), bias-corrected.

    ``p -= lr * weight_decay * p``, then ``p -= lr * m_hat / (sqrt(v_hat) + eps)``. The state is "exp_avg",
    "exp_avg_sq" and, for 16-bit weights, "master".

    Attributes:
        num_updates: updates applied so far; a skipped step does not count.
        num_skipped: steps that :meth:`step` has skipped.
    """

    moments = ("exp_avg", "exp_avg_sq")

    def __init__(
        self,
        sharded: Sharded,
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        groups: Mapping[Hashable, GroupOptions] | None = None,
        offload: StateStore | None = None,
        fraction: float = 1.0,
    ) -> None:
        """Create zero moments.

        Args:
            sharded: the model.
            beta1: decay rate of the mean.
            beta2: decay rate of the mean square.
            eps: added to the root of the corrected mean square.
            weight_decay: decoupled decay coefficient of groups that are not in ``groups``.
            groups: options by the key that ``sharded`` was given for a parameter.
            offload: where state is kept instead of on the device; closed with the optimizer.
            fraction: share of each bucket's elements that is kept there.

        Raises:
            UserError: an argument is of another kind or range, the model has an optimizer already, or the
                store is another optimizer's.
        """
        self._betas_eps = {
            "beta1": _number("beta1", beta1, _is_beta, "a number from 0 to below 1"),
            "beta2": _number("beta2", beta2, _is_beta, "a number from 0 to below 1"),
            "eps": _number("eps", eps, _is_positive, "a finite number above 0"),
        }
        super().__init__(
            sharded, weight_decay=weight_decay, groups=groups, offload=offload, fraction=fraction
        )

    def _rule(self, param: Tensor, *vectors: Tensor, step: int, **scalars: Any) -> None:
        kernels.adamw_update(param, *vectors, step=step, **self._betas_eps, **scalars)

    def _host_rule(self, param: np.ndarray, *vectors: np.ndarray, step: int, **scalars: Any) -> None:
        kernels.adamw_update_host(param, *vectors, step=step, **self._betas_eps, **scalars)


class SGD(_Optimizer):
    """Plain gradient descent without momentum, for comparisons in which rounding must not be amplified."""

    moments = ()

    def __init__(
        self,
        sharded: Sharded,
        *,
        weight_decay: float = 0.0,
        groups: Mapping[Hashable, GroupOptions] | None = None,
        offload: StateStore | None = None,
        fraction: float = 1.0,
    ) -> None:
        """Arguments as in :class:`AdamW`."""
        super().__init__(
            sharded, weight_decay=weight_decay, groups=groups, offload=offload, fraction=fraction
        )

    def _rule(self, param: Tensor, *vectors: Tensor, step: int, **scalars: Any) -> None:
        kernels.sgd_update(param, *vectors, **scalars)

    def _host_rule(self, param: np.ndarray, *vectors: np.ndarray, step: int, **scalars: Any) -> None:
        kernels.sgd_update_host(param, *vectors, **scalars)


Optimizer = AdamW | SGD


def _number(name: str, value: Any, is_right: Callable[[float], bool], expected: str) -> float:
    """A number of any kind, 0-d tensors too, as a float."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not is_right(number):
        raise UserError(f"optimizer: {name} is {value!r}: expected {expected}")
    return number


def _is_share(number: float) -> bool:
    return 0 <= number <= 1


def _is_beta(number: float) -> bool:
    return 0 <= number < 1


def _is_positive(number: float) -> bool:
    return 0 < number < math.inf


def _is_positive_or_0(number: float) -> bool:
    return 0 <= number < math.inf


def _check_groups(groups: Mapping[Hashable, GroupOptions], keys: Sequence[Hashable]) -> None:
    """A rank may lack some groups, but a key of a kind that no group has is a mistake."""
    for key, options in groups.items():
        if not isinstance(options, GroupOptions):
            raise UserError(
                f"optimizer: the options of group {key!r} are {options!r}: expected optim.GroupOptions(...)"
            )
        if keys and not any(isinstance(key, type(other)) for other in keys):
            known = ", ".join(sorted({repr(other) for other in keys}))
            raise UserError(
                f"optimizer: no parameter is in group {key!r}: the groups are {known}, by group_of= of "
                f"zero.shard, or by default True for parameters of two dimensions or more, else False"
            )


def _check_store(offload: Any) -> None:
    if offload is None:
        return
    if not hasattr(offload, "borrow"):
        raise UserError(
            f"optimizer: offload is {offload!r}: expected zero.HostStates() or zero.NvmeStates(folder)"
        )
    if offload.kinds:
        raise UserError("optimizer: this store holds the state of another optimizer: make one for each")


def _to_host(tensor: Tensor) -> np.ndarray:
    """A copy in host memory."""
    return tensor.asnumpy().copy()
