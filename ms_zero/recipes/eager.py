"""The eager recipe: a plain model, its data-parallel buckets and its optimizer on this rank."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_zero import kernels
from ms_zero._compat import backward, no_grad, tape
from ms_zero.checkpoint import Checkpoint, Shard
from ms_zero.comm import Communicator, Group
from ms_zero.data import NO_RESETS, DocumentResets
from ms_zero.optim.optimizer import Optimizer
from ms_zero.zero.bucket import ValueSource
from ms_zero.zero.data_parallel import DataParallel
from ms_zero.zero.layout import BucketLayout


@dataclass(frozen=True)
class GradientSummary:
    """Global facts about one step, equal on all ranks.

    Attributes:
        loss: mean over the valid tokens of the global batch, in nats.
        sum_of_squares: of the summed gradient; not finite when any element is not.
    """

    loss: float
    sum_of_squares: float


class EagerEngine:
    """Runs microbatches on this rank and keeps parameters, gradients and optimizer state."""

    def __init__(
        self,
        model: nn.Cell,
        parallel: DataParallel,
        optimizer: Optimizer,
        *,
        comm: Communicator,
        group: Group,
        resets: DocumentResets = NO_RESETS,
    ) -> None:
        """Join the parts.

        Args:
            model: maps input_ids int32 [B, T] and the arguments that ``resets`` asks for to logits [B, T, V].
            parallel: holds the model's trainable parameters.
            optimizer: updates the buffers of ``parallel``.
            comm: the communicator.
            group: the ranks that see different data.
            resets: what restarts where a document begins.
        """
        self.model = model
        self.parallel = parallel
        self.optimizer = optimizer
        self._comm, self._group, self._resets = comm, group, resets
        self._loss_sum = kernels.CrossEntropySum()
        self._chunks: list[Tensor] = []
        self._loss_of_step: Tensor | None = None

    def forward_backward(
        self,
        input_ids: np.ndarray,
        labels: np.ndarray,
        document_starts: np.ndarray | None = None,
        *,
        weight: float,
        last: bool,
    ) -> None:
        """Add one microbatch to the gradient of the step.

        Args:
            input_ids: int32 [B, T].
            labels: int32 [B, T]; -100 is ignored.
            document_starts: int32 [B, T], see `ms_zero.data.Sample`.
            weight: factor on the summed token loss, the same for all ranks and microbatches of a step
                (one over the global number of valid tokens).
            last: True for the last microbatch of the step; reductions start in its backward.
        """
        with tape():
            loss = self._loss(input_ids, labels, document_starts)
        with self.parallel.microbatch(last=last):
            backward(loss, Tensor(np.float32(weight)))
        weighted = ops.stop_gradient(loss) * weight
        self._loss_of_step = weighted if self._loss_of_step is None else self._loss_of_step + weighted

    def reduce(self) -> GradientSummary:
        """Finish the gradient reduction of the step and agree on loss and gradient length."""
        self._chunks = self.parallel.reduce()
        squares = sum(kernels.sum_of_squares(chunk) for chunk in self._chunks)
        local = ops.stack([self._loss_of_step.reshape(()), squares.reshape(())])
        self._loss_of_step = None
        loss, sum_of_squares = self._comm.all_reduce(local, self._group).asnumpy().tolist()
        return GradientSummary(loss, sum_of_squares)

    def update(self, *, lr: float, grad_scale: float) -> None:
        """Apply the reduced gradient; follows :meth:`reduce`."""
        grads = self.parallel.gather(self._chunks)
        self.optimizer.step(grads, lr=lr, grad_scale=grad_scale)
        self._chunks = []

    def discard(self) -> None:
        """Drop the reduced gradient of a skipped step."""
        self._chunks = []

    def loss_sum(
        self, input_ids: np.ndarray, labels: np.ndarray, document_starts: np.ndarray | None = None
    ) -> float:
        """Summed token loss of one batch without gradients, in nats."""
        with no_grad():
            return float(self._loss(input_ids, labels, document_starts).asnumpy())

    def _loss(self, input_ids: np.ndarray, labels: np.ndarray, document_starts: np.ndarray | None) -> Tensor:
        arguments = self._resets.arguments(document_starts)
        logits = self.model(Tensor(input_ids), **{name: Tensor(a) for name, a in arguments.items()})
        return self._loss_sum(logits.reshape((-1, logits.shape[-1])), Tensor(labels.reshape(-1)))

    def first_nonfinite(self) -> str | None:
        """Name of the first parameter, in definition order, whose reduced gradient has an inf or nan."""
        found = [shard.name for shard, values in self.gradient_shards() if not np.isfinite(values).all()]
        everywhere = {name for names in self._comm.exchange(found, self._group) for name in names}
        return next((name for name in trainable_parameters(self.model) if name in everywhere), None)

    def gradient_shards(self) -> Iterator[tuple[Shard, np.ndarray]]:
        """This rank's part of the reduced gradient, between :meth:`reduce` and the update."""
        for bucket, chunk in zip(self.parallel.buckets, self._chunks, strict=True):
            start, stop = self.parallel.owned(bucket)
            yield from _pieces("", bucket.layout, chunk.asnumpy(), start, stop)

    def state_shards(self) -> Iterator[tuple[Shard, np.ndarray]]:
        """This rank's part of parameters and optimizer state; together they cover all once."""
        for kind, tensors in self._state().items():
            for bucket, tensor in zip(self.parallel.buckets, tensors, strict=True):
                start, stop = self.parallel.owned(bucket)
                yield from _pieces(f"{kind}.", bucket.layout, tensor.asnumpy()[start:stop], start, stop)
        if self._group.index == 0:
            for name, param in frozen_parameters(self.model).items():
                values = param.asnumpy()
                yield Shard.whole(f"model.{name}", values.shape, "float32"), values

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Overwrite parameters and optimizer state with those of a checkpoint.

        Raises:
            UserError: the checkpoint lacks a tensor, has one more, or one of another shape.
        """
        names = [slot.name for bucket in self.parallel.buckets for slot in bucket.layout.slots]
        stored = {f"{kind}.{name}" for kind in self._state() for name in names}
        checkpoint.check_names(stored | {f"model.{name}" for name in frozen_parameters(self.model)})
        for bucket in self.parallel.buckets:
            bucket.load(_stored_values(checkpoint, "model.", bucket.layout))
        for kind, tensors in self._state().items():
            for bucket, tensor in zip(self.parallel.buckets, tensors, strict=True):
                bucket_values = bucket.assemble(_stored_values(checkpoint, f"{kind}.", bucket.layout))
                tensor.copy_(Tensor(bucket_values))
        for name, param in frozen_parameters(self.model).items():
            param.set_data(Tensor(checkpoint.read(Shard.whole(f"model.{name}", param.shape, "float32"))))

    def _state(self) -> dict[str, Sequence[Tensor]]:
        state = {f"optim.{kind}": tensors for kind, tensors in self.optimizer.state.items()}
        return {"model": [bucket.flat for bucket in self.parallel.buckets], **state}


def trainable_parameters(model: nn.Cell) -> dict[str, Parameter]:
    """Logical name -> parameter that gets a gradient, in definition order; a tied one appears once."""
    return {name: param for name, param in model.parameters_and_names() if param.requires_grad}


def frozen_parameters(model: nn.Cell) -> dict[str, Parameter]:
    """Logical name -> parameter without gradient, in definition order."""
    return {name: param for name, param in model.parameters_and_names() if not param.requires_grad}


def _pieces(
    prefix: str, layout: BucketLayout, values: np.ndarray, start: int, stop: int
) -> Iterator[tuple[Shard, np.ndarray]]:
    """Cut the range ``[start, stop)`` of a bucket, given its values, into one shard per parameter."""
    for piece in layout.pieces(start, stop):
        shape = piece.slot.shape
        shard = Shard(
            name=prefix + piece.slot.name,
            global_shape=shape,
            dtype="float32",
            offset=(0,) * len(shape),
            shape=shape,
            flat_start=piece.start,
            flat_stop=piece.stop,
        )
        first = piece.slot.start + piece.start - start
        yield shard, values[first : first + piece.stop - piece.start]


def _stored_values(checkpoint: Checkpoint, prefix: str, layout: BucketLayout) -> ValueSource:
    """Values of the parameters of one bucket as read from a checkpoint."""
    shapes = {slot.name: slot.shape for slot in layout.slots}

    def read(name: str, start: int, stop: int) -> np.ndarray:
        assert (start, stop) == (0, prod(shapes[name]))
        return checkpoint.read(Shard.whole(prefix + name, shapes[name], "float32")).reshape(-1)

    return read
