"""The graph engine of a run: language-model batches in, the same checkpoints out as the eager engine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_zero.checkpoint import Checkpoint, Shard
from ms_zero.comm import Group
from ms_zero.data import NO_RESETS, DocumentResets
from ms_zero.graph.dropout import GivenMasks
from ms_zero.graph.network import EXTRA_ARGUMENTS
from ms_zero.graph.step import GraphStep, Summary, graph_mode
from ms_zero.monitor.units import format_bytes

DTYPE = "float32"


@dataclass(frozen=True)
class GraphAccount:
    """Bytes of one rank by the sizes of its tensors; what MindSpore holds besides is not in it.

    Attributes:
        sent: in one step, by the formula of a ring.
        weights: trained parameters.
        gradients: their sums over microbatches.
        optimizer: its state.
    """

    sent: float
    weights: int
    gradients: int
    optimizer: int

    def lines(self) -> list[str]:
        """For the log."""
        parts = {"weights": self.weights, "gradients": self.gradients, "optimizer": self.optimizer}
        held = ", ".join(f"{name} {format_bytes(size)}" for name, size in parts.items())
        memory = f"memory per rank: {held}; together {format_bytes(sum(parts.values()))}"
        if not self.sent:
            return [memory]
        return [f"traffic per step: {format_bytes(self.sent)} per rank by the formula of a ring", memory]

    def fields(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


class GraphEngine:
    """What `ms_zero.recipes.eager.EagerEngine` is, with compiled steps: same calls, same checkpoints.

    The trainer sees the training step under both names by which it knows the eager parts, ``sharded`` (the
    loss scale) and ``optimizer`` (the number of updates).
    """

    def __init__(
        self,
        model: nn.Cell,
        step: GraphStep,
        *,
        group: Group,
        resets: DocumentResets = NO_RESETS,
        notes: Sequence[str] = (),
        masks: GivenMasks | None = None,
    ) -> None:
        """Join the parts.

        Args:
            model: its parameters go into checkpoints, trained or not.
            step: of the network that holds the model: batches are input_ids, labels and what ``resets`` asks
                for, in the order of `ms_zero.graph.network.EXTRA_ARGUMENTS`.
            group: the ranks that see different data.
            resets: what restarts where a document begins.
            notes: what the log should say about the parts.
            masks: of the model's dropouts; None: it has none.
        """
        self.model, self.notes = model, tuple(notes)
        self.sharded = self.optimizer = step
        self._step, self._group, self._resets, self._masks = step, group, resets, masks

    def forward_backward(
        self,
        input_ids: np.ndarray,
        labels: np.ndarray,
        document_starts: np.ndarray | None = None,
        *,
        weight: float,
        last: bool,
        step: int = 0,
        sample_numbers: Sequence[int] = (),
    ) -> None:
        """Add one microbatch to the gradient of the step; see the eager engine."""
        if self._masks is not None:
            self._masks.draw(step, sample_numbers)
        self._step.forward_backward(*self._batch(input_ids, labels, document_starts), weight=weight)

    def reduce(self) -> Summary:
        """Finish the gradient reduction of the step and agree on loss and gradient length."""
        return self._step.reduce()

    def update(self, *, lr: float, grad_scale: float) -> None:
        """Apply the reduced gradient; follows :meth:`reduce`."""
        self._step.update(lr=lr, grad_scale=grad_scale)

    def discard(self) -> None:
        """Drop the reduced gradient of a skipped step; the loss scale follows."""
        self._step.discard()

    def loss_sum(
        self, input_ids: np.ndarray, labels: np.ndarray, document_starts: np.ndarray | None = None
    ) -> float:
        """Summed token loss of one batch without gradients, in nats."""
        network = self._step.network.set_train(False)
        with graph_mode():
            loss = network(*self._batch(input_ids, labels, document_starts))
        network.set_train()
        return float(loss.asnumpy())

    def first_nonfinite(self) -> str | None:
        """Name of the first parameter whose reduced gradient has an inf or nan."""
        found = (name for name, values in self._step.gradients() if not np.isfinite(values).all())
        return next(found, None)

    def gradient_shards(self) -> Iterator[tuple[Shard, np.ndarray]]:
        """This rank's part of the reduced gradient, between :meth:`reduce` and the update, fp32."""
        for name, values in self._step.gradients():
            yield from self._part(name, values)

    def state_shards(self) -> Iterator[tuple[Shard, np.ndarray]]:
        """This rank's part of parameters and optimizer state, fp32; together the ranks cover all once."""
        for name, param in self._tensors().items():
            yield from self._part(name, param.asnumpy())

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Overwrite parameters and optimizer state with those of a checkpoint of any engine and layout.

        Raises:
            UserError: the checkpoint lacks a tensor, has one more, or one of another shape.
        """
        tensors = self._tensors()
        checkpoint.check_names(tensors)
        for name, param in tensors.items():
            values = checkpoint.read(Shard.whole(name, tuple(param.shape), DTYPE))
            param.set_data(Tensor(values))

    def account(self) -> GraphAccount:
        """What a step sends and holds."""
        held, size = self._step.held_bytes(), self._group.size
        return GraphAccount(sent=2 * (size - 1) / size * held["gradients"], **held)

    def _batch(
        self, input_ids: np.ndarray, labels: np.ndarray, document_starts: np.ndarray | None
    ) -> list[Tensor]:
        arguments = self._resets.arguments(document_starts)
        extras = [arguments[name] for name in EXTRA_ARGUMENTS if name in arguments]
        return [Tensor(array) for array in (input_ids, labels, *extras)]

    def _tensors(self) -> Mapping[str, Parameter]:
        """Checkpoint name -> what is saved under it."""
        masks, params = self._masks, self.model.parameters_and_names()
        tensors = {f"model.{name}": each for name, each in params if masks is None or not masks.holds(each)}
        for kind, states in self._step.update_cell.state().items():
            names = (param.name for param in self._step.params)
            tensors |= {f"optim.{kind}.{name}": state for name, state in zip(names, states, strict=True)}
        return tensors

    def _part(self, name: str, values: np.ndarray) -> Iterator[tuple[Shard, np.ndarray]]:
        """The flat range of a tensor that this rank writes."""
        shape, total = tuple(values.shape), prod(values.shape)
        index, size = self._group.index, self._group.size
        start, stop = total * index // size, total * (index + 1) // size
        if start < stop:
            yield Shard.flat(name, shape, DTYPE, start, stop), values.reshape(-1)[start:stop]
