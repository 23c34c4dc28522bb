"""GPU backend: the legacy primitives over NCCL (``mint.distributed`` has no GPU backend).

What the GPU kernels of MindSpore 2.10.0 accept (read in their sources), and what is done here:

- AllReduce, AllGather, ReduceScatter, Broadcast: float16 float32 int32 int64. bfloat16 is moved as float16
  bits (no arithmetic is done on them); it is reduced in float32 and rounded once.
- Send, Receive: float16 float32 int32. int64 is moved as pairs of int32.
- all_to_all is a Send and a Receive per peer: outside of graphs AlltoAll has no kernel (a graph pass rewrites
  it) and NeighborExchange refuses to be called.
- Ranks given to primitives are positions in the group (they go to NCCL unchanged).
- There is no Barrier kernel: a barrier is a reduction of one number that the host waits for.

Primitives are synchronous in the stream: handles are complete when returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import numpy as np
from mindspore import Tensor, communication, ops
from mindspore.common import dtype as mstype
from mindspore.ops.operations import comm_ops

from ms_zero import _compat
from ms_zero.comm.backend import ReduceOp, dense, divide
from ms_zero.comm.group import Group
from ms_zero.comm.handle import Handle
from ms_zero.comm.hccl import group_name

_TAG = 0


class NCCLBackend:
    """See the module docstring. `primitives` and `create_group` are replaced by tests that record calls."""

    def __init__(
        self, primitives: ModuleType | Any = comm_ops, create_group: Any = communication.create_group
    ) -> None:
        self._primitives = primitives
        self._create_group = create_group
        self._cache: dict[tuple, Callable] = {}

    def world_handle(self) -> str:
        """Framework name of the world group."""
        return _compat.world_group_name()

    def create_group(self, ranks: Sequence[int]) -> str:
        """Create an NCCL communicator."""
        name = group_name(ranks)
        self._create_group(name, list(ranks))
        return name

    @_compat.no_grad()
    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp) -> Handle[Tensor]:
        """AllReduce. NCCL's average is not offered by the primitive: sum, then divide."""
        reduce = self._primitive("AllReduce", op="sum" if op == "avg" else op, group=group.handle)
        return Handle(_reduced(reduce, x, op, group))

    @_compat.no_grad()
    def all_gather(self, x: Tensor, group: Group) -> Handle[Tensor]:
        """AllGather."""
        out = self._primitive("AllGather", group=group.handle)(_to_wire(x))
        return Handle(_from_wire(out, x.dtype))

    @_compat.no_grad()
    def reduce_scatter(self, x: Tensor, group: Group, op: ReduceOp) -> Handle[Tensor]:
        """ReduceScatter."""
        reduce = self._primitive("ReduceScatter", op="sum" if op == "avg" else op, group=group.handle)
        return Handle(_reduced(reduce, x, op, group))

    @_compat.no_grad()
    def all_to_all(
        self, x: Tensor, group: Group, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Handle[Tensor]:
        """Pairs of members swap blocks, the lower one sending first.

        Every member goes through its peers in ascending order, so all pairs take their turn in one global
        order and none waits for a pair that waits for it.
        """
        flat = _to_message(x)
        row = _message_numel(x.shape[1:], x.dtype)
        offsets = accumulate((n * row for n in send_counts), initial=0)
        blocks = [dense(flat[a:b]) for a, b in pairwise(offsets)]
        parts = [
            blocks[i] if i == group.index else self._swap(blocks[i], recv_counts[i] * row, i, group)
            for i in range(group.size)
        ]
        parts = [part for part in parts if part.size]
        out = ops.concat(parts, 0) if parts else flat[:0]
        return Handle(_from_message(out, x.dtype, (sum(recv_counts), *x.shape[1:])))

    @_compat.no_grad()
    def broadcast(self, x: Tensor, src_rank: int, group: Group) -> Handle[Tensor]:
        """Broadcast (the primitive takes and returns tuples)."""
        root = group.ranks.index(src_rank)
        (out,) = self._primitive("Broadcast", root_rank=root, group=group.handle)((_to_wire(x),))
        return Handle(_from_wire(out, x.dtype))

    @_compat.no_grad()
    def send(self, x: Tensor, dst_rank: int, group: Group) -> Handle[None]:
        """Send."""
        self._send(_to_message(x), group.ranks.index(dst_rank), group)
        return Handle(None)

    @_compat.no_grad()
    def recv(self, shape: tuple[int, ...], dtype: mstype.Type, src_rank: int, group: Group) -> Handle[Tensor]:
        """Receive."""
        numel, wire = _message_numel(shape, dtype), _MESSAGE_DTYPES.get(dtype, dtype)
        flat = self._receive(numel, wire, group.ranks.index(src_rank), group)
        return Handle(_from_message(flat, dtype, shape))

    def barrier(self, group: Group) -> None:
        """AllReduce of one number; the host waits."""
        one = Tensor.from_numpy(np.ones(1, np.int32))
        self.all_reduce(one, group, "sum").wait().asnumpy()

    def _swap(self, block: Tensor, numel: int, peer: int, group: Group) -> Tensor:
        """Send the flat `block` to member `peer` and receive `numel` elements; what is empty is not sent."""
        if block.size and group.index < peer:
            self._send(block, peer, group)
        arrived = self._receive(numel, block.dtype, peer, group) if numel else block[:0]
        if block.size and group.index > peer:
            self._send(block, peer, group)
        return arrived

    def _send(self, flat: Tensor, peer: int, group: Group) -> None:
        self._primitive("Send", sr_tag=_TAG, dest_rank=peer, group=group.handle)(flat)

    def _receive(self, numel: int, wire: mstype.Type, peer: int, group: Group) -> Tensor:
        """Receive [numel] (the primitive wants an input to order it; its value is not used)."""
        # Not kept: the shape is part of the primitive, and uneven exchanges have ever new ones.
        receive = self._primitives.Receive(
            sr_tag=_TAG, src_rank=peer, shape=(numel,), dtype=wire, group=group.handle
        )
        return receive(Tensor(0, mstype.float32))

    def _primitive(self, name: str, **attributes: Any) -> Callable:
        """The primitive with these attributes; building one costs more than calling it."""
        key = (name, *attributes.items())
        if key not in self._cache:
            self._cache[key] = getattr(self._primitives, name)(**attributes)
        return self._cache[key]


_MESSAGE_DTYPES = {mstype.bfloat16: mstype.float16, mstype.int64: mstype.int32}


def _message_numel(shape: Sequence[int], dtype: mstype.Type) -> int:
    """Elements of a message, in its wire dtype, that carries a tensor of this shape and dtype."""
    return math.prod(shape) * (2 if dtype == mstype.int64 else 1)


def _reduced(reduce: Callable, x: Tensor, op: ReduceOp, group: Group) -> Tensor:
    wire = ops.cast(x, mstype.float32) if x.dtype == mstype.bfloat16 else dense(x)
    out = reduce(wire)
    if op == "avg":
        out = divide(out, group.size)
    return ops.cast(out, x.dtype)


def _to_wire(x: Tensor) -> Tensor:
    return dense(x).view(mstype.float16) if x.dtype == mstype.bfloat16 else dense(x)


def _from_wire(x: Tensor, dtype: mstype.Type) -> Tensor:
    return x if x.dtype == dtype else x.view(dtype)


def _to_message(x: Tensor) -> Tensor:
    flat = dense(x).reshape(-1)
    return flat.view(_MESSAGE_DTYPES[x.dtype]) if x.dtype in _MESSAGE_DTYPES else flat


def _from_message(flat: Tensor, dtype: mstype.Type, shape: Sequence[int]) -> Tensor:
    return _from_wire(flat, dtype).reshape(shape)
