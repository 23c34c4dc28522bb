"""CPU backend: every collective is composed of point-to-point messages.

The framework's CPU backend (MCCL over TCP) lacks most collectives, sums in an order that depends on where an
element lies in the buffer, and is slow on long messages. Messages in pieces of 1 MB are 2-3 times faster
than one 64 MB message, so here everything is built from ``mint.distributed.send`` and ``recv``:

- A send returns when the bytes have left; the peer's receiver thread buffers them, so each step sends first
  and then receives, which cannot deadlock. Pieces of one step are exchanged before the next is sent, which
  bounds what is buffered to one piece per peer.
- Reductions add the contributions in rank order (member 0 first), whoever owns the result. An element's
  result therefore does not depend on its position in the buffer, on the owner, or on how the caller splits
  the data into calls. float16 and bfloat16 are accumulated in float32 and rounded once.
- Memory is handled as numpy arrays that share storage with tensors (no copies, nothing recorded by
  autograd). Pieces are slices of numpy arrays, never tensor views: a tensor view as a receive buffer is
  silently not written. bfloat16 is moved as float16 bits, because numpy crashes on empty bfloat16 arrays.
- All messages use the world group: order between two ranks is the global issue order, which is the same on
  all ranks, so sub-groups need no framework group.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from mindspore import Tensor
from mindspore.common import dtype as mstype
from mindspore.mint import distributed as dist

from ms_zero import _compat
from ms_zero.comm.backend import ReduceOp
from ms_zero.comm.group import Group
from ms_zero.comm.handle import Handle

PIECE_BYTES = 1 << 20
#: Below this size all_reduce sends everything to everybody (one round of messages instead of two).
SMALL_BYTES = 1 << 14

_UFUNCS = {"sum": np.add, "avg": np.add, "max": np.maximum, "min": np.minimum, "prod": np.multiply}


class CommunicationError(RuntimeError):
    """A message did not pass."""


class MCCLBackend:
    """See the module docstring."""

    def world_handle(self) -> str:
        """Framework name of the world group."""
        return _compat.world_group_name()

    def create_group(self, ranks: Sequence[int]) -> str:
        """Messages of all groups use the world group, so nothing is created."""
        return _compat.world_group_name()

    def all_reduce(self, x: Tensor, group: Group, op: ReduceOp) -> Handle[Tensor]:
        """Small: gather all, add locally. Large: reduce-scatter, then gather; 2 (N-1)/N of the size."""
        array = _array(x)
        flat, out = array.reshape(-1), np.empty(array.size, array.dtype)
        if array.nbytes <= SMALL_BYTES:
            gathered = np.empty((group.size, flat.size), flat.dtype)
            _gather(flat, list(gathered), group)
            out[:] = _reduce_in_order(list(gathered), op, _compat.numpy_dtype(x.dtype))
        else:
            bounds = [flat.size * i // group.size for i in range(group.size + 1)]
            shards = [slice(a, b) for a, b in itertools.pairwise(bounds)]
            mine = out[shards[group.index]]
            _reduce_scatter([flat[s] for s in shards], mine, group, op, _compat.numpy_dtype(x.dtype))
            _gather(mine, [out[s] for s in shards], group)
        return Handle(_tensor(out.reshape(array.shape), x.dtype))

    def all_gather(self, x: Tensor, group: Group) -> Handle[Tensor]:
        """Each member sends its tensor to every other: (N-1)/N of the full size."""
        array = _array(x)
        out = np.empty((group.size, *array.shape), array.dtype)
        _gather(array.reshape(-1), list(out.reshape(group.size, -1)), group)
        return Handle(_tensor(out.reshape(group.size * array.shape[0], *array.shape[1:]), x.dtype))

    def reduce_scatter(self, x: Tensor, group: Group, op: ReduceOp) -> Handle[Tensor]:
        """Each block goes straight to its owner, who adds in rank order: (N-1)/N of the full size."""
        array = _array(x)
        blocks = array.reshape(group.size, -1)
        out = np.empty(blocks.shape[1], array.dtype)
        _reduce_scatter(list(blocks), out, group, op, _compat.numpy_dtype(x.dtype))
        return Handle(_tensor(out.reshape(array.shape[0] // group.size, *array.shape[1:]), x.dtype))

    def all_to_all(
        self, x: Tensor, group: Group, send_counts: Sequence[int], recv_counts: Sequence[int]
    ) -> Handle[Tensor]:
        """Blocks of rows go straight to their receivers; empty blocks are not sent."""
        array = _array(x)
        out = np.empty((sum(recv_counts), *array.shape[1:]), array.dtype)
        outgoing, incoming = _row_blocks(array, send_counts), _row_blocks(out, recv_counts)
        incoming[group.index][:] = outgoing[group.index]
        _exchange(outgoing, incoming, group)
        return Handle(_tensor(out, x.dtype))

    def broadcast(self, x: Tensor, src_rank: int, group: Group) -> Handle[Tensor]:
        """A chain from the source through the members, in pieces, so that the links work at the same time."""
        array = _array(x)
        position = (group.index - group.ranks.index(src_rank)) % group.size
        out = array.copy() if position == 0 else np.empty_like(array)
        before, after = (group.ranks[(group.index + step) % group.size] for step in (-1, 1))
        for piece in _pieces(out.reshape(-1)):
            if position > 0:
                _recv(piece, before, group)
            if position < group.size - 1:
                _send(piece, after, group)
        return Handle(_tensor(out, x.dtype))

    def send(self, x: Tensor, dst_rank: int, group: Group) -> Handle[None]:
        """Send in pieces; returns when the bytes have left (the receiver buffers them)."""
        for piece in _pieces(_array(x).reshape(-1)):
            _send(piece, dst_rank, group)
        return Handle(None)

    def recv(
        self, shape: tuple[int, ...], dtype: mstype.Type, src_rank: int, group: Group
    ) -> Handle[Tensor]:
        """Receive in the same pieces."""
        out = np.empty(shape, _wire_dtype(dtype))
        for piece in _pieces(out.reshape(-1)):
            _recv(piece, src_rank, group)
        return Handle(_tensor(out, dtype))

    def barrier(self, group: Group) -> None:
        """Gather one number from everybody."""
        _gather(np.zeros(1, np.int32), [np.empty(1, np.int32) for _ in group.ranks], group)


def _wire_dtype(dtype: mstype.Type) -> np.dtype:
    return np.dtype(np.float16) if dtype == mstype.bfloat16 else _compat.numpy_dtype(dtype)


def _array(x: Tensor) -> np.ndarray:
    """The values of `x` as a C-contiguous array in the wire dtype; shares storage when `x` is contiguous."""
    return np.ascontiguousarray(x.asnumpy()).reshape(x.shape).view(_wire_dtype(x.dtype))


def _tensor(array: np.ndarray, dtype: mstype.Type) -> Tensor:
    """A tensor that shares the storage of an array in the wire dtype."""
    return Tensor.from_numpy(array.view(_compat.numpy_dtype(dtype)))


def _send(piece: np.ndarray, rank: int, group: Group) -> None:
    with _told(f"{piece.nbytes} bytes to", rank):
        dist.send(Tensor.from_numpy(piece), rank, group=group.handle)


def _recv(piece: np.ndarray, rank: int, group: Group) -> None:
    buffer = Tensor.from_numpy(piece)
    with _told(f"{piece.nbytes} bytes from", rank):
        dist.recv(buffer, rank, group=group.handle)
        buffer.asnumpy()  # waits until the data is there when operations are queued


@contextmanager
def _told(what: str, rank: int) -> Iterator[None]:
    """Say what can be behind a message that does not pass; the framework says only that it did not."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(
            f"communication: {what} rank {rank} did not pass: it has ended (its own output says why), or is "
            f"somewhere else in the program: train.debug_collectives=true names the first call that differs"
        ) from error


def _pieces(flat: np.ndarray) -> list[np.ndarray]:
    step = max(1, PIECE_BYTES // flat.itemsize)
    return [flat[i : i + step] for i in range(0, flat.size, step)]


def _row_blocks(array: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    ends = np.cumsum([0, *counts]).tolist()
    return [array[a:b].reshape(-1) for a, b in itertools.pairwise(ends)]


def _exchange(outgoing: list[np.ndarray], incoming: list[np.ndarray], group: Group) -> None:
    """Send ``outgoing[i]`` to member i and receive ``incoming[i]`` from it, for all others, by pieces."""
    others = [(group.index + step) % group.size for step in range(1, group.size)]
    sends, receives = (
        {i: _pieces(blocks[i]) for i in others} for blocks in (outgoing, incoming)
    )
    for k in range(max((len(p) for p in (*sends.values(), *receives.values())), default=0)):
        for i in others:
            if k < len(sends[i]):
                _send(sends[i][k], group.ranks[i], group)
        for i in reversed(others):
            if k < len(receives[i]):
                _recv(receives[i][k], group.ranks[i], group)


def _gather(mine: np.ndarray, slots: list[np.ndarray], group: Group) -> None:
    """Fill ``slots[i]`` with the array of member i."""
    if not np.shares_memory(slots[group.index], mine):
        slots[group.index][:] = mine
    _exchange([mine] * group.size, slots, group)


def _reduce_scatter(
    blocks: list[np.ndarray], out: np.ndarray, group: Group, op: ReduceOp, dtype: np.dtype
) -> None:
    """Reduce ``blocks[i]`` of all members into `out` at member i, a piece at a time.

    Blocks may differ in length, by member.
    """
    step = max(1, PIECE_BYTES // out.itemsize)
    received = [np.empty(min(step, out.size), out.dtype) for _ in blocks]
    for start in range(0, max(block.size for block in blocks), step):
        part = slice(start, start + step)
        target = out[part]
        contributions = [r[: target.size] for r in received]
        _exchange([b[part] for b in blocks], contributions, group)
        if target.size:
            contributions[group.index] = blocks[group.index][part]
            target[:] = _reduce_in_order(contributions, op, dtype)


def _reduce_in_order(contributions: list[np.ndarray], op: ReduceOp, dtype: np.dtype) -> np.ndarray:
    """Member 0's contribution first, then 1, ...; 2-byte floats in float32, rounded once to `dtype`.

    Arguments and result are in the wire dtype. Overflow gives infinity, as on a device, without a warning.
    """
    wire = contributions[0].dtype
    if contributions[0].size == 0:
        return contributions[0]
    wide = np.dtype(np.float32) if dtype.itemsize == 2 else dtype
    with np.errstate(over="ignore", invalid="ignore"):
        total = contributions[0].view(dtype).astype(wide)
        for contribution in contributions[1:]:
            _UFUNCS[op](total, contribution.view(dtype).astype(wide, copy=False), out=total)
        if op == "avg":
            total /= len(contributions)
        return total.astype(dtype, copy=False).view(wire)
