"""Ascend backend: the native collectives of ``mint.distributed`` over HCCL.

Outputs are fresh tensors, inputs are made dense first (see `dense`). Operations are issued asynchronously;
`Handle.wait` makes later computation wait. The order of summation is HCCL's (fixed in deterministic mode).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from mindspore import Tensor, communication, mint
from mindspore.common import dtype as mstype
from mindspore.mint import distributed

from ms_zero import _compat
from ms_zero.comm.backend import ReduceOp, copy_tensor, dense, divide
from ms_zero.comm.group import Group
from ms_zero.comm.handle import Handle


def group_name(ranks: Sequence[int]) -> str:
    """Framework name of the group of `ranks`: the same on all members."""
    digest = hashlib.sha256(",".join(map(str, ranks)).encode()).hexdigest()[:16]
    return f"ms_zero_{len(ranks)}_{digest}"


class HCCLBackend:
    """See the module docstring. `dist` and `create_group` are replaced by tests that record calls."""

    def __init__(
        self, dist: ModuleType | Any = distributed, create_group: Any = communication.create_group
    ) -> None:
        self._dist = dist
        self._create_group = create_group

    def world_handle(self) -> str:
        """Framework name of the world group."""
        return _compat.world_group_name()

    def create_group(self, ranks: Sequence[int]) -> str:
        """Create an HCCL communicator."""
        name = group_name(ranks)
        self._create_group(name, list(ranks))
        return name

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp) -> Handle[Tensor]:
        """In place on a copy. HCCL has no average: sum, then divide."""
        out = copy_tensor(x)
        native = self._dist.all_reduce(out, op=_native_op(op), group=group.handle, async_op=True)
        return Handle(out, native, _finish(op, group))

    def all_gather(self, x: Tensor, group: Group) -> Handle[Tensor]:
        """``all_gather_into_tensor``."""
        out = _empty((x.shape[0] * group.size, *x.shape[1:]), x.dtype)
        native = self._dist.all_gather_into_tensor(out, dense(x), group=group.handle, async_op=True)
        return Handle(out, native)

    def reduce_scatter(self, x: Tensor, group: Group, op: ReduceOp) -> Handle[Tensor]:
        """``reduce_scatter_tensor``."""
        out = _empty((x.shape[0] // group.size, *x.shape[1:]), x.dtype)
        native = self._dist.reduce_scatter_tensor(
            out, dense(x), op=_native_op(op), group=group.handle, async_op=True
        )
        return Handle(out, native, _finish(op, group))

    def all_to_all(
        self, x: Tensor, group: Group, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Handle[Tensor]:
        """``all_to_all_single`` with explicit counts."""
        out = _empty((sum(recv_counts), *x.shape[1:]), x.dtype)
        native = self._dist.all_to_all_single(
            out,
            dense(x),
            output_split_sizes=list(recv_counts),
            input_split_sizes=list(send_counts),
            group=group.handle,
            async_op=True,
        )
        return Handle(out, native)

    def broadcast(self, x: Tensor, src_rank: int, group: Group) -> Handle[Tensor]:
        """In place on a copy (an empty tensor where nothing is sent)."""
        is_source = group.ranks[group.index] == src_rank
        out = copy_tensor(x) if is_source else _empty(x.shape, x.dtype)
        native = self._dist.broadcast(out, src_rank, group=group.handle, async_op=True)
        return Handle(out, native)

    def send(self, x: Tensor, dst_rank: int, group: Group) -> Handle[None]:
        """``isend``."""
        return Handle(None, self._dist.isend(dense(x), dst_rank, group=group.handle))

    def recv(self, shape: tuple[int, ...], dtype: mstype.Type, src_rank: int, group: Group) -> Handle[Tensor]:
        """``irecv``."""
        out = _empty(shape, dtype)
        return Handle(out, self._dist.irecv(out, src_rank, group=group.handle))

    def barrier(self, group: Group) -> None:
        """``barrier``."""
        self._dist.barrier(group=group.handle)


def _empty(shape: tuple[int, ...], dtype: mstype.Type) -> Tensor:
    return mint.empty(shape, dtype=dtype)


def _native_op(op: ReduceOp) -> str:
    return "sum" if op == "avg" else op


def _finish(op: ReduceOp, group: Group) -> Any:
    return (lambda total: divide(total, group.size)) if op == "avg" else None
