"""GPU backend: the legacy primitives over NCCL (``mint.distributed`` has no GPU backend).

What the GPU kernels of MindSpore 2.10.0 accept (read in their sources), and what is done here:

- AllReduce, AllGather, ReduceScatter, Broadcast: float16 float32 int32 int64. bfloat16 is moved as float16
  bits (no arithmetic is done on them); it is reduced in float32 and rounded once.
- Send, Receive, AlltoAll, NeighborExchange: float16 float32 int32. int64 is moved as pairs of int32.
- There is no AlltoAllV kernel: uneven exchange is NeighborExchange, which issues one NCCL group of sends and
  receives, so no order can block. Members without rows for each other are left out.
- Ranks given to primitives are positions in the group (they go to NCCL unchanged).
- There is no Barrier kernel: a barrier is a reduction of one number that the host waits for.

Primitives are synchronous in the stream: handles are complete when returned.
"""

from __future__ import annotations

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
        """AlltoAll for equal blocks, NeighborExchange otherwise."""
        wire = _to_message(x)
        row = _numel(x.shape[1:]) * (2 if x.dtype == mstype.int64 else 1)
        if row and len({*send_counts, *recv_counts}) == 1 and send_counts[0]:
            exchange = self._primitive(
                "AlltoAll", split_count=group.size, split_dim=0, concat_dim=0, group=group.handle
            )
            out = exchange(wire)
        else:
            sends, receives = ([n * row for n in counts] for counts in (send_counts, recv_counts))
            out = self._uneven_all_to_all(wire, group, sends, receives)
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
        peer = group.ranks.index(dst_rank)
        self._primitive("Send", sr_tag=_TAG, dest_rank=peer, group=group.handle)(_to_message(x))
        return Handle(None)

    @_compat.no_grad()
    def recv(self, shape: tuple[int, ...], dtype: mstype.Type, src_rank: int, group: Group) -> Handle[Tensor]:
        """Receive (the primitive wants an input to order it; its value is not used)."""
        numel = _numel(shape) * (2 if dtype == mstype.int64 else 1)
        receive = self._primitive(
            "Receive",
            sr_tag=_TAG,
            src_rank=group.ranks.index(src_rank),
            shape=(numel,),
            dtype=_MESSAGE_DTYPES.get(dtype, dtype),
            group=group.handle,
        )
        return Handle(_from_message(receive(Tensor(0, mstype.float32)), dtype, shape))

    def barrier(self, group: Group) -> None:
        """AllReduce of one number; the host waits."""
        one = Tensor.from_numpy(np.ones(1, np.int32))
        self.all_reduce(one, group, "sum").wait().asnumpy()

    def _uneven_all_to_all(
        self, wire: Tensor, group: Group, sends: Sequence[int], receives: Sequence[int]
    ) -> Tensor:
        """Exchange ``sends[i]`` elements of the flat `wire` with member i; one's own stay here."""
        offsets = pairwise(accumulate(sends, initial=0))
        blocks = [dense(wire[a:b]) for a, b in offsets]
        targets = [i for i, n in enumerate(sends) if n and i != group.index]
        sources = [i for i, n in enumerate(receives) if n and i != group.index]
        received = {group.index: blocks[group.index]}
        if targets or sources:
            exchange = self._primitive(
                "NeighborExchange",
                send_rank_ids=targets,
                recv_rank_ids=sources,
                recv_shapes=tuple([receives[i]] for i in sources),
                send_shapes=tuple([sends[i]] for i in targets),
                recv_type=wire.dtype,
                group=group.handle,
            )
            received.update(zip(sources, exchange(tuple(blocks[i] for i in targets))))
        parts = [received[i] for i in range(group.size) if receives[i]]
        return ops.concat(parts, 0) if parts else wire[:0]

    def _primitive(self, name: str, **attributes: Any) -> Callable:
        """The primitive with these attributes; building one costs more than calling it."""
        key = (name, *((k, str(v)) for k, v in attributes.items()))
        if key not in self._cache:
            self._cache[key] = getattr(self._primitives, name)(**attributes)
        return self._cache[key]


_MESSAGE_DTYPES = {mstype.bfloat16: mstype.float16, mstype.int64: mstype.int32}


def _numel(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))


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
