"""Plain single-process training, written without buckets, shards, microbatches or collectives.

It shares only the model, the initial values, the data order and the schedule with the engines that are
compared to it. Gradients come from MindSpore's public ``value_and_grad`` over the whole global batch; the
optimizer is numpy in float64 on fp32 parameters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_zero import kernels
from ms_zero.config import OptimConfig
from ms_zero.data import IGNORED_LABEL, NO_RESETS, Batch, DocumentResets, Loader
from ms_zero.optim.schedule import Schedule


@dataclass(frozen=True)
class ReferenceStep:
    """What one step of plain training gives.

    Attributes:
        loss: mean over the valid tokens, in nats.
        grad_norm: Euclidean norm of the gradient over all parameters.
        grads: gradient of the loss by logical name.
    """

    loss: float
    grad_norm: float
    grads: dict[str, np.ndarray]


class ReferenceRun:
    """Trains a model step by step."""

    def __init__(
        self,
        model: nn.Cell,
        loader: Loader,
        schedule: Schedule,
        optim: OptimConfig,
        decayed: set[str],
        resets: DocumentResets = NO_RESETS,
        seed: int = 0,
    ) -> None:
        """Join the parts; ``model`` has its initial values, ``decayed`` names what decays; dropout's seed."""
        self._seed = seed
        self.model = model
        self._loader, self._schedule, self._optim, self._decayed = loader, schedule, optim, decayed
        self._trainable = [p for p in model.get_parameters() if p.requires_grad]
        self._names = {id(p): name for name, p in model.parameters_and_names()}
        self._moments = {id(p): (np.zeros(p.shape), np.zeros(p.shape)) for p in self._trainable}
        self._loss_sum = kernels.CrossEntropySum()
        self._num_steps = 0
        self._resets = resets

    def steps(self, count: int, batch_size: Callable[[int], int]) -> Iterator[ReferenceStep]:
        """Make ``count`` steps; ``batch_size`` maps the samples consumed before a step to its own."""
        consumed = 0
        for _ in range(count):
            batch = self._loader.batch(consumed, batch_size(consumed))
            consumed += len(batch.labels)
            loss, grads = self._loss_and_grads(batch)
            norm = float(np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in grads)))
            clip = self._optim.clip_norm
            self._update(grads, clip / norm if 0 < clip < norm else 1.0)
            names = [self._names[id(p)] for p in self._trainable]
            yield ReferenceStep(loss, norm, dict(zip(names, grads, strict=True)))

    def parameters(self) -> dict[str, np.ndarray]:
        """Current parameters by logical name."""
        return {name: param.asnumpy().copy() for name, param in self.model.parameters_and_names()}

    def _set_dropout_position(self, batch: Batch) -> None:
        state = getattr(self.model, "dropout_state", None)
        if state is not None:
            numbers = batch.sample_numbers.tolist()
            state.set_position(seed=self._seed, step=self._num_steps, sample_numbers=numbers)

    def _loss_and_grads(self, batch: Batch) -> tuple[float, list[np.ndarray]]:
        self._set_dropout_position(batch)
        valid = max(1, int((batch.labels != IGNORED_LABEL).sum()))

        arguments = self._resets.arguments(batch.document_starts)
        extra = {name: Tensor(array) for name, array in arguments.items()}

        def loss(ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.model(ids, **extra)
            return self._loss_sum(logits.reshape((-1, logits.shape[-1])), labels) / valid

        value, grads = ms.value_and_grad(loss, None, self._trainable)(
            Tensor(batch.input_ids), Tensor(batch.labels.reshape(-1))
        )
        return float(value.asnumpy()), [grad.asnumpy().copy() for grad in grads]

    def _update(self, grads: list[np.ndarray], scale: float) -> None:
        lr = self._schedule(self._num_steps)
        self._num_steps += 1
        for param, grad in zip(self._trainable, grads, strict=True):
            values = param.asnumpy().astype(np.float64)
            if self._names[id(param)] in self._decayed:
                values -= lr * self._optim.weight_decay * values
            direction = self._direction(param, grad.astype(np.float64) * scale)
            param.set_data(Tensor((values - lr * direction).astype(np.float32)))

    def _direction(self, param: Parameter, grad: np.ndarray) -> np.ndarray:
        if self._optim.kind == "sgd":
            return grad
        beta1, beta2, step = self._optim.beta1, self._optim.beta2, self._num_steps
        mean, square = self._moments[id(param)]
        mean[...] = beta1 * mean + (1 - beta1) * grad
        square[...] = beta2 * square + (1 - beta2) * grad**2
        return (mean / (1 - beta1**step)) / (np.sqrt(square / (1 - beta2**step)) + self._optim.eps)
