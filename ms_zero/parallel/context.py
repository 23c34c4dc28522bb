"""Context parallelism: each rank of a group computes some of the tokens of every sample.

Only attention looks at other tokens. Two ways to let it:

- ring: queries stay, blocks of keys and values pass from rank to rank (Liu et al. 2023, arXiv:2310.01889),
  and the partial results are merged exactly by their log sums. A causal query at the end of the sample sees
  more than one at its beginning, so rank r of c holds the chunks r and 2c-1-r of 2c (zigzag): then every rank
  computes the same in every turn. Backward goes round once more; the gradient of each block follows it.
- Ulysses (Jacobs et al. 2023, arXiv:2309.14509): all-to-all exchanges turn tokens of all heads into all
  tokens of some heads and back. Rank r holds the chunk r of c. With fewer key-value heads than ranks, several
  ranks get the same one.

What each sends, see :func:`ms_zero.plan.traffic.context_bytes`. Buffers are linear in the sequence in both.
Everything outside of attention works on its own tokens; gradients of parameters are partial sums over the
group, which belongs to the ranks that reduce them. PyNative only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_zero import kernels
from ms_zero._compat import function_class
from ms_zero.comm import Communicator, Group, Handle
from ms_zero.comm.autograd import copy_to_group
from ms_zero.errors import UserError

#: Ranges [start, stop) of a sample's tokens, ascending.
Spans = tuple[tuple[int, int], ...]


def zigzag_spans(length: int, degree: int, index: int) -> Spans:
    """The tokens of rank `index` in the ring's order: chunks `index` and 2 degree - 1 - index of 2 degree.

    Raises:
        UserError: 2 degree does not divide the length.
    """
    if degree == 1:
        return ((0, length),)
    size = _part(length, 2 * degree, "2 x ")
    late = 2 * degree - 1 - index
    return (index * size, (index + 1) * size), (late * size, (late + 1) * size)


def even_spans(length: int, degree: int, index: int) -> Spans:
    """The tokens of rank `index` in Ulysses' order: the chunk `index` of `degree`.

    Raises:
        UserError: the degree does not divide the length.
    """
    size = _part(length, degree, "")
    return ((index * size, (index + 1) * size),)


def _part(length: int, parts: int, factor: str) -> int:
    size, rest = divmod(length, parts)
    if rest:
        raise UserError(
            f"context parallelism: {factor}the number of ranks, {parts}, does not divide a sample of "
            f"{length} tokens: pad it to a multiple"
        )
    return size


def cut_spans(spans: Spans, start: int, stop: int) -> Spans:
    """The ranges of the tokens start ... stop-1 among those of `spans`, which is one after the other."""
    found, before = [], 0
    for first, last in spans:
        low, high = max(start - before, 0), min(stop - before, last - first)
        if low < high:
            found.append((first + low, first + high))
        before += last - first
    return tuple(found)


def positions_of(spans: Spans) -> np.ndarray:
    """Positions of the tokens of ranges, int32."""
    return np.concatenate([np.arange(start, stop, dtype=np.int32) for start, stop in spans])


@dataclass(frozen=True)
class ContextPart:
    """Which tokens of each sample this rank has.

    Attributes:
        comm: the communicator.
        group: the context-parallel ranks.
        method: "ring" or "ulysses".
    """

    comm: Communicator
    group: Group
    method: str = "ring"

    def spans(self, length: int, index: int | None = None) -> Spans:
        """Its ranges of a sample of `length` tokens; `index`: those of another rank of the group."""
        spans_of = zigzag_spans if self.method == "ring" else even_spans
        return spans_of(length, self.group.size, self.group.index if index is None else index)

    def own(self, tokens: np.ndarray) -> np.ndarray:
        """[B, T, ...], something for each token of a sample -> those of this rank."""
        return np.concatenate([tokens[:, start:stop] for start, stop in self.spans(tokens.shape[1])], 1)


@dataclass(frozen=True)
class JoinedSamples:
    """Whole samples on each rank, for what depends on all of their tokens but is small (routers)."""

    part: ContextPart

    def gather(self, part: Tensor) -> np.ndarray:
        """[B, T / c, ...] of each rank -> [B, T, ...], outside of autograd."""
        degree = self.part.group.size
        pieces = self.part.comm.all_gather(part, self.part.group).asnumpy().reshape(degree, *part.shape)
        whole = np.empty((part.shape[0], degree * part.shape[1], *part.shape[2:]), pieces.dtype)
        for index, piece in enumerate(pieces):
            self._put(whole, piece, index)
        return whole

    def own(self, whole: np.ndarray) -> np.ndarray:
        """[B, T, ...] -> this rank's tokens, [B, T / c, ...]."""
        return self.part.own(whole)

    def place(self, part: np.ndarray) -> np.ndarray:
        """This rank's tokens -> [B, T, ...], zero for those of others."""
        shape = (part.shape[0], self.part.group.size * part.shape[1], *part.shape[2:])
        whole = np.zeros(shape, part.dtype)
        self._put(whole, part, self.part.group.index)
        return whole

    def total(self, numbers: np.ndarray) -> np.ndarray:
        """The sum over the ranks."""
        return self.part.comm.all_reduce(Tensor(numbers), self.part.group).asnumpy()

    def whole(self, part: Tensor) -> Tensor:
        """[B, T / c, ...] of each rank -> [B, T, ...]; the gradient of this rank's tokens goes to `part`."""
        return _Join.apply(part, self)

    def mine(self, whole: Tensor) -> Tensor:
        """[B, T, ...] -> this rank's tokens, [B, T / c, ...]."""
        return ops.gather(whole, Tensor(positions_of(self.part.spans(whole.shape[1]))), 1)

    def shared(self, x: Tensor) -> Tensor:
        """`x`, which all ranks have alike; its gradients are summed over them."""
        return copy_to_group(x, self.part.comm, self.part.group)

    def _put(self, whole: np.ndarray, piece: np.ndarray, index: int) -> None:
        at = 0
        for start, stop in self.part.spans(whole.shape[1], index):
            whole[:, start:stop] = piece[:, at : at + stop - start]
            at += stop - start


class _Join(function_class):
    @staticmethod
    def forward(ctx: Any, part: Tensor, joined: JoinedSamples) -> Tensor:
        group, ctx.joined = joined.part.group, joined
        length = group.size * part.shape[1]
        places = [positions_of(joined.part.spans(length, index)) for index in range(group.size)]
        pieces = joined.part.comm.all_gather(_dense(part), group).reshape(group.size, *part.shape)
        in_order_of_ranks = ops.concat(tuple(pieces), 1)
        order = np.argsort(np.concatenate(places)).astype(np.int32)
        return ops.gather(in_order_of_ranks, Tensor(order), 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.joined.mine(grad), None


def cut_context(model: nn.Cell, part: ContextPart) -> None:
    """Let a model compute some of the tokens of every sample, in place.

    Its input_ids and position_ids (to be given always) then are those of :meth:`ContextPart.own`;
    document_starts stay those of the whole samples, int32 [B, T].

    Args:
        model: its attention is done by `kernels.CausalAttention`, with masks of `kernels.DocumentMask`.
        part: what this rank has; with one rank in the group the model stays as it is.

    Raises:
        UserError: the model has no such attention.
    """
    if part.group.size == 1:
        return
    cores = [cell for _, cell in model.cells_and_names() if isinstance(cell, kernels.CausalAttention)]
    if not cores:
        raise UserError(
            f"context parallelism: {type(model).__name__} has no kernels.CausalAttention: build its "
            f"attention of that"
        )
    for core in cores:
        core.attention = _attention(core, part)
    if part.method == "ring":
        for _, cell in model.cells_and_names():
            if isinstance(cell, kernels.DocumentMask):
                cell.mask = _OwnStarts(part)


def _attention(core: kernels.CausalAttention, part: ContextPart) -> nn.Cell:
    if part.method == "ring":
        return RingAttention(core.scale, part, core.target)
    return UlyssesAttention(core.attention, part)


class _OwnStarts(nn.Cell):
    """Document starts of whole samples -> those of the queries that this rank has."""

    def __init__(self, part: ContextPart) -> None:
        super().__init__()
        self.part, self.gather = part, ops.Gather()
        self.indices: dict[int, Tensor] = {}

    def construct(self, document_starts: Tensor, x: Tensor) -> Tensor:
        length = document_starts.shape[1]
        if length not in self.indices:
            self.indices[length] = Tensor(positions_of(self.part.spans(length)))
        return self.gather(document_starts, self.indices[length], 1)


# Ring


class RingAttention(nn.Cell):
    """Causal attention of this rank's queries to the keys and values of all ranks.

    Kept for backward: q, k, v and the output of the own tokens, one fp32 number for each query and head, and
    the document starts. Under way are two blocks of keys and values, and in backward two of their gradients,
    which travel in fp32 and are rounded once.
    """

    def __init__(self, scale: float, part: ContextPart, target: str | None = None) -> None:
        super().__init__()
        self.ring = _Ring(part, kernels.BlockAttention(scale, target), {})

    def construct(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
        """q [B, T / cp, H, D], k and v [B, T / cp, Hkv, D] in zigzag order -> [B, T / cp, H, D].

        starts: int32 [B, T / cp], the first position of the sample that each query may attend to.
        """
        return _RingFunction.apply(q, k, v, starts, self.ring)


@dataclass(frozen=True)
class _Ring:
    """Who passes blocks to whom, and what is done with one."""

    part: ContextPart
    attention: kernels.BlockAttention
    places: dict[tuple[int, int], Tensor]

    @property
    def size(self) -> int:
        return self.part.group.size

    def where(self, queries: Tensor, turn: int, starts: Tensor | None) -> kernels.Where:
        """Positions of the own queries, and of the keys that are here in a turn."""
        length, index = queries.shape[1] * self.size, self.part.group.index
        keys = self._positions(length, (index - turn) % self.size)
        return kernels.Where(self._positions(length, index), keys, starts)

    def _positions(self, length: int, index: int) -> Tensor:
        if (length, index) not in self.places:
            self.places[length, index] = Tensor(positions_of(self.part.spans(length, index)))
        return self.places[length, index]

    def pass_on(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Send tensors to the next rank; returns a function that waits for those of the rank before.

        Every second rank receives first, so that no order of blocking messages can lock the ring.
        """
        comm, group = self.part.comm, self.part.group
        after, before = (group.ranks[(group.index + step) % group.size] for step in (1, -1))
        handles: list[Handle] = []

        def send() -> list[Handle]:
            return [comm.send_async(tensor, after, group) for tensor in tensors]

        def receive() -> list[Handle]:
            return [comm.recv_async(tensor.shape, tensor.dtype, before, group) for tensor in tensors]

        if group.index % 2 == 0:
            handles += send()
            arriving = receive()
        else:
            arriving = receive()
            handles += send()

        def wait() -> list[Tensor]:
            arrived = [handle.wait() for handle in arriving]
            for handle in handles:
                handle.wait()
            return arrived

        return wait

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(turn, keys, values), the own ones first; the next ones are on their way meanwhile."""
        block = [k, v]
        for turn in range(self.size):
            arriving = self.pass_on(block) if turn + 1 < self.size else None
            yield turn, *block
            if arriving is not None:
                block = arriving()


class _RingFunction(function_class):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, ring: _Ring) -> Tensor:
        q, k, v = (_dense(x) for x in (q, k, v))
        attended = ring.attention.begin(q)
        for turn, keys, values in ring.blocks(k, v):
            attended = ring.attention.add(attended, q, keys, values, ring.where(q, turn, starts))
        out = attended.out.astype(q.dtype)
        ctx.save_for_backward(q, k, v, out, attended.log_sums, *([] if starts is None else [starts]))
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums, *starts = ctx.saved_tensors
        ring, result, dout = ctx.ring, kernels.Attended(out, log_sums), _dense(grad)
        dq, home, travelling = _zeros(q), (_zeros(k), _zeros(v)), (_zeros(k), _zeros(v))
        for turn, keys, values in ring.blocks(k, v):
            # The gradient of a block starts where the block arrives first, and follows it; the own one stays.
            if turn > 1:
                travelling = ring.pass_on(travelling)()
            grads = kernels.BlockGradients(dq, *(travelling if turn else home))
            where = ring.where(q, turn, starts[0] if starts else None)
            grads = ring.attention.add_gradients(grads, q, keys, values, dout, result, where)
            dq = grads.q
            if turn:
                travelling = grads.k, grads.v
            else:
                home = grads.k, grads.v
        if ring.size > 1:
            home = [own + arrived for own, arrived in zip(home, ring.pass_on(travelling)(), strict=True)]
        return dq.astype(q.dtype), home[0].astype(k.dtype), home[1].astype(v.dtype), None, None


def _zeros(x: Tensor) -> Tensor:
    return ops.zeros(x.shape, ms.float32)


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


# Ulysses


class UlyssesAttention(nn.Cell):
    """Causal attention of all queries for some of the heads, between two exchanges of all ranks."""

    def __init__(self, attention: nn.Cell, part: ContextPart) -> None:
        """`attention`: (q, k, v, mask) -> result, over whole samples."""
        super().__init__()
        self.attention, self.part = attention, part

    def construct(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """q [B, T / cp, H, D], k and v [B, T / cp, Hkv, D] -> [B, T / cp, H, D]; mask: of the whole samples.

        Raises:
            UserError: cp does not divide H, or neither divides Hkv nor is a multiple of it.
        """
        comm, group = self.part.comm, self.part.group
        _check_heads(q.shape[2], k.shape[2], group.size)
        q, k, v = (_ToHeads.apply(x, comm, group) for x in (q, k, v))
        return _ToTokens.apply(self.attention(q, k, v, mask), comm, group)


def _check_heads(heads: int, kv_heads: int, degree: int) -> None:
    if heads % degree or (kv_heads % degree and degree % kv_heads):
        raise UserError(
            f"context parallelism: {heads} heads and {kv_heads} key-value heads cannot be shared between "
            f"{degree} ranks: cp must divide the heads, and divide the key-value heads or be a multiple of "
            f"them; or use the ring"
        )


class _ToHeads(function_class):
    """[B, T / c, H, D] -> [B, T, max(1, H / c), D]; with H < c several ranks get the same head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, group: Group) -> Tensor:
        ctx.comm, ctx.group, ctx.heads = comm, group, x.shape[2]
        return _tokens_to_heads(_copied(x, group.size), comm, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        grad = _heads_to_tokens(grad, ctx.comm, ctx.group)
        copies = grad.shape[2] // ctx.heads
        if copies > 1:
            batch, length, _, head_dim = grad.shape
            wide = grad.astype(ms.float32).reshape(batch, length, ctx.heads, copies, head_dim)
            grad = ops.ReduceSum()(wide, 3).astype(grad.dtype)
        return grad, None, None


class _ToTokens(function_class):
    """[B, T, H / c, D] -> [B, T / c, H, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator, group: Group) -> Tensor:
        ctx.comm, ctx.group = comm, group
        return _heads_to_tokens(x, comm, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _tokens_to_heads(grad, ctx.comm, ctx.group), None, None


def _copied(x: Tensor, degree: int) -> Tensor:
    """Each head so often that every rank gets one."""
    heads = x.shape[2]
    if heads % degree == 0:
        return x
    indices = Tensor(np.repeat(np.arange(heads, dtype=np.int32), degree // heads))
    return ops.Gather()(x, indices, 2)


def _tokens_to_heads(x: Tensor, comm: Communicator, group: Group) -> Tensor:
    batch, length, heads, head_dim = x.shape
    by_receiver = ops.Transpose()(x, (2, 0, 1, 3))
    by_sender = comm.all_to_all(_dense(by_receiver), group)
    mine = heads // group.size
    by_sender = by_sender.reshape(group.size, mine, batch, length, head_dim)
    return ops.Transpose()(by_sender, (2, 0, 3, 1, 4)).reshape(batch, -1, mine, head_dim)


def _heads_to_tokens(x: Tensor, comm: Communicator, group: Group) -> Tensor:
    batch, length, mine, head_dim = x.shape
    part = length // group.size
    by_receiver = ops.Transpose()(x.reshape(batch, group.size, part, mine, head_dim), (1, 3, 0, 2, 4))
    rows = _dense(by_receiver).reshape(group.size * mine, batch, part, head_dim)
    return _dense(ops.Transpose()(comm.all_to_all(rows, group), (1, 2, 0, 3)))
