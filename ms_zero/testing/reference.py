"""Plain single-process training, written without buckets, shards or collectives.

It shares only the model, the initial values, the data order and the learning rate of an update with the
engines that are compared to it. Gradients come from MindSpore's public ``value_and_grad``; the optimizer is
numpy in float64 on fp32 master weights.

In fp32 the gradient is that of the whole global batch at once. Training in 16 bits is defined by where it
rounds, and gradients are rounded once for each microbatch: there the reference goes through microbatches of
the same size as the run that is compared and adds them up in float64. Its working copies are made here;
only what the model's Cells compute in (`ms_zero.precision.autocast`) is shared.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_zero import kernels
from ms_zero.config import OptimConfig, PrecisionConfig
from ms_zero.data import IGNORED_LABEL, NO_RESETS, Batch, DocumentResets, Loader
from ms_zero.models import take_loads
from ms_zero.optim.schedule import Schedule


@dataclass(frozen=True)
class ReferenceStep:
    """What one step of plain training gives.

    Attributes:
        loss: mean over the valid tokens, in nats.
        grad_norm: Euclidean norm of the gradient over all parameters; not finite in a skipped step.
        grads: gradient of the loss by logical name.
        scale: what the loss was multiplied by.
    """

    loss: float
    grad_norm: float
    grads: dict[str, np.ndarray]
    scale: float


@dataclass(frozen=True)
class Half:
    """Training in 16 bits.

    Attributes:
        dtype: "bf16" or "fp16": of the stored weights.
        wide: names of parameters that are computed with in fp32.
        micro_batch_size: samples whose gradient is rounded as one.
    """

    dtype: str
    wide: frozenset[str]
    micro_batch_size: int

    def working(self, name: str, master: np.ndarray) -> np.ndarray:
        """What is computed with: the stored weight; bf16, for which the CPU has no kernels, as fp32."""
        stored = _round(master, self.dtype)
        return stored.astype(np.float16) if self.dtype == "fp16" and name not in self.wide else stored

    def gradient(self, name: str, grad: np.ndarray) -> np.ndarray:
        """A gradient as it is delivered.

        fp16 kernels have rounded it already. MindSpore converts it to the dtype that the Parameter first had,
        fp32, before it adds the parts of a shared one; that sum is not rounded again.
        """
        is_rounded = self.dtype == "fp16" or name in self.wide
        return grad if is_rounded else _round(grad, self.dtype)


def _round(values: np.ndarray, dtype: str) -> np.ndarray:
    """fp32 values rounded to the nearest even ones of a 16-bit dtype."""
    if dtype == "fp16":
        with np.errstate(over="ignore"):
            return values.astype(np.float16).astype(np.float32)
    bits = values.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isfinite(values), rounded.view(np.float32), values)


class PlainScale:
    """The loss scale of a run, as the DeepSpeed and Megatron sources count."""

    def __init__(self, precision: PrecisionConfig) -> None:
        """Start as configured."""
        self._config = precision
        self.value = 1.0 if precision.loss_scale == "none" else precision.initial_scale
        self._patience = 1 if precision.loss_scale_convention == "torch" else precision.hysteresis
        self._hysteresis, self._step, self._last_overflow = self._patience, 0, -1

    def follow(self, finite: bool) -> None:
        """Record the outcome of a step."""
        if self._config.loss_scale == "dynamic":
            if finite:
                self._grow()
            else:
                self._fall()
            self._step += 1

    def _grow(self) -> None:
        clean = self._step - self._last_overflow
        if self._config.loss_scale_convention == "deepspeed":
            clean -= 1
        if clean > 0 and clean % self._config.growth_interval == 0:
            self.value *= 2
            self._hysteresis = self._patience

    def _fall(self) -> None:
        self._last_overflow = self._step
        if self._hysteresis > 1:
            self._hysteresis -= 1
        else:
            self.value = max(self.value / 2, self._config.min_scale)


class ReferenceRun:
    """Trains a model step by step."""

    def __init__(
        self,
        model: nn.Cell,
        loader: Loader,
        schedule: Schedule,
        optim: OptimConfig,
        decayed: set[str],
        *,
        resets: DocumentResets = NO_RESETS,
        seed: int = 0,
        half: Half | None = None,
        scale: PlainScale | None = None,
        bias_speed: float = 0.0,
    ) -> None:
        """Join the parts.

        Args:
            model: with its initial values, and under autocast for training in 16 bits.
            loader: training samples.
            schedule: learning rate of an update.
            optim: the optimizer.
            decayed: names of the parameters that decay.
            resets: what restarts where a document begins.
            seed: of dropout.
            half: training in 16 bits; None: in fp32.
            scale: of the loss; None: 1.
            bias_speed: what the bias of an expert moves by in a step.
        """
        self.model = model
        self._loader, self._schedule, self._optim, self._decayed = loader, schedule, optim, decayed
        self._resets, self._seed, self._half, self._scale = resets, seed, half, scale
        self._bias_speed = bias_speed
        self._params = dict(model.parameters_and_names())
        self._trained = [name for name, param in self._params.items() if param.requires_grad]
        self._masters = {name: param.asnumpy().copy() for name, param in self._params.items()}
        self._moments = {name: (np.zeros(p.shape), np.zeros(p.shape)) for name, p in self._params.items()}
        self._loss_sum = kernels.CrossEntropySum()
        self._num_steps = self._num_updates = 0
        if half is not None:
            self._show(self._params)

    def steps(self, count: int, batch_size: Callable[[int], int]) -> Iterator[ReferenceStep]:
        """Make ``count`` steps; ``batch_size`` maps the samples consumed before a step to its own."""
        consumed = 0
        for _ in range(count):
            batch = self._loader.batch(consumed, batch_size(consumed))
            consumed += len(batch.labels)
            yield self._step(batch)

    def parameters(self) -> dict[str, np.ndarray]:
        """Current parameters by logical name: master weights, and of frozen parameters what is stored."""
        frozen = self._params.keys() - set(self._trained)
        stored = {name: self._params[name].asnumpy().astype(np.float32) for name in frozen}
        return {**{name: values.copy() for name, values in self._masters.items()}, **stored}

    def _step(self, batch: Batch) -> ReferenceStep:
        scale = 1.0 if self._scale is None else self._scale.value
        loss, grads = self._loss_and_grads(batch, scale)
        norm = float(np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in grads.values())))
        is_finite = bool(np.isfinite(norm))
        if is_finite:
            clip = self._optim.clip_norm
            self._update(grads, clip / norm if 0 < clip < norm else 1.0)
        self._move_biases(is_finite)
        if self._scale is not None:
            self._scale.follow(is_finite)
        self._num_steps += 1
        return ReferenceStep(loss, norm, {name: g.astype(np.float32) for name, g in grads.items()}, scale)

    def _loss_and_grads(self, batch: Batch, scale: float) -> tuple[float, dict[str, np.ndarray]]:
        valid = max(1, int((batch.labels != IGNORED_LABEL).sum()))
        size = len(batch.labels) if self._half is None else self._half.micro_batch_size
        total, sums = 0.0, {name: np.zeros(self._params[name].shape) for name in self._trained}
        for start in range(0, len(batch.labels), size):
            rows = (None if part is None else part[start : start + size] for part in batch)
            loss, grads = self._backward(Batch(*rows), np.float32(scale / valid))
            total += loss
            for name, grad in grads.items():
                sums[name] += grad
        return total / valid, {name: grad / scale for name, grad in sums.items()}

    def _backward(self, batch: Batch, weight: np.float32) -> tuple[float, dict[str, np.ndarray]]:
        """Summed token loss of some samples, and the gradient of ``weight`` times it."""
        self._set_dropout_position(batch)
        arguments = self._resets.arguments(batch.document_starts)
        valid = Tensor((batch.labels != IGNORED_LABEL).sum(axis=1).astype(np.float32))
        extra = {name: Tensor(array) for name, array in arguments.items()}

        def weighted(ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            result = self.model(ids, **extra)
            logits, aux = result if isinstance(result, tuple) else (result, None)
            loss = self._loss_sum(logits.reshape((-1, logits.shape[-1])), labels)
            if aux is not None:  # of each sequence, once for each of its tokens
                loss = loss + (aux * valid).sum()
            return loss * Tensor(weight), loss

        params = [self._params[name] for name in self._trained]
        (_, loss), grads = ms.value_and_grad(weighted, None, params, has_aux=True)(
            Tensor(batch.input_ids), Tensor(batch.labels.reshape(-1))
        )
        arrays = {name: grad.asnumpy().copy() for name, grad in zip(self._trained, grads, strict=True)}
        if self._half is not None:
            arrays = {name: self._half.gradient(name, array) for name, array in arrays.items()}
        return float(loss.asnumpy()), arrays

    def _set_dropout_position(self, batch: Batch) -> None:
        state = getattr(self.model, "dropout_state", None)
        if state is not None:
            numbers = batch.sample_numbers.tolist()
            state.set_position(seed=self._seed, step=self._num_steps, sample_numbers=numbers)

    def _move_biases(self, is_applied: bool) -> None:
        """Experts with less than the mean load of the batch become more likely, the others less."""
        for name, load in take_loads(self.model).items():
            if is_applied:
                direction = np.sign(load.mean() - load)
                self._masters[name] = (self._masters[name] + self._bias_speed * direction).astype(np.float32)
                self._params[name].data = Tensor(self._masters[name])

    def _update(self, grads: dict[str, np.ndarray], clip_scale: float) -> None:
        lr = self._schedule(self._num_updates)
        self._num_updates += 1
        for name, grad in grads.items():
            values = self._masters[name].astype(np.float64)
            if name in self._decayed:
                values -= lr * self._optim.weight_decay * values
            direction = self._direction(name, grad * clip_scale)
            self._masters[name] = (values - lr * direction).astype(np.float32)
        self._show(grads)

    def _show(self, names: Iterable[str]) -> None:
        """Set parameters to what is computed with."""
        for name in names:
            values = self._masters[name]
            if self._half is not None:
                values = self._half.working(name, values)
            self._params[name].data = Tensor(values)

    def _direction(self, name: str, grad: np.ndarray) -> np.ndarray:
        if self._optim.kind == "sgd":
            return grad
        beta1, beta2, step = self._optim.beta1, self._optim.beta2, self._num_updates
        mean, square = self._moments[name]
        mean[...] = beta1 * mean + (1 - beta1) * grad
        square[...] = beta2 * square + (1 - beta2) * grad**2
        return (mean / (1 - beta1**step)) / (np.sqrt(square / (1 - beta2**step)) + self._optim.eps)
