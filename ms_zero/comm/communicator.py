"""The one interface to collectives."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mindspore import Tensor
from mindspore.common import dtype as mstype

from ms_zero.comm.backend import REDUCE_OPS, Backend, ReduceOp, SingleBackend
from ms_zero.comm.counters import Counters
from ms_zero.comm.group import Group
from ms_zero.comm.handle import Handle
from ms_zero.errors import UserError

DTYPES = (mstype.float32, mstype.float16, mstype.bfloat16, mstype.int32, mstype.int64)


class Communicator:
    """Collectives between the workers of a job.

    - Every method is out of place and returns new contiguous tensors. The ``*_async`` form returns a
      :class:`Handle`; the plain form is ``*_async(...).wait()``.
    - dtypes: float32, float16, bfloat16, int32, int64. dim 0 is the dimension that is gathered or split.
    - Ranks in arguments are world ranks. Results are ordered by position in the group.
    - All members of a group must issue the same collectives in the same order, and a process that is in
      several groups must interleave them in one global order.
    - Nothing is differentiable here (results are constants for autograd): see `ms_zero.comm.autograd`.
    - On CPU, reductions add in rank order, see `ms_zero.comm.mccl`; float16 and bfloat16 accumulate in
      float32 and are rounded once. Native backends pin their own order in deterministic mode.
    """

    def __init__(self, backend: Backend, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.counters = Counters()
        self._backend = backend
        self._single = SingleBackend()
        self._handles: dict[tuple[int, ...], str] = {}
        ranks = tuple(range(world_size))
        if world_size > 1:
            self._handles[ranks] = backend.world_handle()
        self.world = self.new_group(ranks, "world")

    def with_backend(self, wrap: Callable[[Backend], Backend]) -> Communicator:
        """A communicator of the same job over ``wrap(backend)``, without groups and with counters at zero."""
        return Communicator(wrap(self._backend), self.rank, self.world_size)

    def new_group(self, ranks: Sequence[int], name: str | None = None) -> Group:
        """The group of `ranks` (ascending); `name` labels it in counters and messages.

        Call it on the members only, in the same order everywhere. Groups of the same ranks share one
        framework group. Raises UserError for ranks that are not ascending, outside the world, or without
        this process.
        """
        ranks = tuple(int(r) for r in ranks)
        if list(ranks) != sorted(set(ranks)) or not ranks or ranks[0] < 0 or ranks[-1] >= self.world_size:
            raise UserError(f"group {ranks}: expected distinct ascending ranks in 0..{self.world_size - 1}")
        if self.rank not in ranks:
            raise UserError(f"group {ranks}: rank {self.rank} is not a member; only members create a group")
        if ranks not in self._handles:
            self._handles[ranks] = self._backend.create_group(ranks) if len(ranks) > 1 else ""
        label = name or "ranks_" + "_".join(map(str, ranks))
        return Group(label, ranks, ranks.index(self.rank), self._handles[ranks])

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp = "sum") -> Tensor:
        """Reduce `x` over the members; same shape. `op`: sum, avg (floating point only), max, min, prod."""
        return self.all_reduce_async(x, group, op).wait()

    def all_reduce_async(self, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle[Tensor]:
        """Asynchronous :meth:`all_reduce`."""
        self._check(x, group, "all_reduce")
        _check_reduce_op(op, x)
        self._count("all_reduce", group, 2 * (group.size - 1) * x.nbytes // group.size)
        return self._backend_of(group).all_reduce(x, group, op)

    def all_gather(self, x: Tensor, group: Group) -> Tensor:
        """Concatenate the members' tensors (same shape everywhere) along dim 0: [d, ...] -> [N d, ...]."""
        return self.all_gather_async(x, group).wait()

    def all_gather_async(self, x: Tensor, group: Group) -> Handle[Tensor]:
        """Asynchronous :meth:`all_gather`."""
        self._check(x, group, "all_gather", min_ndim=1)
        self._count("all_gather", group, (group.size - 1) * x.nbytes)
        return self._backend_of(group).all_gather(x, group)

    def reduce_scatter(self, x: Tensor, group: Group, op: ReduceOp = "sum") -> Tensor:
        """Reduce over the members and keep one's own block of dim 0: [N d, ...] -> [d, ...]."""
        return self.reduce_scatter_async(x, group, op).wait()

    def reduce_scatter_async(self, x: Tensor, group: Group, op: ReduceOp = "sum") -> Handle[Tensor]:
        """Asynchronous :meth:`reduce_scatter`."""
        self._check(x, group, "reduce_scatter", min_ndim=1)
        _check_reduce_op(op, x)
        _check_divisible(x, group, "reduce_scatter")
        self._count("reduce_scatter", group, (group.size - 1) * x.nbytes // group.size)
        return self._backend_of(group).reduce_scatter(x, group, op)

    def all_to_all(
        self,
        x: Tensor,
        group: Group,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
    ) -> Tensor:
        """Send block i of the rows of `x` to member i and concatenate what the members sent here.

        Without counts, blocks are equal: [N d, ...] -> [N d, ...]. With counts, ``send_counts[i]`` rows go to
        member i and ``recv_counts[i]`` rows come from it (zero is allowed); member j's
        ``send_counts[i]`` must be member i's ``recv_counts[j]``.
        """
        return self.all_to_all_async(x, group, send_counts, recv_counts).wait()

    def all_to_all_async(
        self,
        x: Tensor,
        group: Group,
        send_counts: Sequence[int] | None = None,
        recv_counts: Sequence[int] | None = None,
    ) -> Handle[Tensor]:
        """Asynchronous :meth:`all_to_all`."""
        self._check(x, group, "all_to_all", min_ndim=1)
        send_counts, recv_counts = _all_to_all_counts(x, group, send_counts, recv_counts)
        row_bytes = x.nbytes // x.shape[0] if x.shape[0] else 0
        self._count("all_to_all", group, (sum(send_counts) - send_counts[group.index]) * row_bytes)
        return self._backend_of(group).all_to_all(x, group, send_counts, recv_counts)

    def broadcast(self, x: Tensor, src_rank: int, group: Group) -> Tensor:
        """The tensor of `src_rank`; elsewhere `x` only gives shape and dtype."""
        return self.broadcast_async(x, src_rank, group).wait()

    def broadcast_async(self, x: Tensor, src_rank: int, group: Group) -> Handle[Tensor]:
        """Asynchronous :meth:`broadcast`."""
        self._check(x, group, "broadcast")
        _check_member(src_rank, group, "broadcast")
        sent = x.nbytes if src_rank == self.rank and group.size > 1 else 0
        self._count("broadcast", group, sent)
        return self._backend_of(group).broadcast(x, src_rank, group)

    def send(self, x: Tensor, dst_rank: int, group: Group) -> None:
        """Send `x` to `dst_rank`, which calls :meth:`recv` with the same shape and dtype.

        When two ranks exchange messages on a device, one must send first and the other receive first (or use
        the asynchronous forms); on CPU sends are buffered.
        """
        self.send_async(x, dst_rank, group).wait()

    def send_async(self, x: Tensor, dst_rank: int, group: Group) -> Handle[None]:
        """Asynchronous :meth:`send`."""
        self._check(x, group, "send")
        self._check_peer(dst_rank, group, "send")
        self._count("send", group, x.nbytes)
        return self._backend_of(group).send(x, dst_rank, group)

    def recv(self, shape: Sequence[int], dtype: mstype.Type, src_rank: int, group: Group) -> Tensor:
        """Receive a tensor of the given shape and dtype from `src_rank`."""
        return self.recv_async(shape, dtype, src_rank, group).wait()

    def recv_async(
        self, shape: Sequence[int], dtype: mstype.Type, src_rank: int, group: Group
    ) -> Handle[Tensor]:
        """Asynchronous :meth:`recv`."""
        self._check_group(group, "recv")
        _check_dtype(dtype, "recv")
        self._check_peer(src_rank, group, "recv")
        self._count("recv", group, 0)
        return self._backend_of(group).recv(tuple(int(d) for d in shape), dtype, src_rank, group)

    def barrier(self, group: Group | None = None) -> None:
        """Return when all members (default: everybody) have called it."""
        group = group or self.world
        self._check_group(group, "barrier")
        self._count("barrier", group, 0)
        self._backend_of(group).barrier(group)

    def exchange(self, obj: Any, group: Group | None = None) -> list[Any]:
        """Every member's object, in group order. Objects travel as JSON (tuples become lists, no pickle).

        If one member's object is not JSON, all members raise ValueError naming it.
        """
        group = group or self.world
        self._check_group(group, "exchange")
        payload = _encode(obj)
        backend = self._backend_of(group)
        lengths = backend.all_gather(_to_tensor(np.array([payload.size], np.int32)), group).wait().asnumpy()
        padded = np.zeros(int(lengths.max()), np.int32)
        padded[: payload.size] = payload
        rows = backend.all_gather(_to_tensor(padded), group).wait().asnumpy().reshape(group.size, -1)
        self._count("exchange", group, (group.size - 1) * payload.nbytes)
        return [_decode(row[: int(n)], r) for row, n, r in zip(rows, lengths, group.ranks)]

    def broadcast_object(self, obj: Any, src_rank: int, group: Group | None = None) -> Any:
        """The object of `src_rank` (JSON, see :meth:`exchange`); `obj` is ignored elsewhere."""
        group = group or self.world
        self._check_group(group, "broadcast_object")
        _check_member(src_rank, group, "broadcast_object")
        is_source = src_rank == self.rank
        payload = _encode(obj) if is_source else np.zeros(0, np.int32)
        backend = self._backend_of(group)
        length = backend.broadcast(_to_tensor(np.array([payload.size], np.int32)), src_rank, group).wait()
        data = payload if is_source else np.zeros(int(length.asnumpy()[0]), np.int32)
        received = backend.broadcast(_to_tensor(data), src_rank, group).wait().asnumpy()
        self._count("broadcast_object", group, payload.nbytes if group.size > 1 else 0)
        return _decode(received, src_rank)

    def _backend_of(self, group: Group) -> Backend:
        return self._backend if group.size > 1 else self._single

    def _count(self, op: str, group: Group, num_bytes: int) -> None:
        self.counters.record(op, group.name, num_bytes)

    def _check(self, x: Tensor, group: Group, op: str, min_ndim: int = 0) -> None:
        self._check_group(group, op)
        if not isinstance(x, Tensor):
            raise UserError(f"{op} on group {group.name}: expected a Tensor, got {type(x).__name__}")
        _check_dtype(x.dtype, op)
        if x.ndim < min_ndim:
            raise UserError(f"{op} on group {group.name}: expected at least {min_ndim} dim, got a scalar")

    def _check_group(self, group: Group, op: str) -> None:
        if not isinstance(group, Group):
            raise UserError(f"{op}: expected a Group, got {type(group).__name__}")
        if group.ranks[group.index] != self.rank:
            raise UserError(
                f"{op}: group {group.name} {group.ranks} was made by rank {group.ranks[group.index]}, "
                f"this is rank {self.rank}"
            )

    def _check_peer(self, rank: int, group: Group, op: str) -> None:
        _check_member(rank, group, op)
        if rank == self.rank:
            raise UserError(f"{op} on group {group.name}: rank {rank} is this process itself")


def _check_member(rank: int, group: Group, op: str) -> None:
    if rank not in group.ranks:
        raise UserError(f"{op}: rank {rank} is not in group {group.name} {group.ranks}")


def _check_dtype(dtype: mstype.Type, op: str) -> None:
    if dtype not in DTYPES:
        expected = ", ".join(map(str, DTYPES))
        raise UserError(f"{op}: dtype {dtype} is not supported; expected one of {expected}")


def _check_reduce_op(op: str, x: Tensor) -> None:
    if op not in REDUCE_OPS:
        raise UserError(f"reduction {op!r} is unknown; expected one of {', '.join(REDUCE_OPS)}")
    if op == "avg" and x.dtype in (mstype.int32, mstype.int64):
        raise UserError(f"reduction 'avg' expects a floating-point tensor, got {x.dtype}; use 'sum'")


def _check_divisible(x: Tensor, group: Group, op: str) -> None:
    if x.shape[0] % group.size:
        raise UserError(
            f"{op} on group {group.name}: dim 0 of {tuple(x.shape)} is not divisible by {group.size} members"
        )


def _all_to_all_counts(
    x: Tensor, group: Group, send_counts: Sequence[int] | None, recv_counts: Sequence[int] | None
) -> tuple[list[int], list[int]]:
    if send_counts is None and recv_counts is None:
        _check_divisible(x, group, "all_to_all")
        even = [x.shape[0] // group.size] * group.size
        return even, even
    if send_counts is None or recv_counts is None:
        raise UserError("all_to_all: give both send_counts and recv_counts, or neither")
    send_counts, recv_counts = ([int(n) for n in counts] for counts in (send_counts, recv_counts))
    for label, counts in (("send_counts", send_counts), ("recv_counts", recv_counts)):
        if len(counts) != group.size or min(counts) < 0:
            raise UserError(f"all_to_all: {label} {counts} must be {group.size} numbers of at least 0")
    if sum(send_counts) != x.shape[0]:
        raise UserError(f"all_to_all: send_counts {send_counts} must add up to dim 0 of {tuple(x.shape)}")
    if send_counts[group.index] != recv_counts[group.index]:
        raise UserError(
            f"all_to_all: this member sends {send_counts[group.index]} rows to itself but expects "
            f"{recv_counts[group.index]}"
        )
    return send_counts, recv_counts


def _to_tensor(array: np.ndarray) -> Tensor:
    return Tensor.from_numpy(array)


def _encode(obj: Any) -> np.ndarray:
    """JSON bytes, padded with blanks to whole int32 (the integer type that every backend moves)."""
    try:
        text = json.dumps({"value": obj})
    except (TypeError, ValueError) as error:
        text = json.dumps({"error": str(error)})
    data = text.encode("ascii")
    return np.frombuffer(data + b" " * (-len(data) % 4), np.int32)


def _decode(payload: np.ndarray, rank: int) -> Any:
    message = json.loads(payload.tobytes())
    if "error" in message:
        raise ValueError(f"the object of rank {rank} cannot be sent as JSON: {message['error']}")
    return message["value"]
