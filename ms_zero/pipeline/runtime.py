"""Executes a schedule: what one rank of a pipeline receives, computes and sends, in order.

What an action computes is the caller's affair, see :class:`Work`. Between stages travel tuples of tensors:
activations forwards, and backwards the gradients of those that are floating point. A rank keeps the recorded
graph of each microbatch from its forward to its backward.

Shapes: the first activations of a key (for example the shape of the microbatch) on a way from stage to stage
are preceded by a header with shapes and dtypes; both sides remember it. Gradients need none: they look like
the activations.

Splitting: where a schedule has `W` actions, `B` back-propagates and lets those gradients of weights wait that
their kernels can put off (see `ms_zero.kernels.deferred`); `W` computes them. Others, for example those of
norms and embeddings, are computed in `B` and handed over in `W`. The recorded graph ends with `B`; inputs and
output gradients of the products stay until `W`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol
from zlib import crc32

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_zero._compat import backward, gradient, leaf, needs_gradient, no_grad, tape
from ms_zero.comm import Communicator, Group, Handle
from ms_zero.errors import UserError
from ms_zero.kernels import PutOff, putting_off
from ms_zero.pipeline.schedule import Action, Message, Schedule, Step, check, steps

Tensors = tuple[Tensor, ...]

_HEADER_SIZE = 64
_DTYPES = (ms.float32, ms.float16, ms.bfloat16, ms.int32, ms.int64)
_FLOATS = _DTYPES[:3]


class Work(Protocol):
    """What the actions of one rank compute."""

    def key(self, microbatch: int) -> Hashable:
        """What the shapes between stages depend on; the same on all ranks."""

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        """Run a stage; ``inputs`` is empty for the first one. The last one returns a 0-d loss alone."""

    def loss_gradient(self, microbatch: int, loss: Tensor) -> Tensor:
        """What the backward of the loss starts with."""

    def around_backward(
        self, stage: int, microbatch: int, *, weights: bool, last: bool
    ) -> AbstractContextManager:
        """Surrounds each backward.

        Args:
            stage: of the action.
            microbatch: of the action.
            weights: whether all gradients of weights are computed; else some wait for `weights`, and the
                others are to be kept until then.
            last: whether no further ones are computed on this rank.
        """

    def weights(self, stage: int, microbatch: int, waiting: PutOff, *, last: bool) -> None:
        """Take the gradients of weights that a backward has put off, and those that were kept.

        Args:
            stage: of the action.
            microbatch: of the action.
            waiting: what was put off.
            last: whether no further ones are computed on this rank.
        """


@dataclass
class _Graph:
    """A recorded forward: leaves, and what was computed of them."""

    inputs: Tensors
    outputs: Tensors
    waiting: PutOff | None  # where gradients of weights wait for W


@dataclass
class Outcome:
    """What one run of a schedule gave on this rank.

    Attributes:
        losses: of the microbatches, where the last stage is.
        peak_in_flight: the most microbatches, per virtual stage, between forward and backward at once.
        peak_held: the most of which anything was kept: more where gradients of weights are apart.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    peak_in_flight: int = 0
    peak_held: int = 0


class Pipeline:
    """Runs schedules on the ranks of one pipeline; remembers the shapes that travel between them."""

    def __init__(self, comm: Communicator, group: Group) -> None:
        """``group``: the ranks of the pipeline; rank i of a schedule is its i-th member."""
        self._comm, self._group = comm, group
        self._known: dict[tuple[int, int, int, Hashable], list[tuple[tuple[int, ...], ms.Type]]] = {}
        self._digests: dict[Schedule, Tensor] = {}  # of schedules that were checked

    def run(self, schedule: Schedule, work: Work) -> Outcome:
        """Execute a schedule with gradients. Collective over the group.

        Raises:
            UserError: the schedule is not valid or for another number of ranks, or ranks have different ones.
        """
        self._agree(schedule)
        return _Run(self, schedule, work, records=True).execute(steps(schedule)[self._group.index])

    def evaluate(self, placement: Sequence[int], num_microbatches: int, work: Work) -> Outcome:
        """Execute forwards alone, without recording, one microbatch after the other. Collective.

        Args:
            placement: rank of each virtual stage.
            num_microbatches: how many.
            work: what they compute.
        """
        schedule = forward_only(placement, num_microbatches, self._group.size)
        return _Run(self, schedule, work, records=False).execute(steps(schedule)[self._group.index])

    def send(self, tensors: Tensors, message: Message, key: Hashable) -> list[Handle[None]]:
        """Send a message, with a header when its receiver does not know the shapes."""
        target = self._group.ranks[message.target]
        handles = []
        if message.kind == "F":
            signature = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
            place = (message.source, message.target, message.stage, key)
            if place not in self._known:
                handles.append(self._comm.send_async(_header(signature), target, self._group))
                self._known[place] = signature
            elif self._known[place] != signature:
                raise UserError(
                    f"pipeline: stage {message.stage - 1} gave {_describe(signature)} for a microbatch like "
                    f"an earlier one that gave {_describe(self._known[place])}: shapes may only depend on "
                    f"the microbatch's"
                )
        handles += [self._comm.send_async(tensor, target, self._group) for tensor in tensors]
        return handles

    def receive(self, message: Message, key: Hashable, like: Tensors) -> Tensors:
        """Receive a message; gradients look like the tensors ``like``."""
        source = self._group.ranks[message.source]
        if message.kind == "F":
            place = (message.source, message.target, message.stage, key)
            if place not in self._known:
                header = self._comm.recv((_HEADER_SIZE,), ms.int32, source, self._group)
                self._known[place] = _read_header(header.asnumpy().tolist())
            signature = self._known[place]
        else:
            signature = [(tuple(tensor.shape), tensor.dtype) for tensor in like]
        return tuple(self._comm.recv(shape, dtype, source, self._group) for shape, dtype in signature)

    def _agree(self, schedule: Schedule) -> None:
        """Check a schedule the first time, and each time that all ranks are about to run the same."""
        if schedule not in self._digests:
            if schedule.num_ranks != self._group.size:
                raise UserError(
                    f"pipeline: schedule {schedule.name} is for {schedule.num_ranks} ranks, this pipeline "
                    f"has {self._group.size}: build it for as many"
                )
            check(schedule)
            self._digests[schedule] = Tensor(np.array([_digest(schedule)], np.int32))
        found = self._comm.all_gather(self._digests[schedule], self._group).asnumpy()
        if (found == found[0]).all():
            return
        mine = [schedule.name, schedule.num_microbatches]
        others = enumerate(self._comm.exchange(mine, self._group))
        rank, other = next(each for each in others if found[each[0]] != found[self._group.index])
        raise UserError(
            f"pipeline: rank {rank} runs schedule {other[0]} with {other[1]} microbatches and rank "
            f"{self._group.index} runs {mine[0]} with {mine[1]}: all need the same actions"
        )


def _digest(schedule: Schedule) -> int:
    """A number that differs between schedules, of 31 bits."""
    orders = ("-".join(map(str, order)) for order in schedule.orders)
    return crc32(" ".join([schedule.name, str(schedule.num_microbatches), *orders]).encode()) >> 1


def forward_only(placement: Sequence[int], num_microbatches: int, num_ranks: int) -> Schedule:
    """Forwards on a placement, microbatch after microbatch, each through all stages."""
    orders = tuple(
        tuple(
            Action("F", stage, microbatch)
            for microbatch in range(num_microbatches)
            for stage, owner in enumerate(placement)
            if owner == rank
        )
        for rank in range(num_ranks)
    )
    return Schedule("evaluation", num_microbatches, tuple(placement), orders)


class _Run:
    """One execution on one rank."""

    def __init__(self, pipeline: Pipeline, schedule: Schedule, work: Work, *, records: bool) -> None:
        self._pipeline, self._schedule, self._work, self._records = pipeline, schedule, work, records
        self._arrived: dict[Action, Tensors] = {}
        self._graphs: dict[tuple[int, int], _Graph] = {}
        self._waiting: dict[tuple[int, int], PutOff] = {}  # between B and W
        self._handles: list[Handle[None]] = []
        self._outcome = Outcome()

    def execute(self, own: Sequence[Step]) -> Outcome:
        split = {step.action[1:] for step in own if step.action.kind == "W"}
        makes_weights = [
            step.action
            for step in own
            if step.action.kind == "W" or (step.action.kind == "B" and step.action[1:] not in split)
        ]
        for step in own:
            try:
                self._execute(step, step.action[1:] in split, step.action in makes_weights[-1:])
            except Exception as error:
                kinds = {"F": "forward", "B": "backward", "W": "gradients of the weights"}
                kind, stage, microbatch = step.action
                error.add_note(f"in the {kinds[kind]} of stage {stage}, microbatch {microbatch}")
                raise
        for handle in self._handles:
            handle.wait()
        assert not self._graphs and not self._arrived and not self._waiting
        return self._outcome

    def _execute(self, step: Step, is_split: bool, is_last: bool) -> None:
        for message in step.receives:
            like = () if message.kind == "F" else _floats(self._graphs[message[3:]].outputs)
            key = self._work.key(message.microbatch)
            self._arrived[Action(*message[2:])] = self._pipeline.receive(message, key, like)
        made = self._compute(step.action, is_split, is_last)
        for message in step.sends:
            key = self._work.key(message.microbatch)
            self._handles += self._pipeline.send(made, message, key)
        follower = self._follower(step.action)
        if follower is not None and not step.sends:
            self._arrived[follower] = made

    def _compute(self, action: Action, is_split: bool, is_last: bool) -> Tensors:
        if action.kind == "F":
            return self._forward(action, is_split)
        if action.kind == "W":
            waiting = self._waiting.pop(action[1:])
            self._work.weights(action.stage, action.microbatch, waiting, last=is_last)
            return ()
        return self._backward(action, is_last)

    def _follower(self, action: Action) -> Action | None:
        """The action that needs the result of this one, wherever it runs."""
        stage = action.stage + {"F": 1, "B": -1, "W": -self._schedule.num_stages}[action.kind]
        return _of_stage(action, stage) if 0 <= stage < self._schedule.num_stages else None

    def _forward(self, action: Action, is_split: bool) -> Tensors:
        _, stage, microbatch = action
        received = self._arrived.pop(action, ())
        if not self._records:
            with no_grad():
                outputs = self._work.forward(stage, microbatch, received)
        else:
            inputs = tuple(leaf(tensor, requires_grad=tensor.dtype in _FLOATS) for tensor in received)
            waiting = PutOff() if is_split else None
            with tape(), putting_off(waiting):
                outputs = self._work.forward(stage, microbatch, inputs)
            self._graphs[stage, microbatch] = _Graph(inputs, outputs, waiting)
            self._note_peaks()
        outside = tuple(leaf(tensor, requires_grad=False) for tensor in outputs)
        if stage == self._schedule.num_stages - 1:
            self._outcome.losses[microbatch] = outside[0]
            return ()
        return outside

    def _note_peaks(self) -> None:
        in_flight, waiting = len(self._graphs), len(self._waiting)
        self._outcome.peak_in_flight = max(self._outcome.peak_in_flight, in_flight)
        self._outcome.peak_held = max(self._outcome.peak_held, in_flight + waiting)

    def _backward(self, action: Action, is_last: bool) -> Tensors:
        _, stage, microbatch = action
        graph = self._graphs[stage, microbatch]
        if stage == self._schedule.num_stages - 1:
            gradients = (self._work.loss_gradient(microbatch, graph.outputs[0]),)
        else:
            gradients = self._arrived.pop(action)
        is_split = graph.waiting is not None
        around = self._work.around_backward(stage, microbatch, weights=not is_split, last=is_last)
        with around, putting_off(graph.waiting):  # a cell that is recomputed runs forward in there
            _back_propagate(graph, gradients)
        del self._graphs[stage, microbatch]
        if is_split:
            self._waiting[stage, microbatch] = graph.waiting
        return tuple(_gradient_or_zero(tensor) for tensor in _floats(graph.inputs))


def _of_stage(action: Action, stage: int) -> Action:
    """The same action of another stage."""
    return Action(action.kind, stage, action.microbatch)


def _back_propagate(graph: _Graph, gradients: Tensors) -> None:
    """Add to the gradients of the leaves, given those of the outputs; frees what was recorded."""
    pairs = zip(_floats(graph.outputs), gradients, strict=True)
    wanted = [(output, grad) for output, grad in pairs if needs_gradient(output)]
    if wanted:  # a stage without parameters that got nothing to differentiate has none
        outputs, grads = zip(*wanted, strict=True)
        backward(outputs, grads)


def _floats(tensors: Tensors) -> Tensors:
    return tuple(tensor for tensor in tensors if tensor.dtype in _FLOATS)


def _gradient_or_zero(tensor: Tensor) -> Tensor:
    """The gradient of a leaf, in its dtype; zero when nothing depends on it."""
    grad = gradient(tensor)
    return ops.zeros_like(tensor) if grad is None else grad.astype(tensor.dtype)


def _header(signature: Sequence[tuple[tuple[int, ...], ms.Type]]) -> Tensor:
    numbers = [len(signature)]
    for shape, dtype in signature:
        if dtype not in _DTYPES:
            raise UserError(f"pipeline: a stage gave {_describe(signature)}: expected one of {_DTYPES}")
        numbers += [_DTYPES.index(dtype), len(shape), *shape]
    if len(numbers) > _HEADER_SIZE:
        raise UserError(f"pipeline: a stage gave {_describe(signature)}: pass on fewer tensors")
    return Tensor(np.array(numbers + [0] * (_HEADER_SIZE - len(numbers)), np.int32))


def _read_header(numbers: list[int]) -> list[tuple[tuple[int, ...], ms.Type]]:
    count, *rest = numbers
    signature = []
    for _ in range(count):
        code, ndim, *rest = rest
        signature.append((tuple(rest[:ndim]), _DTYPES[code]))
        rest = rest[ndim:]
    return signature


def _describe(signature: Sequence[tuple[tuple[int, ...], ms.Type]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in signature) or "nothing"
