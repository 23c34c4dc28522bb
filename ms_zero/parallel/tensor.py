"""Tensor parallelism: linear layers, embeddings and the loss cut between the ranks of a group.

A *region* is a part of the model that works with cut weights: its inputs are the same on all ranks, its
outputs are sums of what the ranks computed. A column-parallel layer has some of the output features, the
row-parallel layer after it the same ones of its input features; attention in between has some of the heads. A
region costs one all-reduce where it is left, and one in backward where it was entered (Shoeybi et al. 2019,
arXiv:1909.08053): two of each for a transformer layer.

How a plain model is brought into this form, see :mod:`ms_zero.parallel.styles`. PyNative only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_zero import kernels
from ms_zero._compat import device_target, function_class, host_view
from ms_zero.comm import Communicator, Group
from ms_zero.comm.autograd import copy_to_group, reduce_from_group
from ms_zero.errors import UserError
from ms_zero.parallel.placement import split_evenly


class Border(Protocol):
    """What happens where regions are entered and left, and what lies outside of them.

    Attributes:
        comm: the communicator.
        group: the tensor-parallel ranks.
        splits_sequence: whether a rank has only a part of the tokens outside.
    """

    comm: Communicator
    group: Group
    splits_sequence: bool

    def enter(self, x: Tensor) -> Tensor:
        """An activation from outside, as the region needs it."""

    def leave(self, x: Tensor) -> Tensor:
        """The sum of the ranks' partial results, as it is outside."""

    def own_tokens(self, x: Tensor) -> Tensor:
        """[..., T], one number for each token -> those of the tokens that this rank has outside."""


@dataclass(frozen=True)
class WholeSequence:
    """The border of plain tensor parallelism: outside of regions all ranks compute the same."""

    comm: Communicator
    group: Group

    splits_sequence = False

    def enter(self, x: Tensor) -> Tensor:
        """x; its gradient is summed over the ranks."""
        return copy_to_group(x, self.comm, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """The sum over the ranks."""
        return reduce_from_group(x, self.comm, self.group)

    def own_tokens(self, x: Tensor) -> Tensor:
        """x."""
        return x


def count_once(x: Tensor, group: Group) -> Tensor:
    """`x`, which all ranks compute alike inside of a region; each takes an equal share of its gradient.

    So what the ranks add up, for what entered the region and for parameters inside, has it once.
    """
    return _CountOnce.apply(x, group)


class _CountOnce(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.size = group.size
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad / ctx.size, None


class ColumnParallelLinear(nn.Cell):
    """x W^T + b with some of the output features: weight [out / tp, in], bias [out / tp]."""

    def __init__(
        self,
        weight: Parameter,
        bias: Parameter | None,
        border: Border,
        *,
        enters: bool,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`enters`: whether x comes from outside of a region."""
        super().__init__()
        self.weight, self.bias = weight, bias
        self.linear, self.activation = kernels.Linear(), activation
        self.border, self.enters = border, enters

    def construct(self, x: Tensor) -> Tensor:
        """Map x [..., in] to [..., out / tp]."""
        if self.enters:
            x = self.border.enter(x)
        y = self.linear(x, self.weight, self.bias)
        return y if self.activation is None else self.activation(y)


class RowParallelLinear(nn.Cell):
    """x W^T + b with some of the input features: weight [out, in / tp]; the bias is whole."""

    def __init__(
        self,
        weight: Parameter,
        bias: Parameter | None,
        border: Border,
        *,
        leaves: bool = True,
        activation: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """`leaves`: whether the region ends here."""
        super().__init__()
        self.weight, self.bias = weight, bias
        self.linear, self.activation = kernels.Linear(), activation
        self.bias_add = ops.BiasAdd()
        self.border, self.leaves = border, leaves

    def construct(self, x: Tensor) -> Tensor:
        """Map x [..., in / tp] to what leaves the region, [..., out], or to a partial sum of that."""
        y = self.linear(x, self.weight, None)
        if self.leaves:
            y = self.border.leave(y)
        if self.bias is not None:  # once, not once a rank
            y = self.bias_add(y.reshape(-1, y.shape[-1]), self.bias).reshape(y.shape)
        return y if self.activation is None else self.activation(y)


class VocabularyParallelEmbedding(nn.Cell):
    """Rows of a table by index, with some of the rows; an index of another rank's row contributes zero.

    `first`: number of the first row here. `total`: rows of all ranks. `name`: of the weight's attribute.
    """

    def __init__(self, weight: Parameter, border: Border, *, first: int, total: int, name: str) -> None:
        super().__init__()
        setattr(self, name, weight)
        self.name_of_weight = name
        self.embedding = kernels.Embedding()
        self.border, self.first, self.total = border, first, total

    def construct(self, indices: Tensor) -> Tensor:
        """Map int32 indices [B, T] to what leaves the region, [B, T, H].

        Raises:
            UserError: on CPU, an index outside of all rows; elsewhere it gives zeros.
        """
        _check_range("embedding: indices", indices, self.total)
        weight = getattr(self, self.name_of_weight)
        rows = indices - self.first
        inside = ops.LogicalAnd()(rows >= 0, rows < weight.shape[0])
        y = self.embedding(weight, rows * inside.astype(rows.dtype))
        return self.border.leave(y * inside.astype(y.dtype).expand_dims(-1))


class VocabularyCrossEntropySum(nn.Cell):
    """`kernels.CrossEntropySum` for logits that are cut along the vocabulary and never gathered.

    The ranks exchange, for each row, the maximum, and the sum of exponentials with the logit of the label.
    All of them return the same sum. Kept for backward: the logits, the labels and one fp32 number a row.
    """

    def __init__(self, comm: Communicator, group: Group, vocab_size: int, ignore_index: int = -100) -> None:
        """`vocab_size`: of the whole vocabulary, cut by `split_evenly`."""
        super().__init__()
        self.comm, self.group = comm, group
        self.vocab_size, self.ignore_index = vocab_size, ignore_index
        self.first, self.stop = split_evenly(vocab_size, group.size, group.index)

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Sum over the valid labels: logits [N, V / tp] of any float dtype, labels int32 [N] -> fp32 0-d.

        Raises:
            UserError: logits of another width; on CPU, a label that is neither in the vocabulary nor ignored.
        """
        if logits.shape[-1] != self.stop - self.first:
            raise UserError(
                f"loss: logits have {logits.shape[-1]} entries on this rank, {self.stop - self.first} of "
                f"{self.vocab_size} are its part: is the head cut by Column(enters=True)?"
            )
        _check_range("loss: labels", labels, self.vocab_size, self.ignore_index)
        return _CrossEntropy.apply(logits, labels, self.comm, self.group, self.first, self.ignore_index)


class _CrossEntropy(function_class):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        comm: Communicator,
        group: Group,
        first: int,
        ignore_index: int,
    ) -> Tensor:
        maxima, sums, picked = kernels.softmax_stats(logits, labels, first=first)
        top = comm.all_reduce(maxima, group, "max")
        both = comm.all_reduce(ops.stack((sums * _exp(maxima - top), picked)), group)
        log_sums = _log(both[0]) + top
        valid = ops.NotEqual()(labels, ignore_index).astype(ms.float32)
        ctx.save_for_backward(logits, labels, log_sums)
        ctx.first, ctx.ignore_index = first, ignore_index
        return ops.ReduceSum()((log_sums - both[1]) * valid)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, labels, log_sums = ctx.saved_tensors
        where = {"first": ctx.first, "ignore_index": ctx.ignore_index}
        grad = kernels.softmax_gradient(logits, labels, log_sums, grad.astype(ms.float32), **where)
        return grad, None, None, None, None, None


def _exp(x: Tensor) -> Tensor:
    return _precise(np.exp, ops.Exp(), x)


def _log(x: Tensor) -> Tensor:
    return _precise(np.log, ops.Log(), x)


def _precise(on_host: Callable, on_device: Callable, x: Tensor) -> Tensor:
    # The CPU kernels of the framework are 1e-5 off.
    if device_target() != "CPU":
        return on_device(x)
    with np.errstate(all="ignore"):  # what is not finite is found by its consequences, on all ranks alike
        return Tensor.from_numpy(on_host(host_view(x).astype(np.float64)).astype(np.float32))


def _check_range(what: str, values: Tensor, size: int, ignored: int | None = None) -> None:
    """On CPU, where looking is free."""
    if device_target() != "CPU" or not values.size:
        return
    array = host_view(values)
    wrong = (array < 0) | (array >= size)
    if ignored is not None:
        wrong &= array != ignored
    if wrong.any():
        raise UserError(
            f"{what}: {array[wrong].flat[0]} is outside of the {size} entries of the vocabulary: is the "
            f"vocabulary of the data larger than the model's?"
        )
