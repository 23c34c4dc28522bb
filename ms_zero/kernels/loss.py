"""Token losses over the vocabulary.

Kept for backward by the native CPU kernel, for logits [N, V]: logits (N V, of their dtype), labels (N, int32)
and the logarithm of each row's sum (N, fp32). The gradient of the logits is the only other tensor of their
size.
"""

from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_zero._compat import function_class
from ms_zero.errors import UserError
from ms_zero.kernels import cpu
from ms_zero.kernels.dispatch import select
from ms_zero.kernels.eager import EagerOrGraph
from ms_zero.kernels.saved import Saved


class _CrossEntropyFunction(function_class):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int) -> Tensor:
        logits, labels = cpu.packed(logits), cpu.packed(labels)
        rows, size = logits.shape
        _check_labels(labels, rows)
        log_sums, loss = cpu.floats(rows), cpu.floats()
        code = cpu.dtype_code(logits)
        if cpu.call("msz_cross_entropy", logits, code, labels, ignore_index, rows, size, log_sums, loss):
            raise UserError(
                f"loss: a label is outside of the {size} entries of the vocabulary and not {ignore_index}, "
                f"which is ignored: labels range from {labels.min()} to {labels.max()}"
            )
        ctx.save_for_backward(logits, labels, log_sums)
        ctx.ignore_index = ignore_index
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, log_sums = ctx.saved_tensors
        return _logit_gradient(logits, labels, log_sums, grad, 0, ctx.ignore_index), None, None


def _check_labels(labels: Tensor, rows: int) -> None:
    if labels.shape != (rows,) or labels.dtype != ms.int32:
        raise UserError(f"loss: labels: expected int32 [{rows}], got {labels.dtype} {list(labels.shape)}")


def _logit_gradient(
    logits: Tensor, labels: Tensor, log_sums: Tensor, grad: Tensor, first: int, ignore_index: int
) -> Tensor:
    out, (rows, size) = cpu.like(logits), logits.shape
    assert log_sums.shape == (rows,) and log_sums.dtype == ms.float32, (log_sums.shape, log_sums.dtype)
    assert grad.shape in ((), (rows,)), grad.shape
    grad = cpu.packed(grad.astype(ms.float32))
    where = cpu.dtype_code(logits), labels, ignore_index, first, rows, size
    cpu.call("msz_cross_entropy_grad", logits, *where, log_sums, grad, int(grad.ndim > 0), out)
    return out


class _CrossEntropyComposed(nn.Cell):
    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.log_softmax = ops.LogSoftmax(-1)
        self.gather = ops.GatherD()
        self.not_equal = ops.NotEqual()
        self.sum = ops.ReduceSum()

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        log_probs = self.log_softmax(logits.astype(ms.float32))
        valid = self.not_equal(labels, self.ignore_index)
        # An ignored label is read at column 0; multiplying by 0 removes its value and its gradient.
        columns = (labels * valid.astype(labels.dtype)).reshape(-1, 1)
        picked = self.gather(log_probs, 1, columns).reshape(-1)
        return self.sum(-picked * valid.astype(ms.float32))


def _cross_entropy_native(ignore_index: int) -> nn.Cell:
    def apply(logits: Tensor, labels: Tensor) -> Tensor:
        return _CrossEntropyFunction.apply(logits, labels, ignore_index)

    return EagerOrGraph(apply, _CrossEntropyComposed(ignore_index))


class CrossEntropySum(nn.Cell):
    """Sum of -log softmax(logits)[label] over the labels that are not `ignore_index`.

    logits [N, V] of any float dtype, labels int32 [N], each in [0, V) or equal to `ignore_index`; returns an
    fp32 0-d tensor, computed in fp32. Without a single valid label the sum and its gradient are exactly 0.
    Another label raises UserError in PyNative on CPU; elsewhere the result is undefined.
    """

    def __init__(self, ignore_index: int = -100, target: str | None = None) -> None:
        super().__init__()
        implementations = {
            "CPU": _cross_entropy_native,
            "CPU-portable": _CrossEntropyComposed,
            "GPU": _CrossEntropyComposed,
            "Ascend": _CrossEntropyComposed,
        }
        self.cross_entropy = select("CrossEntropySum", implementations, target)(ignore_index)

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum."""
        return self.cross_entropy(logits, labels)

    @staticmethod
    def saved_elements(rows: int, vocab_size: int) -> tuple[Saved, ...]:
        """What the native CPU kernel keeps for backward of logits [rows, vocab_size]."""
        return (
            Saved("logits", rows * vocab_size),
            Saved("labels", rows, dtype="int32"),
            Saved("log_sums", rows, dtype="fp32", role="extra"),
        )


def softmax_stats(
    logits: Tensor, labels: Tensor, *, first: int, target: str | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What one slice of the vocabulary contributes to softmax cross entropy, without gradients (PyNative).

    With M the largest maximum over the slices and S the sum over the slices of ``sums * exp(maxima - M)``,
    the loss of a row is ``log S + M - P``, P being the sum of ``picked`` over the slices, and its gradient is
    :func:`softmax_gradient` with ``log_sums = log S + M``.

    Args:
        logits: [N, V / slices], columns [first, first + V / slices) of the whole.
        labels: int32 [N], over the whole vocabulary.
        first: the slice's first column.
        target: device target; None for the current one.

    Returns:
        fp32 [N] each: ``maxima`` of the slice, ``sums`` of exp(logits - maxima), and ``picked``: the logit of
        the label, 0 where it lies in another slice.
    """
    compute = select("softmax_stats", _by_target(_stats_native, _stats_composed), target)
    return compute(logits, labels, first)


def _by_target(native: Callable, composed: Callable) -> dict[str, Callable]:
    return {"CPU": native, **dict.fromkeys(("CPU-portable", "GPU", "Ascend"), composed)}


def _stats_native(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    logits, labels = cpu.packed(logits), cpu.packed(labels)
    rows, size = logits.shape
    _check_labels(labels, rows)
    results = cpu.floats(rows), cpu.floats(rows), cpu.floats(rows)
    cpu.call("msz_softmax_stats", logits, cpu.dtype_code(logits), labels, first, rows, size, *results)
    return results


def _stats_composed(logits: Tensor, labels: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.astype(ms.float32)
    maxima = ops.ReduceMax(keep_dims=True)(logits, -1)
    sums = ops.ReduceSum()(ops.Exp()(logits - maxima), -1)
    columns, inside = _columns(labels, first, logits.shape[1])
    picked = ops.GatherD()(logits, 1, columns).reshape(-1) * inside
    return maxima.reshape(-1), sums, picked


def _columns(labels: Tensor, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Column of each label in the slice (0 where it lies outside), and 1.0 where it lies inside."""
    columns = labels - first
    inside = ops.LogicalAnd()(columns >= 0, columns < size)
    return (columns * inside.astype(ms.int32)).reshape(-1, 1), inside.astype(ms.float32)


def softmax_gradient(
    logits: Tensor,
    labels: Tensor,
    log_sums: Tensor,
    grad: Tensor,
    *,
    first: int,
    ignore_index: int = -100,
    target: str | None = None,
) -> Tensor:
    """``grad * (exp(logits - log_sums) - [label])`` for one slice; see :func:`softmax_stats`.

    log_sums fp32 [N]: of the whole rows. grad: fp32, 0-d or [N]. Rows labelled `ignore_index` get 0. Returns
    [N, V / slices] of the dtype of `logits`.
    """
    compute = select("softmax_gradient", _by_target(_gradient_native, _gradient_composed), target)
    return compute(logits, labels, log_sums, grad, first, ignore_index)


def _gradient_native(
    logits: Tensor, labels: Tensor, log_sums: Tensor, grad: Tensor, first: int, ignore_index: int
) -> Tensor:
    _check_labels(labels, logits.shape[0])
    tensors = [cpu.packed(each) for each in (logits, labels, log_sums)]
    return _logit_gradient(*tensors, grad, first, ignore_index)


def _gradient_composed(
    logits: Tensor, labels: Tensor, log_sums: Tensor, grad: Tensor, first: int, ignore_index: int
) -> Tensor:
    probabilities = ops.Exp()(logits.astype(ms.float32) - log_sums.reshape(-1, 1))
    columns, inside = _columns(labels, first, logits.shape[1])
    one, zero = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)
    picked = ops.OneHot()(columns.reshape(-1), logits.shape[1], one, zero) * inside.reshape(-1, 1)
    valid = ops.NotEqual()(labels, ignore_index).astype(ms.float32)
    return ((probabilities - picked) * (valid * grad).reshape(-1, 1)).astype(logits.dtype)
