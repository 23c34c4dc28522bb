"""Differentiable collectives: each forward with the collective that is its exact gradient.

======================  =====================================  ======================================
function                forward                                backward
======================  =====================================  ======================================
`copy_to_group`         identity                               all_reduce (sum)
`reduce_from_group`     all_reduce (sum)                       identity
`all_gather`            all_gather along `dim`                 reduce_scatter (sum) along `dim`
`reduce_scatter`        reduce_scatter (sum) along `dim`       all_gather along `dim`
`all_to_all`            all_to_all                             all_to_all with the counts exchanged
`broadcast`             broadcast from `src_rank`              sum at `src_rank`, zero elsewhere
`ring_shift`            to the member `shift` places on        from the member `shift` places on
======================  =====================================  ======================================

`copy_to_group` and `reduce_from_group` are the f and g of Megatron-LM (arXiv:1909.08053, section 3): they
suit a loss that every member computes alike (counted once). The others are the transpose of the forward map
over the whole group, for a loss that is the sum of the members' parts.

PyNative only. Backward runs collectives too, so all members must run it, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor, ops

from ms_zero._compat import function_class
from ms_zero.comm.communicator import Communicator
from ms_zero.comm.group import Group


def copy_to_group(x: Tensor, comm: Communicator, group: Group) -> Tensor:
    """`x`, which is the same on all members; its gradient is the sum of theirs."""
    return x if group.size == 1 else _CopyToGroup.apply(x, comm, group)


def reduce_from_group(x: Tensor, comm: Communicator, group: Group) -> Tensor:
    """The sum of the members' partial results; each member's gradient is that of the sum."""
    return x if group.size == 1 else _ReduceFromGroup.apply(x, comm, group)


def all_gather(x: Tensor, comm: Communicator, group: Group, dim: int = 0) -> Tensor:
    """Concatenate the members' tensors along `dim`."""
    return x if group.size == 1 else _AllGather.apply(x, comm, group, dim)


def reduce_scatter(x: Tensor, comm: Communicator, group: Group, dim: int = 0) -> Tensor:
    """Sum over the members and keep one's own block of `dim` (which must divide)."""
    return x if group.size == 1 else _ReduceScatter.apply(x, comm, group, dim)


def all_to_all(
    x: Tensor,
    comm: Communicator,
    group: Group,
    send_counts: Sequence[int] | None = None,
    recv_counts: Sequence[int] | None = None,
) -> Tensor:
    """Exchange blocks of rows (dim 0), see :meth:`Communicator.all_to_all`."""
    return x if group.size == 1 else _AllToAll.apply(x, comm, group, send_counts, recv_counts)


def broadcast(x: Tensor, src_rank: int, comm: Communicator, group: Group) -> Tensor:
    """The tensor of `src_rank`; elsewhere `x` gives shape and dtype and gets a zero gradient."""
    return x if group.size == 1 else _Broadcast.apply(x, src_rank, comm, group)


def ring_shift(x: Tensor, comm: Communicator, group: Group, shift: int = 1) -> Tensor:
    """Send `x` to the member `shift` places after this one (cyclic) and return what arrives.

    All members pass the same shape, dtype and `shift`.
    """
    return x if shift % group.size == 0 else _RingShift.apply(x, comm, group, shift)


class _CopyToGroup(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, group: Group) -> Tensor:
        ctx.comm, ctx.group = comm, group
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return ctx.comm.all_reduce(grad, ctx.group), None, None


class _ReduceFromGroup(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, group: Group) -> Tensor:
        return comm.all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return grad, None, None


class _AllGather(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, group: Group, dim: int) -> Tensor:
        ctx.comm, ctx.group, ctx.dim = comm, group, dim
        return _gather_along(x, comm, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _reduce_scatter_along(grad, ctx.comm, ctx.group, ctx.dim), None, None, None


class _ReduceScatter(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, group: Group, dim: int) -> Tensor:
        ctx.comm, ctx.group, ctx.dim = comm, group, dim
        return _reduce_scatter_along(x, comm, group, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _gather_along(grad, ctx.comm, ctx.group, ctx.dim), None, None, None


class _AllToAll(function_class):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Communicator,
        group: Group,
        send_counts: Sequence[int] | None,
        recv_counts: Sequence[int] | None,
    ) -> Tensor:
        ctx.comm, ctx.group, ctx.counts = comm, group, (send_counts, recv_counts)
        return comm.all_to_all(x, group, send_counts, recv_counts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        send_counts, recv_counts = ctx.counts
        return ctx.comm.all_to_all(grad, ctx.group, recv_counts, send_counts), None, None, None, None


class _Broadcast(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src_rank: int, comm: Communicator, group: Group) -> Tensor:
        ctx.src_rank, ctx.comm, ctx.group = src_rank, comm, group
        return comm.broadcast(x, src_rank, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        total = ctx.comm.all_reduce(grad, ctx.group)
        mine = total if ctx.comm.rank == ctx.src_rank else ops.zeros_like(total)
        return mine, None, None, None


class _RingShift(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, group: Group, shift: int) -> Tensor:
        ctx.comm, ctx.group, ctx.shift = comm, group, shift
        return _shift(x, comm, group, shift)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:
        return _shift(grad, ctx.comm, ctx.group, -ctx.shift), None, None, None


def _gather_along(x: Tensor, comm: Communicator, group: Group, dim: int) -> Tensor:
    return _swap_with_front(comm.all_gather(_swap_with_front(x, dim), group), dim)


def _reduce_scatter_along(x: Tensor, comm: Communicator, group: Group, dim: int) -> Tensor:
    return _swap_with_front(comm.reduce_scatter(_swap_with_front(x, dim), group), dim)


def _swap_with_front(x: Tensor, dim: int) -> Tensor:
    """Exchange dim 0 and `dim` (its own inverse); contiguous."""
    return x if dim % x.ndim == 0 else x.swapaxes(0, dim).contiguous()


def _shift(x: Tensor, comm: Communicator, group: Group, shift: int) -> Tensor:
    """One all_to_all in which every member sends everything to one other, so that no order can block."""
    rows = x.reshape(1, -1)
    send_counts, recv_counts = [0] * group.size, [0] * group.size
    send_counts[(group.index + shift) % group.size] = 1
    recv_counts[(group.index - shift) % group.size] = 1
    return comm.all_to_all(rows, group, send_counts, recv_counts).reshape(x.shape)
