"""Driving a step that is one graph: the host queues microbatches, sets scalars and reads what was done.

The graph itself decides on clipping, finiteness, the update and the loss scale, see `ms_zero.graph.train`.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

import numpy as np
from mindspore import Parameter, Tensor, nn
from mindspore.communication import get_group_size, get_rank
from mindspore.parallel.auto_parallel import AutoParallel

from ms_zero.checkpoint import Checkpoint, Shard
from ms_zero.comm import Communicator, Group
from ms_zero.data import NO_RESETS, DocumentResets
from ms_zero.errors import UserError
from ms_zero.graph.engine import DTYPE, GraphAccount, GraphEngine
from ms_zero.graph.initial import fill
from ms_zero.graph.seqpipe import CACHE_GRADIENT, caches
from ms_zero.graph.slices import held_boxes, saved_here
from ms_zero.graph.step import Summary, graph_mode
from ms_zero.graph.train import TrainParts
from ms_zero.graph.update import step_scalars
from ms_zero.parallel.placement import Box, FlatValues


class CompiledStep:
    """A train cell with the calls of `ms_zero.graph.step.GraphStep`.

    :meth:`reduce` runs the whole step; :meth:`update` and :meth:`discard` only take note of what it did.

    Attributes:
        scaler: of the loss, in the graph.
        num_updates: updates applied so far.
        is_prepared: whether parameters are what this rank holds.
    """

    def __init__(
        self,
        cell: nn.Cell,
        parts: TrainParts,
        schedule: Callable[[int], float],
        *,
        weight_decay: float,
        beta1: float,
        beta2: float,
        eps: float,
        comm: Communicator | None,
        loss_rank: int = 0,
    ) -> None:
        """Join the parts; nothing is compiled before the first step.

        Args:
            cell: ``parts.cell``, or AutoParallel around it.
            parts: see `ms_zero.graph.train.build_train_cell`.
            schedule: number of an update, from 0, -> its learning rate.
            weight_decay: decoupled decay coefficient.
            beta1: decay rate of the mean (adamw).
            beta2: decay rate of the mean square (adamw).
            eps: added to the root (adamw).
            comm: of the job. None: this process only.
            loss_rank: of ``comm``; knows the loss, see `ms_zero.graph.parallel.Options`.
        """
        self.cell, self.parts, self.scaler = cell, parts, parts.scaler
        self.params, self.update_cell = parts.params, parts.update
        self.num_updates, self.loss_scale = 0, parts.scaler.scale
        self._schedule, self._comm, self._loss_rank = schedule, comm, loss_rank
        self._rates = {"weight_decay": weight_decay, "beta1": beta1, "beta2": beta2, "eps": eps}
        self._queue: list[Sequence[Tensor]] = []
        self._weight, self.is_prepared = 0.0, False

    def prepare(self, rows: int, tokens: int) -> None:
        """Compile, so that parameters are what this rank holds; the first step does it otherwise.

        Args:
            rows: samples of this rank in a step.
            tokens: of a sample.
        """
        shape = (rows, tokens)
        self.compile(*(Tensor(np.zeros(shape, np.int32)) for _ in range(2 + len(self.parts.extras))))

    def compile(self, *inputs: Tensor) -> None:
        """As :meth:`prepare`, for tensors of the shapes and dtypes of a step on this rank."""
        with graph_mode():
            self.cell.compile(*inputs)
        network = self.parts.network
        of_model = {id(param) for param in network.get_parameters()} - {id(each) for each in caches(network)}
        for param in self.cell.get_parameters():
            if param.has_init and id(param) not in of_model and self.holds(param):
                param.init_data()  # optimizer state, sums and caches, which are cut like their parameters
        self.is_prepared = True

    def forward_backward(self, *batch: Tensor, weight: float) -> None:
        """Queue one microbatch of the step; ``weight`` is that of all its microbatches and ranks."""
        self._queue.append(batch)
        self._weight = weight

    def reduce(self) -> Summary:
        """Run the step."""
        inputs = [np.concatenate([part.asnumpy() for part in column]) for column in zip(*self._queue)]
        self._queue = []
        cell, scale = self.parts.cell, self.loss_scale
        cell.loss_factor.set_data(Tensor(np.float32(self._weight * scale)))
        scalars = step_scalars(
            self.update_cell.kind,
            lr=self._schedule(self.num_updates),
            step=self.num_updates + 1,
            grad_scale=1.0,
            **self._rates,
        )
        cell.decayed_scalars.set_data(Tensor(scalars[0]))
        cell.plain_scalars.set_data(Tensor(scalars[1]))
        with graph_mode():
            *_, norm, finite = self.cell(*map(Tensor, inputs))
        own = [float(cell.step_loss.asnumpy()), float(norm.asnumpy()), bool(finite.asnumpy())]
        everyone = [own] if self._comm is None else self._comm.exchange(own)
        return agreed(everyone, scale, self._loss_rank)

    def update(self, *, lr: float, grad_scale: float = 1.0) -> None:
        """Take note that the graph has updated; it had the arguments already."""
        assert lr == self._schedule(self.num_updates), (lr, self.num_updates)
        self.num_updates += 1
        self.loss_scale = self.scaler.scale

    def discard(self) -> None:
        """Take note that the graph has skipped the step."""
        self.loss_scale = self.scaler.scale

    def load_scale(self, state: dict) -> None:
        """Continue with a saved state of the loss scale; that of another kind of scaler says nothing here."""
        if state.get("kind") == self.scaler.state()["kind"]:
            self.scaler.load_state(state)
        self.loss_scale = self.scaler.scale

    def gradients(self) -> Iterator[tuple[str, np.ndarray]]:
        """Nothing: gradients do not leave the graph."""
        return iter(())

    def held_bytes(self) -> dict[str, int]:
        """Bytes on this rank's device, by the sizes of parameters as they are now (cut, once compiled)."""
        held = [4 * prod(param.shape) if self.holds(param) else 0 for param in self.params]
        state = sum(size for size, is_host in zip(held, self.update_cell.on_host, strict=True) if not is_host)
        kinds = len(self.update_cell.state())
        return {"weights": sum(held), "gradients": sum(held), "optimizer": state * kinds}

    def layouts(self) -> Mapping[str, Sequence]:
        """How MindSpore has cut each parameter of this rank; empty without AutoParallel."""
        return {**self.parts.cell.parameter_layout_dict, **self.cell.parameter_layout_dict}

    def holds(self, param: Parameter) -> bool:
        """Whether this rank has a part of a parameter; other stages of a pipeline have others."""
        # The compiler does not cut the gradients of a cache: they go with it.
        return not self.is_cut or param.name.removesuffix(CACHE_GRADIENT) in self.layouts()

    @property
    def is_cut(self) -> bool:
        """Whether parameters may be parts."""
        return isinstance(self.cell, AutoParallel)


def agreed(everyone: Sequence[Sequence], scale: float, loss_rank: int) -> Summary:
    """What all ranks say of a step, (scaled loss, norm, whether it is finite) each.

    ``loss_rank``: whose loss is that of the step; other stages of a pipeline have none.

    Raises:
        UserError: they do not say the same.
    """
    norms = {(norm, finite) for _, norm, finite in everyone if finite} or {(np.inf, False)}
    if len(norms) > 1 or len({finite for *_, finite in everyone}) > 1:
        raise UserError(
            f"graph: the ranks disagree on the gradient of a step: {sorted(norms)[:3]}; their weights "
            f"are not the same any more: resume from the last checkpoint and report this"
        )
    norm, finite = norms.pop()
    loss = everyone[loss_rank][0] / scale
    return Summary(loss, norm * norm if finite else np.inf)


class CompiledEngine(GraphEngine):
    """The engine of a run whose step is one graph, cut by AutoParallel or not."""

    def __init__(
        self,
        model: nn.Cell,
        step: CompiledStep,
        *,
        comm: Communicator,
        group: Group,
        resets: DocumentResets = NO_RESETS,
        notes: Sequence[str] = (),
        order: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        """Join the parts; see `GraphEngine`.

        Args:
            model: see there, as for ``step``, ``group``, ``resets`` and ``notes``.
            step: of the model or its twin.
            comm: of the job.
            group: the ranks that see different data.
            resets: what restarts where a document begins.
            notes: for the log.
            order: length of a sample -> where its tokens are, in the order in which ``step`` wants them;
                None: their own.
        """
        super().__init__(model, step, group=group, resets=resets, notes=notes)
        self._comm, self._compiled, self._order = comm, step, order

    def loss_sum(
        self, input_ids: np.ndarray, labels: np.ndarray, document_starts: np.ndarray | None = None
    ) -> float:
        """Not there: the graph of a step only trains."""
        raise UserError(
            "graph: a step that is one graph cannot evaluate: set train.eval_interval to 0 and evaluate its "
            "checkpoints with the eager engine"
        )

    def account(self) -> GraphAccount:
        """What this rank holds; what it sends is in the report of ``ms-zero graph inspect``."""
        return GraphAccount(sent=0.0, **self._compiled.held_bytes())

    def state_shards(self) -> Iterator[tuple[Shard, np.ndarray]]:
        """This rank's part of parameters and optimizer state, fp32; together the ranks cover all once."""
        boxes = self._boxes()
        here = saved_here(self._comm, boxes)
        for name, param in self._tensors().items():
            if param.name in here:
                yield _shard(name, boxes[param.name]), param.asnumpy().reshape(-1)

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Overwrite parameters and optimizer state with those of a checkpoint of any engine and layout.

        Raises:
            UserError: the checkpoint lacks a tensor, has one more, or one of another shape.
        """
        assert self._compiled.is_prepared or not self._compiled.is_cut, "before the cut is known"
        tensors, boxes = self._tensors(), self._boxes()
        checkpoint.check_names(tensors)
        for name, param in tensors.items():
            if param.name in boxes:
                values = checkpoint.read(_shard(name, boxes[param.name])).reshape(param.shape)
                param.set_data(Tensor(values), slice_shape=True)

    def _batch(
        self, input_ids: np.ndarray, labels: np.ndarray, document_starts: np.ndarray | None
    ) -> list[Tensor]:
        batch = super()._batch(input_ids, labels, document_starts)
        if self._order is None:
            return batch
        order = self._order(input_ids.shape[1])
        return [Tensor(array.asnumpy()[:, order]) for array in batch]

    def fill(self, values: FlatValues) -> None:
        """Give the model's parameters their initial values: this rank's parts, one after another."""
        fill(self.model.parameters_and_names(), self._boxes(), values)

    def _boxes(self) -> dict[str, Box]:
        """Parameter name -> what this rank holds of it; without an entry nothing (another stage has it)."""
        tensors: list[Parameter] = list(self._tensors().values())
        if not self._compiled.is_cut:
            return {param.name: Box.whole(tuple(param.shape)) for param in tensors}
        return held_boxes(self._compiled.layouts(), self._comm.rank, _index_in)


def _index_in(group: str) -> tuple[int, int]:
    return get_rank(group), get_group_size(group)


def _shard(name: str, box: Box) -> Shard:
    return Shard(name, box.global_shape, DTYPE, box.offset, box.shape, 0, prod(box.shape))
