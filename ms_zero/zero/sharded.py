"""ZeRO on one model: parameters and gradients as this rank holds them, stages 0 to 3.

| stage | parameters | gradients, synchronised | optimizer state | volume per step of one microbatch |
|---|---|---|---|---|
| 0 | whole | chunk | whole | reduce-scatter and gather of gradients: 2 Psi |
| 1 | whole | chunk | chunk | reduce-scatter of gradients, gather of parameters: 2 Psi |
| 2 | whole | chunk | chunk | the same: 2 Psi |
| 3 | chunk | chunk | chunk | gather for forward and for backward, reduce-scatter: 3 Psi |

(Rajbhandari et al. 2020, arXiv:1910.02054.) Stages 1 and 2 differ in when gradients become chunks: stage 2 in
every microbatch, so that only chunks are kept; stage 1, unless told otherwise, once per step, for less
traffic and with whole gradients in memory meanwhile.

One step: for each microbatch :meth:`Sharded.microbatch` around backward; :meth:`Sharded.reduce`; then
per trained bucket :meth:`Sharded.gradient`, :meth:`Sharded.owned_values`, the optimizer and
:meth:`Sharded.publish`.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_zero import kernels
from ms_zero._compat import (
    backward,
    clear_grads,
    finish_queued,
    needs_gradient,
    reset_backward_hooks,
)
from ms_zero.comm import Communicator
from ms_zero.errors import UserError
from ms_zero.parallel.placement import Placements, Replicas, is_first
from ms_zero.precision.policy import DTYPES, Policy
from ms_zero.precision.scaler import LossScaler, StaticLossScaler
from ms_zero.zero.bucket import Bucket, ValueSource
from ms_zero.zero.convert import as_dtype, part_of
from ms_zero.zero.gradients import GradientReducer
from ms_zero.zero.groups import Groups
from ms_zero.zero.layout import BucketLayout, ParamSpec, plan_buckets
from ms_zero.zero.units import UnitSpec, Wrap, plan_units, wrap_blocks
from ms_zero.zero.windows import Place, Unit, Windows

MAX_STAGE = 3
#: How MindSpore 2.10.0 refuses to add gradients of two dtypes, and what that means here.
_MIXED_SUM = "primitive[Add], the input arguments must have same data type"
_MIXED_GRADIENTS = (
    "zero: a 16-bit parameter is used by a kernel of ms_zero and by an operator of MindSpore: it cannot add "
    "the gradients of the two: use it in one way only (as ms_zero.models do), or choose policy bf16 or fp32"
)


@dataclass(frozen=True)
class Options:
    """How a model is sharded.

    Attributes:
        stage: 0 to 3.
        policy: dtypes.
        synchronise: whether every microbatch is reduced; None: in stages 2 and 3, which keep no whole
            gradients.
        reshard_after_forward: stage 3: whether parameters are freed between forward and backward.
        prefetch: stage 3: units gathered ahead.
        bucket_bytes: stages 0 to 2: size of a bucket in the stored dtype; stage 3 has one per unit and kind.
        params_on_host: stage 3: whether shards are kept in host memory and copied to the device for each
            gather.
    """

    stage: int
    policy: Policy = field(default_factory=Policy)
    synchronise: bool | None = None
    reshard_after_forward: bool = True
    prefetch: int = 1
    bucket_bytes: int = 25 * 2**20
    params_on_host: bool = False

    def __post_init__(self) -> None:
        if self.params_on_host and self.stage != MAX_STAGE:
            raise UserError(
                f"zero: weights can wait in host memory only as shards: stage is {self.stage}, use stage 3"
            )

    @property
    def synchronises(self) -> bool:
        """Whether every microbatch is reduced."""
        return self.stage >= 2 if self.synchronise is None else self.synchronise


class Sharded:
    """The buckets, units and gradients of one model on this rank.

    Args:
        model: its parameters need names and shapes, not values.
        values: initial values, the same on every rank of the data-parallel groups.
        options: stage, dtypes, traffic.
        comm: the communicator.
        groups: who shares what.
        working: dtype that the device computes in.
        grid: dtype to whose values working values are rounded, or None.
        in_fp32: whether a parameter works in fp32 whatever ``working`` is.
        key_of: group of a trained parameter; buckets never mix groups.
        keep: whether a parameter that is not trained stays outside of buckets, whole, in its own dtype.
        wrap: which cells are units; None: repeated blocks.
        scaler: of the loss; None: a fixed scale of 1.
        placements: where the model's parameters lie in the whole ones; None: they are whole.
        part_of: the part of the model that a parameter belongs to, where parts run apart; None: all.
    """

    def __init__(
        self,
        model: nn.Cell,
        values: ValueSource,
        options: Options,
        *,
        comm: Communicator,
        groups: Groups,
        working: ms.Type = ms.float32,
        grid: ms.Type | None = None,
        in_fp32: Callable[[str], bool] = lambda name: False,
        key_of: Callable[[str], Hashable] = lambda name: None,
        keep: Callable[[str], bool] = lambda name: False,
        wrap: Wrap | None = None,
        scaler: LossScaler | None = None,
        placements: Placements | None = None,
        part_of: Callable[[str], Hashable] = lambda name: None,
    ) -> None:
        """Move the model's parameters into buckets and register hooks."""
        self.placements = placements or Placements()
        self.model, self.options, self.groups = model, options, groups
        self._comm, self._values = comm, values
        self.scaler = scaler or StaticLossScaler()
        self.loss_scale = self.scaler.scale
        self.kept = {name: param for name, param in model.parameters_and_names() if keep(name)}
        self._fill_kept()
        params = {name: param for name, param in model.parameters_and_names() if name not in self.kept}
        self._params = params
        self.names = {name: tuple(param.shape) for name, param in params.items()}
        self.trained = {name for name, param in params.items() if param.requires_grad}
        specs = plan_units(model, wrap or wrap_blocks(model), leave_out=self.kept)
        self.all_buckets = [self._bucket(layout) for layout in self._plan(specs, key_of, part_of)]
        self.buckets = [bucket for bucket in self.all_buckets if bucket.has_gradient]
        dtypes = {name: (ms.float32, None) if in_fp32(name) else (working, grid) for name in params}
        self.units = self._make_units(specs, dtypes)
        self._reducer = self._make_reducer(specs)
        self._windows = Windows(
            model,
            self.units,
            comm=comm,
            reshard_after_forward=options.reshard_after_forward,
            prefetch=options.prefetch,
            on_unit_end=self._reducer.end_unit,
        )
        self._graph: Hashable = None
        self._part: Hashable = None
        # Gradients of a backward under way that waits for more of them, and those of all such graphs.
        self._aside: list[tuple[int, str, Tensor]] | None = None
        self._set_aside: dict[Hashable, list[tuple[int, str, Tensor]]] = {}
        self._receivers: dict[int, tuple[int, Callable[[Tensor], Tensor]]] = {}  # by id of the parameter
        self._trained_params = [params[name] for name in params if name in self.trained]
        self._register_gradient_hooks({name: grid for name, (_, grid) in dtypes.items()})

    @property
    def is_sharded(self) -> bool:
        """Whether optimizer state is sharded."""
        return self.options.stage >= 1

    @contextmanager
    def microbatch(self, *, last: bool) -> Iterator[None]:
        """Wrap the backward of one microbatch; ``last`` says that the step has no further one."""
        self._reducer.begin(last=last, active=self._buckets_of(self._part))
        try:
            with self._backward_pass():
                yield
                self._reducer.end()
        finally:
            self._windows.forget()

    def select(self, graph: Hashable, part: Hashable = None) -> None:
        """Say which graph the next recorded forward or backward belongs to, of several that are alive.

        ``part``: of the model that it runs, see ``part_of``; None: all of it.
        """
        self._windows.select(graph)
        self._graph, self._part = graph, part

    @contextmanager
    def putting_off(self) -> Iterator[None]:
        """Wrap a backward that puts off gradients of weights; :meth:`finish` takes them.

        Gradients that it does not put off are kept until then.
        """
        self._aside = self._set_aside[self._graph] = []
        try:
            with self._backward_pass():
                yield
        finally:
            self._aside = None

    def finish(self, waiting: kernels.PutOff, *, last: bool) -> None:
        """Take the gradients of a graph that was put off, as one microbatch; buckets go as they fill."""
        with self.microbatch(last=last):
            aside = self._set_aside.pop(self._graph)
            later = [self._receivers[id(param)][0] for param in waiting.params]
            self._reducer.expect(Counter([*later, *(index for index, _, _ in aside)]))
            for delivery in aside:
                self._reducer.deliver(*delivery)
            aside.clear()
            for param, grad in waiting.take():
                self._receivers[id(param)][1](grad)

    @contextmanager
    def _backward_pass(self) -> Iterator[None]:
        """Close the windows at the end of a backward; of one that failed, nothing is left."""
        complete = False
        try:
            yield
            self._windows.close_all()
            complete = True  # only now: an operation that is still queued may be the one that fails
        except TypeError as error:
            if _MIXED_SUM in str(error):
                raise UserError(_MIXED_GRADIENTS) from error
            raise
        finally:
            clear_grads(self._trained_params)
            if not complete:
                reset_backward_hooks(cell for _, cell in self.model.cells_and_names())
                self._reducer.abandon()
                self._windows.close_all(complete=False)

    def backward(self, loss: Tensor, *, weight: float, last: bool) -> None:
        """Back-propagate ``weight * loss``, times the loss scale, as one microbatch.

        Args:
            loss: 0-d, recorded by :func:`ms_zero._compat.tape`.
            weight: the gradient of the step is the sum of weighted gradients over microbatches and ranks.
            last: whether the step has no further microbatch.

        Raises:
            UserError: no such loss; or an earlier microbatch of the step failed; or a parameter got a
                gradient after its unit had ended.
        """
        _check_loss(loss)
        with self.microbatch(last=last):
            backward(loss, Tensor(np.float32(weight * self.loss_scale)).astype(loss.dtype))

    def reduce(self) -> None:
        """Finish the reduction of the step: every trained bucket has this rank's chunk of the sum.

        Raises:
            UserError: the step has no complete gradient, or a parameter was frozen or unfrozen meanwhile.
        """
        for name, param in self._params.items():
            if param.requires_grad != (name in self.trained):
                raise UserError(
                    f"zero: requires_grad of parameter {name} was changed after the model was sharded: "
                    f"set it before"
                )
        self._reducer.finish()

    def sum_of_squares(self) -> float:
        """Of the reduced gradient, loss scale taken out, each parameter once; equal on all ranks."""
        counted = [bucket.reduced for bucket in self.buckets if is_first(_replicas(bucket))]
        parts = kernels.squares_in_parts(counted)
        for group in (self.groups.shard, *self.placements.groups):
            parts = self._comm.all_gather(parts, group)
        # Added in fp64 and rounded once, so that the cut into buckets and chunks does not show: all stages
        # get the same norm and clip by the same factor.
        with np.errstate(over="ignore", invalid="ignore"):
            total = np.float32(parts.asnumpy().sum(dtype=np.float64))
        return float(total) / self.loss_scale**2

    def first_nonfinite(self) -> str | None:
        """Name of the first trained parameter, in definition order, whose reduced gradient has an inf or nan.

        Collective; equal on all ranks.
        """
        names = set()
        for bucket in self.buckets:
            start, stop = bucket.chunk
            values = as_dtype(bucket.reduced, ms.float32).asnumpy()
            for piece in bucket.layout.pieces(start, stop):
                first = piece.slot.start + piece.start - start
                if not np.isfinite(values[first : first + piece.stop - piece.start]).all():
                    names.add(piece.slot.name)
        for group in (self.groups.shard, *self.placements.groups):
            names = {name for found in self._comm.exchange(sorted(names), group) for name in found}
        return next((name for name in self.names if name in names), None)

    def gradient(self, index: int) -> Tensor:
        """The reduced gradient of a trained bucket over the range that this rank updates."""
        bucket = self.buckets[index]
        if self.is_sharded:
            return bucket.reduced
        return self._comm.all_gather(bucket.reduced, bucket.groups.shard)

    def owned(self, index: int) -> tuple[int, int]:
        """The range of a trained bucket that this rank updates: its chunk, or all of it in stage 0."""
        bucket = self.buckets[index]
        return bucket.chunk if self.is_sharded else bucket.stored

    def owned_values(self, index: int) -> Tensor:
        """The stored parameters of that range, to be updated in place and published."""
        bucket = self.buckets[index]
        if self.owned(index) == bucket.stored:
            return bucket.store
        start, stop = bucket.chunk
        return kernels.copy_range(bucket.store, start, stop)

    def publish(self, index: int, values: Tensor) -> None:
        """Give updated parameters to all ranks that store them."""
        bucket = self.buckets[index]
        is_part = self.owned(index) != bucket.stored
        bucket.write(self._comm.all_gather(values, bucket.groups.shard) if is_part else values)

    def initial_values(self, index: int) -> np.ndarray:
        """The unrounded initial values of the owned range, fp32, for master weights."""
        return self.buckets[index].assemble(self._values, *self.owned(index))

    def end_step(self, *, applied: bool) -> None:
        """Drop the gradients of the step and let the loss scale follow its outcome."""
        self.drop_gradients()
        self.loss_scale = self.scaler.update(applied)

    def drop_gradients(self) -> None:
        """Give up a step before its update, for example after an exception; the next one starts anew."""
        self._reducer.drop()
        self._set_aside.clear()
        self.close_windows()

    def close_windows(self) -> None:
        """Let no window show weights from before a change of the stored ones; forget recorded graphs."""
        self._windows.close_all()
        self._windows.forget_all()

    def load_scale(self, state: dict) -> None:
        """Continue with a saved state of the loss scale; that of another kind of scaler says nothing here."""
        if state.get("kind") == self.scaler.state()["kind"]:
            self.scaler.load_state(state)
        self.loss_scale = self.scaler.scale

    def saves(self, bucket: Bucket) -> tuple[int, int]:
        """The range that this rank writes to a checkpoint; together the ranks cover everything once."""
        return bucket.chunk if bucket.groups.replica.index == 0 and is_first(_replicas(bucket)) else (0, 0)

    def saves_kept(self, name: str) -> bool:
        """Whether this rank is the one that writes a parameter outside of buckets to a checkpoint."""
        is_first_copy = self.groups.shard.index == self.groups.replica.index == 0
        return is_first_copy and is_first(self.placements.replicas(name))

    def write_kept(self, name: str, values: np.ndarray) -> None:
        """Overwrite a parameter outside of buckets, on this rank."""
        param = self.kept[name]
        finish_queued()  # what was called before is to read the old values
        param.data = Tensor(values.reshape(param.shape)).astype(param.dtype)

    def held_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds now: "weights", "host_weights" and "gradients" in buckets,
        "unsharded" in windows.
        """
        held: Counter[str] = Counter(weights=0, host_weights=0)  # a stage may have no parameters
        for bucket in self.all_buckets:
            held.update(bucket.buffers())
        held["gradients"] = self._reducer.held_bytes()
        return {**held, "unsharded": self._windows.open_bytes()}

    @property
    def most_gradient_bytes(self) -> int:
        """The most bytes of gradients that were kept at the end of a microbatch so far."""
        return self._reducer.most_bytes

    @property
    def holds_initial_values(self) -> bool:
        """Whether the optimizer has not been made yet."""
        return self._values is not _no_values

    def set_initial_values(self, values: ValueSource) -> None:
        """Overwrite the parameters, before the optimizer is made."""
        self._values = values
        self.close_windows()
        for bucket in self.all_buckets:
            bucket.fill(values)

    def forget_initial_values(self) -> None:
        """Let go of the source of initial values, which may hold a whole model."""
        self._values = _no_values

    def whole_values(self) -> Iterator[tuple[str, Tensor]]:
        """Name and whole stored value of every parameter, bucket by bucket. Collective in stage 3."""
        for bucket in self.all_buckets:
            full = bucket.store
            if bucket.is_sharded:
                full = self._comm.all_gather(full, bucket.groups.shard)
            for slot in bucket.layout.slots:
                yield slot.name, slot.view(full)

    def _fill_kept(self) -> None:
        for name, param in self.kept.items():
            if param.is_meta:
                self.write_kept(name, self._values(name, 0, prod(param.shape)))

    def _plan(
        self,
        specs: Sequence[UnitSpec],
        key_of: Callable[[str], Hashable],
        part_of: Callable[[str], Hashable],
    ) -> list[BucketLayout]:
        """Buckets: of a unit in stage 3, else of the whole model; each holds parameters of one key only."""

        def spec(name: str) -> ParamSpec:
            shared = self.placements.replicas(name), self._groups_of(name)
            return ParamSpec(
                name, self.names[name], (name in self.trained, key_of(name), *shared, part_of(name))
            )

        if self.options.stage == MAX_STAGE:
            units, limit = [unit.params for unit in reversed(specs)], 2**62
        else:
            units = [tuple(self.names)]
            limit = max(1, self.options.bucket_bytes // self.options.policy.weight_bytes)
        planned = [
            plan_buckets([spec(name) for name in unit], max_elements=limit, degree=1) for unit in units
        ]
        return [
            replace(layout, degree=_groups(layout).shard.size) for layouts in planned for layout in layouts
        ]

    def _groups_of(self, name: str) -> Groups:
        """Who shares a parameter."""
        if self.placements.parts(name) is None:
            return self.groups
        assert self.groups.experts is not None, f"no groups for the experts' parameter {name}"
        return self.groups.experts

    def _bucket(self, layout: BucketLayout) -> Bucket:
        return Bucket(
            layout,
            self._values,
            dtype=DTYPES[self.options.policy.param],
            groups=_groups(layout),
            is_sharded=self.options.stage == MAX_STAGE,
            on_host=self.options.params_on_host,
            has_gradient=layout.key[0],
        )

    def _make_units(self, specs: Sequence[UnitSpec], dtypes: Mapping[str, tuple]) -> list[Unit]:
        places = self._places(dtypes)
        return [
            Unit(number, spec.name, spec.cells, tuple(places[name] for name in spec.params))
            for number, spec in enumerate(specs)
        ]

    def _places(self, dtypes: Mapping[str, tuple]) -> dict[str, Place]:
        """Where each parameter lies; sets it to its resting form."""
        places = {}
        finish_queued()  # what was called before is to read the old values
        placeholder = as_dtype(Tensor(np.full(1, np.nan, np.float32)), DTYPES[self.options.policy.param])
        for bucket in self.all_buckets:
            for slot in bucket.layout.slots:
                resting = placeholder if bucket.is_sharded else part_of(bucket.store, slot)
                param = self._params[slot.name]
                param.data = resting
                places[slot.name] = Place(param, resting, bucket, slot, *dtypes[slot.name])
        return places

    def _make_reducer(self, specs: Sequence[UnitSpec]) -> GradientReducer:
        unit_of = {name: number for number, spec in enumerate(specs) for name in spec.params}
        policy = self.options.policy
        return GradientReducer(
            self.buckets,
            [frozenset(unit_of[slot.name] for slot in bucket.layout.slots) for bucket in self.buckets],
            comm=self._comm,
            partial_groups=[
                [axis.group for axis in _replicas(bucket) if axis.is_partial] for bucket in self.buckets
            ],
            wire_dtype=DTYPES[policy.reduce],
            kept_dtype=DTYPES[policy.accumulate],
            synchronise=self.options.synchronises,
            in_order=self.options.stage < MAX_STAGE,
        )

    def _buckets_of(self, part: Hashable) -> set[int] | None:
        """Numbers of the trained buckets of a part, and of those that belong to all; None: all buckets."""
        if part is None:
            return None
        return {index for index, bucket in enumerate(self.buckets) if _part(bucket) in (part, None)}

    def _register_gradient_hooks(self, grids: Mapping[str, ms.Type | None]) -> None:
        # The framework keeps what a hook returns: one element instead of a second full gradient.
        dropped = Tensor(np.zeros(1, np.float32))
        for index, bucket in enumerate(self.buckets):
            for slot in bucket.layout.slots:
                param = self._params[slot.name]
                receive = self._receive(index, slot.name, grids[slot.name], dropped)
                param.register_hook(receive)
                self._receivers[id(param)] = index, receive

    def _receive(self, index: int, name: str, grid: ms.Type | None, dropped: Tensor) -> Callable[[Any], Any]:
        def receive(grad: Tensor) -> Tensor:
            grad = grad if grid is None else as_dtype(grad, grid)
            if self._aside is None:
                self._reducer.deliver(index, name, grad)
            else:
                self._aside.append((index, name, grad))
            return dropped

        return receive


def _replicas(bucket: Bucket) -> tuple[Replicas, ...]:
    """Ranks that share the data and hold the same parameters: the third part of the key."""
    return bucket.layout.key[2]


def _groups(layout: BucketLayout) -> Groups:
    """Who shares the parameters of a bucket: the fourth part of the key."""
    return layout.key[3]


def _part(bucket: Bucket) -> Hashable:
    """The part of the model that a bucket belongs to: the fifth part of the key."""
    return bucket.layout.key[4]


def _check_loss(loss: Tensor) -> None:
    if not isinstance(loss, Tensor) or loss.ndim:
        found = f"of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UserError(f"zero: the loss is {found}: expected a 0-d tensor, such as a mean or a sum")
    if not needs_gradient(loss):
        raise UserError(
            "zero: the loss does not depend on any trained parameter, or was computed outside of "
            "`with model.record()`"
        )


def _no_values(name: str, start: int, stop: int) -> np.ndarray:
    raise AssertionError(f"initial values of {name} were asked for after they were let go")
