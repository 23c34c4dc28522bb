"""Gradients of microbatches and ranks, joined inside a graph."""

from collections.abc import Sequence
from math import prod

from mindspore import ParameterTuple, Tensor, nn, ops


class MicrobatchGradients(nn.Cell):
    """The gradients that Pipeline and GradAccumulation have added up, taken and set back to zero.

    MindSpore's compiler finds the sums by the name of their parameters ("accu_grads.<parameter>"). This
    stands for `mindspore.parallel.nn.PipelineGradReducer`, whose construct refers to an undefined name
    without a parallel optimizer (2.10.0).

    Args:
        params: all trained parameters of the model.
        sharded: whether the optimizer is sharded (hsdp): then what backward returns is the sum.
    """

    def __init__(self, params: ParameterTuple, *, sharded: bool) -> None:
        super().__init__(auto_prefix=False)
        self.accu_grads = params.clone(prefix="accu_grads", init="zeros")
        self.sharded = sharded
        self.assign, self.zeros_like = ops.Assign(), ops.ZerosLike()

    def construct(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the sums; grads: what backward gave."""
        taken = ()
        for index in range(len(self.accu_grads)):
            kept = self.accu_grads[index]
            if self.sharded:
                total = grads[index]
            else:
                total = ops.depend(kept, grads[index]) * 1.0  # a value of its own, before it is cleared
            kept = ops.depend(kept, total)
            taken = (*taken, ops.depend(total, self.assign(kept, self.zeros_like(kept))))
        return taken


class SameGradients(nn.Cell):
    """Nothing to join."""

    def construct(self, grads: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the gradients."""
        return grads


class SumOverRanks(nn.Cell):
    """Sums tensors over a group of ranks, in buckets, by the AllReduce of graphs (all targets).

    Args:
        group: the framework's name of the group.
        shapes: of the tensors.
        bucket_elements: a bucket is closed before it would exceed this.
    """

    def __init__(self, group: str, shapes: Sequence[tuple[int, ...]], bucket_elements: int) -> None:
        super().__init__(auto_prefix=False)
        self.reduce, self.concat = ops.AllReduce(group=group), ops.Concat()
        self.shapes = tuple(tuple(shape) for shape in shapes)
        self.buckets = plan_buckets([prod(shape) for shape in shapes], bucket_elements)

    def construct(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the sums. Collectives are issued in the order of the tensors on every rank."""
        sums = ()
        previous = tensors[0]
        for first, last in self.buckets:
            parts = ()
            for index in range(first, last):
                parts = (*parts, tensors[index].reshape((-1,)))
            # A chain: nothing else orders independent collectives of one group.
            flat = ops.depend(self.concat(parts) if len(parts) > 1 else parts[0], previous)
            flat = self.reduce(flat)
            previous, start = flat, 0
            for index in range(first, last):
                stop = start + prod_of(self.shapes[index])
                sums = (*sums, flat[start:stop].reshape(self.shapes[index]))
                start = stop
        return sums


def prod_of(shape: tuple[int, ...]) -> int:
    """Elements of a shape; in graphs, where ``math.prod`` is unknown."""
    size = 1
    for extent in shape:
        size = size * extent
    return size


def plan_buckets(sizes: Sequence[int], limit: int) -> tuple[tuple[int, int], ...]:
    """Ranges [first, last) of consecutive tensors with at most ``limit`` elements, or one tensor."""
    buckets, first, total = [], 0, 0
    for index, size in enumerate(sizes):
        if index > first and total + size > limit:
            buckets.append((first, index))
            first, total = index, 0
        total += size
    return (*buckets, (first, len(sizes)))
