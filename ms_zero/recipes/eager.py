"""The eager recipe: a plain model, its shards and its optimizer on this rank."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
from mindspore import Tensor, nn, ops

from ms_zero import kernels
from ms_zero._compat import is_recording, no_grad, tape
from ms_zero.checkpoint import Checkpoint, Shard
from ms_zero.comm import Communicator, Group
from ms_zero.data import IGNORED_LABEL, NO_RESETS, DocumentResets
from ms_zero.models.dropout import DropoutState
from ms_zero.optim.optimizer import Optimizer
from ms_zero.recipes.context import Samples, WholeSamples
from ms_zero.recipes.expert import Balancer
from ms_zero.recipes.state import gradient_shards, load_state, state_shards
from ms_zero.zero.sharded import Sharded


@dataclass(frozen=True)
class GradientSummary:
    """Global facts about one step, equal on all ranks.

    Attributes:
        loss: mean over the valid tokens of the global batch, in nats; with the auxiliary loss of a model that
            has one.
        sum_of_squares: of the summed gradient; not finite when any element is not.
    """

    loss: float
    sum_of_squares: float


class EagerEngine:
    """Runs microbatches on this rank and keeps parameters, gradients and optimizer state."""

    def __init__(
        self,
        model: nn.Cell,
        sharded: Sharded,
        optimizer: Optimizer,
        *,
        comm: Communicator,
        group: Group,
        resets: DocumentResets = NO_RESETS,
        seed: int = 0,
        notes: Sequence[str] = (),
        loss_sum: nn.Cell | None = None,
        spans_of: Callable[[int], Sequence[tuple[int, int]]] | None = None,
        balancer: Balancer | None = None,
        samples: Samples | None = None,
    ) -> None:
        """Join the parts.

        Args:
            model: maps input_ids int32 [B, T] and the arguments that ``resets`` asks for to logits [B, T, V],
                or to these and an auxiliary loss of each sequence [B].
            sharded: holds the model's parameters.
            optimizer: updates them.
            comm: the communicator.
            group: the ranks that see different data, or different tokens of it.
            resets: what restarts where a document begins.
            seed: of dropout.
            notes: what the log should say about the parts.
            loss_sum: maps logits [B T, V] and labels int32 [B T] to the summed token loss; None:
                `kernels.CrossEntropySum`.
            spans_of: length of a sequence -> the token ranges that the model's dropouts see; None: all.
            balancer: of a model whose routers balance by a bias.
            samples: what this rank computes of the samples; None: all of them.
        """
        self.model, self.notes = model, tuple(notes)
        self._dropout: DropoutState | None = getattr(model, "dropout_state", None)
        self._seed = seed
        self.sharded = sharded
        self.optimizer = optimizer
        self._comm, self._group, self._resets = comm, group, resets
        self._loss_sum = kernels.CrossEntropySum() if loss_sum is None else loss_sum
        self._spans_of, self._balancer = spans_of, balancer
        self._samples = WholeSamples() if samples is None else samples
        self._loss_of_step: Tensor | None = None

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
        """Add one microbatch to the gradient of the step.

        Args:
            input_ids: int32 [B, T].
            labels: int32 [B, T]; -100 is ignored.
            document_starts: int32 [B, T], see `ms_zero.data.Sample`.
            weight: factor on the summed token loss, the same for all ranks and microbatches of a step
                (one over the global number of valid tokens).
            last: True for the last microbatch of the step; reductions end in its backward.
            step: attempted steps before this one; a model with dropout needs it, and the next.
            sample_numbers: of the rows.
        """
        self._set_position(step, sample_numbers, input_ids.shape[1])
        with tape():
            loss = self._loss(input_ids, labels, document_starts)
        self.sharded.backward(loss, weight=weight, last=last)
        weighted = ops.stop_gradient(loss) * weight
        self._loss_of_step = weighted if self._loss_of_step is None else self._loss_of_step + weighted

    def reduce(self) -> GradientSummary:
        """Finish the gradient reduction of the step and agree on loss and gradient length."""
        self.sharded.reduce()
        loss = self._comm.all_reduce(self._loss_of_step.reshape((1,)), self._group)
        self._loss_of_step = None
        return GradientSummary(float(loss.asnumpy()[0]), self.sharded.sum_of_squares())

    def update(self, *, lr: float, grad_scale: float) -> None:
        """Apply the reduced gradient; follows :meth:`reduce`."""
        self.optimizer.apply(lr=lr, grad_scale=grad_scale)
        if self._balancer is not None:
            self._balancer.apply()

    def discard(self) -> None:
        """Drop the reduced gradient of a skipped step; the loss scale follows."""
        self.sharded.end_step(applied=False)
        if self._balancer is not None:
            self._balancer.discard()

    def loss_sum(
        self, input_ids: np.ndarray, labels: np.ndarray, document_starts: np.ndarray | None = None
    ) -> float:
        """Summed token loss of one batch without gradients, in nats; without auxiliary losses."""
        with no_grad(), self._without_dropout():
            return float(self._samples.total(self._loss(input_ids, labels, document_starts)).asnumpy())

    def _set_position(self, step: int, sample_numbers: Sequence[int], length: int) -> None:
        if self._dropout is not None:
            spans = self._samples.spans(length, self._spans_of)
            where = {"step": step, "sample_numbers": sample_numbers, "token_spans": spans}
            self._dropout.set_position(seed=self._seed, **where)

    def _without_dropout(self) -> AbstractContextManager:
        return nullcontext() if self._dropout is None else self._dropout.off()

    def _loss(self, input_ids: np.ndarray, labels: np.ndarray, document_starts: np.ndarray | None) -> Tensor:
        inputs = self._inputs(input_ids, document_starts)
        result = self.model(inputs.pop("input_ids"), **inputs)
        return self._loss_of(result, self._samples.labels(labels))

    def _inputs(self, input_ids: np.ndarray, document_starts: np.ndarray | None) -> dict[str, Tensor]:
        arrays = self._samples.inputs(input_ids, document_starts, self._resets)
        return {name: Tensor(array) for name, array in arrays.items()}

    def _loss_of(self, result: Tensor | tuple[Tensor, Tensor], labels: np.ndarray) -> Tensor:
        """Summed token loss; in training with the auxiliary loss of a sequence for each of its valid tokens.

        So the loss of a step is the same however its sequences are spread over microbatches and ranks.
        """
        logits, aux = result if isinstance(result, tuple) else (result, None)
        loss = self._loss_sum(logits.reshape((-1, logits.shape[-1])), Tensor(labels.reshape(-1)))
        if aux is None or not is_recording():
            return loss
        valid = Tensor((labels != IGNORED_LABEL).sum(1, dtype=np.float32))
        return loss + ops.ReduceSum()(aux * valid)

    def first_nonfinite(self) -> str | None:
        """Name of the first parameter, in definition order, whose reduced gradient has an inf or nan."""
        return self.sharded.first_nonfinite()

    def gradient_shards(self) -> Iterator[tuple[Shard, np.ndarray]]:
        """This rank's part of the reduced gradient, between :meth:`reduce` and the update, fp32."""
        return gradient_shards(self.sharded)

    def state_shards(self) -> Iterator[tuple[Shard, np.ndarray]]:
        """This rank's part of parameters and optimizer state, fp32; together they cover all once."""
        return state_shards(self.sharded, self.optimizer)

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Overwrite parameters and optimizer state with those of a checkpoint.

        Raises:
            UserError: the checkpoint lacks a tensor, has one more, or one of another shape.
        """
        load_state(self.sharded, self.optimizer, checkpoint)
