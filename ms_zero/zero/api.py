"""ZeRO for any Cell: `shard` moves its parameters into shards and returns what a training loop needs.

Example::

    comm = ms_zero.comm.connect("CPU")
    mesh = ProcessMesh(Mesh(dp_shard=comm.world_size), comm)
    model = ms_zero.zero.shard(cell, mesh, stage=3, policy="bf16")
    optimizer = ms_zero.optim.AdamW(model, weight_decay=0.1)
    for x, y in batches:                      # this rank's part of the global batch
        with model.record():
            loss = loss_fn(model(x), y)
        model.backward(loss)
        optimizer.step(lr=1e-3, clip_norm=1.0)
"""

import hashlib
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_zero._compat import device_target, is_compiled, no_grad, tape
from ms_zero.comm import ProcessMesh
from ms_zero.errors import UserError
from ms_zero.parallel.placement import Placements, is_first
from ms_zero.precision.autocast import Matcher, fp32_parameters
from ms_zero.precision.autocast import apply as autocast
from ms_zero.precision.policy import DTYPES, Policy
from ms_zero.precision.policy import policy as named_policy
from ms_zero.precision.scaler import DynamicLossScaler, LossScaler, scaling_rule
from ms_zero.zero.bucket import ValueSource
from ms_zero.zero.kept import kept_parameters
from ms_zero.zero.sharded import MAX_STAGE, Groups, Options, Sharded
from ms_zero.zero.units import Wrap

# Ranks that see different data, or different tokens of it, and train one model; those that share its states.
_DATA = ("dp_replicate", "dp_shard", "cp")
_SHARD = ("dp_shard", "cp")
# Those of them that hold the same experts.
_SAME_EXPERTS = ("dp_replicate", "edp")
# Set on a Cell that was sharded.
_SHARDED = "sharded_by_zero"


class ShardedModel(Sharded):
    """A user's Cell under ZeRO; made by :func:`shard`."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the Cell."""
        return self.model(*args, **kwargs)

    @contextmanager
    def record(self) -> Iterator[None]:
        """Record what is computed inside for :meth:`backward`."""
        with tape():
            yield

    @contextmanager
    def evaluate(self) -> Iterator[None]:
        """Compute without gradients inside."""
        with no_grad():
            yield

    def backward(self, loss: Tensor, *, weight: float = 1.0, last: bool = True) -> None:
        """Back-propagate one microbatch.

        The gradient of the step is the mean over the data-parallel ranks of the sum over microbatches of
        ``weight * loss``; with k microbatches of equal weight pass 1 / k.

        Args:
            loss: 0-d, recorded inside :meth:`record`.
            weight: factor on the loss.
            last: whether the step has no further microbatch; gradients are complete after that.
        """
        super().backward(loss, weight=weight / self.groups.num_ranks, last=last)

    def state_dict(self, *, full: bool = True) -> dict[str, Any]:
        """The stored parameters, by logical name. With ``full`` collective in stage 3: call it on all ranks.

        Returns:
            full: a numpy array of each whole parameter, on every rank. Else: the flat ranges that this rank
            saves of its part, as a list of (start, stop, values) for each parameter that has one. Parameters
            that the model itself writes (statistics of a batch normalisation) are this rank's own.
        """
        kept = {name: param.asnumpy().copy() for name, param in self.kept.items()}
        if full:
            whole = {name: self._whole(name, value) for name, value in self.whole_values()} | kept
            return {name: whole[name] for name, _ in self.model.parameters_and_names()}
        ranges: dict[str, list[tuple[int, int, np.ndarray]]] = {}
        for bucket in self.all_buckets:
            start, stop = self.saves(bucket)
            held = bucket.store.asnumpy()
            for piece in bucket.layout.pieces(start, stop):
                first = piece.slot.start + piece.start - bucket.stored[0]
                values = held[first : first + piece.stop - piece.start].copy()
                ranges.setdefault(piece.slot.name, []).append((piece.start, piece.stop, values))
        saved = {name: value for name, value in kept.items() if self.saves_kept(name)}
        return ranges | {name: [(0, value.size, value.reshape(-1))] for name, value in saved.items()}

    def load_state_dict(self, values: Mapping[str, np.ndarray]) -> None:
        """Take the parameters from whole arrays; each rank copies its part.

        Raises:
            UserError: a name is missing or unknown, a shape differs, or the optimizer was made already: it
                would go on from master weights of its own.
        """
        if not self.holds_initial_values:
            raise UserError("zero: load_state_dict: load weights before the optimizer is made")
        boxes = {name: self.placements.box(name, shape) for name, shape in self.names.items()}
        shapes = {name: box.global_shape for name, box in boxes.items()}
        shapes |= {name: tuple(param.shape) for name, param in self.kept.items()}
        if values.keys() != shapes.keys():
            odd = sorted(values.keys() ^ shapes.keys())
            raise UserError(f"zero: load_state_dict: names differ from the model's: {', '.join(odd[:4])}")
        for name, shape in shapes.items():
            if tuple(values[name].shape) != shape:
                found = list(values[name].shape)
                raise UserError(f"zero: load_state_dict: {name} is {found}, the model's is {list(shape)}")
        for name in self.kept:
            self.write_kept(name, np.asarray(values[name]))
        arrays = {name: box.take(np.asarray(values[name], np.float32)) for name, box in boxes.items()}
        flat = {name: array.reshape(-1) for name, array in arrays.items()}
        self.set_initial_values(lambda name, start, stop: flat[name][start:stop])

    def _whole(self, name: str, part: Tensor) -> np.ndarray:
        """A whole parameter, given this rank's part."""
        parts = self.placements.parts(name)
        groups = (*([] if parts is None else [parts]), *self.placements.groups)
        if not groups:
            return part.asnumpy().copy()
        box, values = self.placements.box(name, part.shape), part.asnumpy()
        whole = np.zeros(box.global_shape, np.float32)
        if is_first(self.placements.replicas(name)):
            box.take(whole)[...] = values
        for group in groups:
            whole = self._comm.all_reduce(Tensor(whole), group).asnumpy()
        return whole.astype(values.dtype)


def shard(
    cell: nn.Cell,
    mesh: ProcessMesh,
    *,
    stage: int = 3,
    policy: str | Policy = "fp32",
    values: ValueSource | None = None,
    wrap: Wrap | None = None,
    group_of: Callable[[str], Hashable] | None = None,
    keep: Callable[[str], bool] | None = None,
    fp32: tuple[Matcher, ...] = (),
    scaler: LossScaler | None = None,
    options: Options | None = None,
    placements: Placements | None = None,
) -> ShardedModel:
    """Shard a Cell's parameters, gradients and (through the optimizer) optimizer state over ``dp_shard``.

    The Cell itself is changed: its parameters become views of flat buffers, or placeholders outside of their
    units' windows (stage 3). What the model itself writes, and what is no float, stays as it is; see
    :func:`ms_zero.zero.kept.kept_parameters`. Collective.

    Args:
        cell: any model; the same on every rank of the mesh's data-parallel axes.
        mesh: stages 1 to 3 shard over ``dp_shard`` and replicate over ``dp_replicate``.
        stage: 0 to 3.
        policy: "fp32", "bf16", "fp16" or a Policy.
        values: (name, start, stop) -> initial values of a flat range, for a model whose parameters have no
            storage yet, so that no rank ever holds more than its part. None: the values that the parameters
            have on the first data-parallel rank.
        wrap: which cells are units; None: repeated blocks, and the rest of the model as one.
        group_of: parameter name -> group, for options per group; None: whether it has two dims or more.
        keep: name of a parameter that is not trained -> whether the model's forward writes it.
        fp32: further cells that compute in fp32, by class or predicate.
        scaler: loss scaling; None: dynamic for policies with fp16, else none.
        options: further options; ``stage`` and ``policy`` override its own.
        placements: of a model that :func:`ms_zero.parallel.parallelize` or
            :func:`ms_zero.parallel.split_experts` has cut; ``values`` are those of the whole parameters.

    Raises:
        UserError: unknown stage or policy, parameters without values, a model that is sharded already or
            has nothing to shard, or ranks that differ in the model or in the arguments.
    """
    _check_arguments(cell, mesh, stage, policy, wrap, scaler)
    chosen = named_policy(policy) if isinstance(policy, str) else policy
    options = replace(options or Options(stage=stage), stage=stage, policy=chosen)
    kept = kept_parameters(cell, keep)
    _check_unsharded(cell)
    if all(name in kept for name, _ in cell.parameters_and_names()):
        raise UserError(f"zero: {type(cell).__name__} has no parameters that could be sharded")
    _check_compiled(cell, options)
    _check_agreement(_description(cell, options), mesh)
    if values is not None and placements is not None:
        values = placements.local_values(values)
    working = chosen.working(device_target())
    shapes = {name: param.shape for name, param in cell.parameters_and_names()}
    autocast(cell, chosen, device_target(), fp32=fp32)
    model = ShardedModel(
        cell,
        values or _first_rank_values(cell, mesh, kept, placements or Placements()),
        options,
        comm=mesh.comm,
        groups=data_groups(mesh, stage),
        working=working.dtype,
        grid=None if working.grid is None else DTYPES[working.grid],
        in_fp32=fp32_parameters(cell, fp32).__contains__,
        key_of=group_of or (lambda name: len(shapes[name]) > 1),
        keep=kept.__contains__,
        wrap=wrap,
        scaler=scaler or _default_scaler(chosen),
        placements=placements,
    )
    _check_agreement(_layout(model), mesh)
    setattr(cell, _SHARDED, True)
    return model


def data_groups(mesh: ProcessMesh, stage: int) -> Groups:
    """Stage 0 treats all data-parallel ranks alike; the others shard within ``dp_shard`` x ``cp``.

    Experts that are cut over ``ep`` are shared by those of these ranks that hold the same ones.
    """
    has_experts = mesh.mesh.ep > 1
    if stage > 0:
        replica = mesh.group("dp_replicate")
        experts = Groups(mesh.group("edp"), replica) if has_experts else None
        return Groups(mesh.group(*_SHARD), replica, experts)
    alone = mesh.comm.new_group((mesh.rank,), "replica")
    experts = Groups(mesh.group(*_SAME_EXPERTS), alone) if has_experts else None
    return Groups(mesh.group(*_DATA), alone, experts)


def _default_scaler(chosen: Policy) -> LossScaler | None:
    return DynamicLossScaler(scaling_rule("deepspeed")) if chosen.needs_loss_scaling else None


def _check_unsharded(cell: nn.Cell) -> None:
    for path, inner in cell.cells_and_names():
        if getattr(inner, _SHARDED, False):
            raise UserError(f"zero: {path or 'the model'} is sharded already: shard a model once, as a whole")


def _check_arguments(cell: Any, mesh: Any, stage: Any, policy: Any, wrap: Any, scaler: Any) -> None:
    """What is easily mixed up, by name."""
    if not isinstance(stage, int) or stage not in range(MAX_STAGE + 1):
        raise UserError(f"zero: stage is {stage!r}: expected 0, 1, 2 or 3")
    for name, value, is_right, expected in (
        ("cell", cell, isinstance(cell, nn.Cell), "an nn.Cell"),
        ("mesh", mesh, isinstance(mesh, ProcessMesh), "comm.ProcessMesh(Mesh(dp_shard=...), job)"),
        ("policy", policy, isinstance(policy, str | Policy), "fp32, bf16, fp16 or a Policy"),
        ("wrap", wrap, wrap is None or _is_wrap(wrap), "for example zero.wrap_classes(nn.Dense)"),
        ("scaler", scaler, scaler is None or isinstance(scaler, LossScaler), "a LossScaler"),
    ):
        if not is_right:
            found = value.__name__ if isinstance(value, type) else type(value).__name__
            raise UserError(f"zero: {name} is {found}: expected {expected}")


def _is_wrap(wrap: Any) -> bool:
    return callable(wrap) and not isinstance(wrap, type)


def _check_compiled(cell: nn.Cell, options: Options) -> None:
    """Compiled code runs no hooks: it would train on what a parameter shows outside of its window."""
    in_16_bits = options.policy.param != "fp32"
    if options.stage < MAX_STAGE and not in_16_bits:
        return
    for path, inner in cell.cells_and_names():
        if is_compiled(inner) and (in_16_bits or list(inner.get_parameters())):
            raise UserError(
                f"zero: {path or 'the model'} ({type(inner).__name__}) is compiled by mindspore.jit, which "
                f"passes by what stage 3 and 16 bits need: remove the decorator, or use stage 0 to 2 in fp32"
            )


def _description(cell: nn.Cell, options: Options) -> list[str]:
    lines = [
        f"{name} {list(param.shape)} {param.dtype} requires_grad={param.requires_grad}"
        for name, param in cell.parameters_and_names()
    ]
    return [*lines, str(options)]


def _layout(model: ShardedModel) -> list[str]:
    """What functions among the arguments have led to: buckets, dtypes and the loss scaling."""
    lines = [
        f"a bucket of {' '.join(slot.name for slot in bucket.layout.slots)}" for bucket in model.all_buckets
    ]
    lines += [f"{place.slot.name} in {place.working}" for unit in model.units for place in unit.places]
    return [*lines, f"loss scaling by {model.scaler.state()} {getattr(model.scaler, 'rule', '')}"]


def _check_agreement(lines: Sequence[str], mesh: ProcessMesh) -> None:
    """Ranks that disagree would mix up each other's tensors without a word."""
    group = mesh.group(*_DATA)
    everyone = mesh.comm.exchange([hashlib.sha256(line.encode()).hexdigest()[:16] for line in lines], group)
    other = next((number for number, theirs in enumerate(everyone) if theirs != everyone[0]), None)
    if other is not None:
        pairs = zip_longest(everyone[0], everyone[other])
        position = next(number for number, (a, b) in enumerate(pairs) if a != b)
        here = lines[min(position, len(lines) - 1)]
        raise UserError(
            f"zero: rank {group.ranks[other]} shards another model than rank {group.ranks[0]}, or with other "
            f"options; here it is {here}: build the same model with the same options on every rank"
        )


def _first_rank_values(
    cell: nn.Cell, mesh: ProcessMesh, kept: Collection[str], placements: Placements
) -> ValueSource:
    """The values that the parameters have on the first data-parallel rank; kept ones are set to them."""
    arrays = {}
    for name, param in cell.parameters_and_names():
        group = mesh.group(*(_DATA if placements.parts(name) is None else _SAME_EXPERTS))
        if param.is_meta:
            raise UserError(
                f"zero: parameter {name} has no values: pass values=(name, start, stop) -> array to shard()"
            )
        if name in kept:
            first = mesh.comm.broadcast(_as_words(param), group.ranks[0], group).asnumpy()
            raw = first.view(np.uint8)[: param.nbytes].view(param.asnumpy().dtype)
            param.set_data(Tensor(raw.reshape(param.shape)))
        else:
            own = Tensor(param.asnumpy().astype(np.float32).reshape(-1))
            arrays[name] = mesh.comm.broadcast(own, group.ranks[0], group).asnumpy()
    return lambda name, start, stop: arrays[name][start:stop]


def _as_words(param: Parameter) -> Tensor:
    """The bytes of a parameter of any dtype as int32, which every backend moves."""
    raw = np.ascontiguousarray(param.asnumpy()).reshape(-1).view(np.uint8)
    return Tensor(np.pad(raw, (0, -raw.size % 4)).view(np.int32))
