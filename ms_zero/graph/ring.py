"""Ring attention inside AutoParallel: blocks of keys and values pass from rank to rank of the cp axis.

The same algorithm as `ms_zero.parallel.context` (zigzag order, exact merging, gradients of blocks that follow
them), written for the compiler. `ops.Morph` lets AutoParallel see one operator with layouts; inside, each
rank has its part of the sequence and its own program:

- block of an earlier rank: all queries see its first chunk;
- own block: causal, for the order of the chunks is that of the tokens;
- block of a later rank: the queries of the second chunk see all of it.

No mask is needed but the causal one, and every turn costs the same on every rank. Messages are `AlltoAllV` of
the cp group, whose members issue the same ones in the same order: each depends on the one before.

MindSpore 2.10.0 has a ring of its own (``enable_ring_attention`` of FlashAttentionScore). It is not used: its
log announces that it goes away, it computes blocks that are masked as a whole, and it sends over the world
group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import FlashAttentionScore, FlashAttentionScoreGrad

from ms_zero.comm import Group
from ms_zero.parallel.context import positions_of, zigzag_spans

# The compressed causal mask that FlashAttentionScore takes whatever the sequence length.
FLASH_MASK_SIZE = 2048
LEFT_UP_CAUSAL = 2
# FlashAttentionScore repeats each maximum and each sum this often.
_REPEATS = 8


class RingGrid(Protocol):
    """What a ring needs to know of `ms_zero.graph.strategies.Grid`."""

    tp: int
    ring: Group | None

    def layout(self, *cuts: str | tuple[str, ...]) -> Any:
        """A tensor's layout by axis names."""


def causal_mask() -> Tensor:
    """What FlashAttentionScore takes in its causal modes."""
    return Tensor(np.triu(np.ones((FLASH_MASK_SIZE, FLASH_MASK_SIZE), np.uint8), 1))


def ring_order(length: int, degree: int) -> np.ndarray:
    """Positions of a sample's tokens in the order of a ring of `degree` ranks, each with an equal part."""
    spans = [zigzag_spans(length, degree, index) for index in range(degree)]
    return np.concatenate([positions_of(each) for each in spans])


class RingAttention(nn.Cell):
    """Causal attention [B, T, H, D] of 16-bit queries on keys and values [B, T, Hkv, D] in ring order.

    Args:
        num_heads: query heads of the whole model.
        head_dim: width of a head.
        grid: the devices; ``ring`` is the group of this rank.
    """

    def __init__(self, num_heads: int, head_dim: int, grid: RingGrid) -> None:
        super().__init__()
        group = grid.ring
        assert group is not None, "whose part of the ring?"
        self.index, self.size = group.index, group.size
        how = {"head_num": num_heads // grid.tp, "scale_value": 1.0 / math.sqrt(head_dim)}
        how["input_layout"] = "BSND"
        self.causal = FlashAttentionScore(sparse_mode=LEFT_UP_CAUSAL, **how)
        self.causal_grad = FlashAttentionScoreGrad(sparse_mode=LEFT_UP_CAUSAL, **how)
        self.attend, self.attend_grad = FlashAttentionScore(**how), FlashAttentionScoreGrad(**how)
        self.mask = causal_mask()
        self.exchange, self.exchange_back = _exchange(group, "forward"), _exchange(group, "backward")
        self.morph = ops.Morph(self.forward, _shapes, _dtypes, bprop_fn=self.backward)
        self.morph.add_prim_attr("self_define_shard", True)
        tokens, stats = grid.layout("dp", "cp", "tp", "None"), grid.layout("dp", "tp", "cp", "None")
        self.morph.shard((tokens, tokens, tokens), (tokens, stats, stats))
        back = self.backward_documents
        self.documents = ops.Morph(self.forward_documents, _shapes, _dtypes, bprop_fn=back)
        self.documents.add_prim_attr("self_define_shard", True)
        self.documents.shard((tokens, tokens, tokens, grid.layout("dp", "cp")), (tokens, stats, stats))
        self.first, self.last, self.hidden = _places(group)

    def construct(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return [B, T, H, D]; starts: int32 [B, T], the first position that each query may attend to."""
        if starts is None:
            return self.morph(q, k, v)[0]
        return self.documents(q, k, v, starts)[0]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of this rank's parts: the result, and the maxima and sums [B, H, T / cp, 8] of its softmax."""
        found = self.causal(q, k, v, None, None, None, self.mask)
        return self.go_round(q, k, v, None, found)

    def forward_documents(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same for queries that see no key before ``starts``."""
        return self.go_round(q, k, v, starts, self.seen(q, k, v, starts, 0))

    def go_round(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, found: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What the own block gave, merged with what the others give."""
        state = (ops.cast(found[3], ms.float32), found[0], found[1])
        half, block = q.shape[1] // 2, _pack(k, v)
        for turn in range(1, self.size):
            block = self.pass_on(self.exchange, block)
            keys, values = _unpack(block, k.shape)
            if turn <= self.index:
                found = self.seen(q, keys[:, :half], values[:, :half], starts, turn)
                state = _merge(state, found, self.has_seen(starts, turn))
            else:
                late = None if starts is None else starts[:, half:]
                first, second = _split(state, half)
                found = self.seen(q[:, half:], keys, values, late, turn)
                second = _merge(second, found, self.has_seen(late, turn))
                state = _join(first, second)
        return ops.cast(state[0], q.dtype), state[1], state[2]

    def seen(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, turn: int
    ) -> tuple[Tensor, ...]:
        """What queries get of the keys of a turn that they are to see."""
        if starts is None:
            return self.attend(q, k, v)
        return self.attend(q, k, v, None, None, None, self.unseen(starts, k.shape[1], turn))

    def unseen(self, starts: Tensor, num_keys: int, turn: int) -> Tensor:
        """The mask of documents, uint8 [B, 1, Tq, Tk]: 1 where a query sees no key."""
        early = ops.reshape(starts, (starts.shape[0], 1, starts.shape[1], 1))
        found = ops.less(self.first(num_keys, turn), early)
        if turn == 0:
            found = ops.logical_or(found, self.hidden(num_keys))
        return ops.cast(found, ms.uint8)

    def has_seen(self, starts: Tensor | None, turn: int) -> Tensor | None:
        """Which queries have keys in the block of a turn, bool [B, Tq]; None: all."""
        return None if starts is None else ops.less_equal(starts, self.last(starts.shape[1], turn))

    def backward(self, q: Tensor, k: Tensor, v: Tensor, out: Any, dout: Any) -> tuple[Tensor, ...]:
        """Gradients of q, k and v."""
        grads = self.causal_grad(
            q, k, v, dout[0], None, None, None, self.mask, out[1], out[2], None, out[0]
        )
        return self.go_back(q, k, v, None, out, dout[0], grads)

    def backward_documents(
        self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, out: Any, dout: Any
    ) -> tuple[Tensor, ...]:
        """The same, and zeros for what has no gradient."""
        grads = self.gradients(q, k, v, dout[0], (out[1], out[2], out[0]), starts, 0)
        dq, dk, dv = self.go_back(q, k, v, starts, out, dout[0], grads)
        return dq, dk, dv, ops.zeros_like(starts)

    def go_back(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        starts: Tensor | None,
        out: Any,
        grad: Tensor,
        found: tuple[Tensor, ...],
    ) -> tuple[Tensor, ...]:
        """Gradients; that of a block starts where the block arrives first, and follows it."""
        result, half = (out[1], out[2], out[0]), q.shape[1] // 2
        back, late_starts = self.exchange_back, None if starts is None else starts[:, half:]
        dq, home = ops.cast(found[0], ms.float32), _pack32(found[1], found[2])
        block, under_way = ops.depend(_pack(k, v), grad), home
        late = (out[1][:, :, half:], out[2][:, :, half:], out[0][:, half:])
        for turn in range(1, self.size):
            block = self.pass_on(back, block if turn == 1 else ops.depend(block, under_way))
            keys, values = _unpack(block, k.shape)
            if turn > 1:
                under_way = self.pass_on(back, ops.depend(under_way, block))
            if turn <= self.index:
                early = (keys[:, :half], values[:, :half])
                own, dk, dv = self.gradients(q, early[0], early[1], grad, result, starts, turn)
                dk, dv = _padded(dk, half, False), _padded(dv, half, False)
            else:
                given = (q[:, half:], grad[:, half:])
                own, dk, dv = self.gradients(given[0], keys, values, given[1], late, late_starts, turn)
                own = _padded(own, half, True)
            dq = dq + own
            under_way = _pack32(dk, dv) if turn == 1 else under_way + _pack32(dk, dv)
        dk, dv = _unpack(home + self.pass_on(back, ops.depend(under_way, block)), k.shape)
        return ops.cast(dq, q.dtype), ops.cast(dk, k.dtype), ops.cast(dv, v.dtype)

    def gradients(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        grad: Tensor,
        result: tuple[Tensor, ...],
        starts: Tensor | None,
        turn: int,
    ) -> tuple[Tensor, ...]:
        """fp32 gradients of queries and of the keys of a turn; result: maxima, sums, output."""
        mask = None if starts is None else self.unseen(starts, k.shape[1], turn)
        found = self.attend_grad(
            q, k, v, grad, None, None, None, mask, result[0], result[1], None, result[2]
        )
        return ops.cast(found[0], ms.float32), ops.cast(found[1], ms.float32), ops.cast(found[2], ms.float32)

    def pass_on(self, exchange: ops.Primitive, message: Tensor) -> Tensor:
        """Send a flat tensor to the next rank and return that of the rank before."""
        size, index, length = self.size, self.index, message.shape[0]
        sent = tuple(length if member == (index + 1) % size else 0 for member in range(size))
        received = tuple(length if member == (index - 1) % size else 0 for member in range(size))
        return exchange(message, sent, received)


def _exchange(group: Group, phase: str) -> ops.Primitive:
    exchange = ops.AlltoAllV(group=group.handle)
    # For those who read the graph, see `ms_zero.graph.ir`.
    exchange.add_prim_attr("ms_zero_ranks", tuple(group.ranks))
    exchange.add_prim_attr("ms_zero_phase", phase)
    return exchange


def _places(group: Group) -> tuple[Any, Any, Any]:
    """Constants by (number of keys or late queries, turn): positions of keys, the last one, what is later."""

    def positions(length: int, turn: int) -> np.ndarray:
        # Of an earlier rank only the first chunk is seen, half of its keys; of others all of them.
        index = (group.index - turn) % group.size
        is_half = 0 < turn <= group.index
        part = 2 * length if is_half else length
        spans = zigzag_spans(part * group.size, group.size, index)
        return positions_of(spans)[:length]

    def first(length: int, turn: int) -> Tensor:
        return Tensor(positions(length, turn)[None, None, None])

    def last(length: int, turn: int) -> Tensor:
        # All own queries meet half a block, half of them a whole one.
        keys = length // 2 if 0 < turn <= group.index else 2 * length
        return Tensor(np.int32(positions(keys, turn)[-1]))

    def hidden(length: int) -> Tensor:
        return Tensor(np.triu(np.ones((1, 1, length, length), bool), 1))

    return ms.constexpr(first), ms.constexpr(last), ms.constexpr(hidden)


def _shapes(
    q: Sequence[int], k: Sequence[int], v: Sequence[int], starts: Sequence[int] | None = None
) -> tuple[Sequence[int], ...]:
    stats = [q[0], q[2], q[1], _REPEATS]
    return q, stats, stats


def _dtypes(q: ms.Type, k: ms.Type, v: ms.Type, starts: ms.Type | None = None) -> tuple[ms.Type, ...]:
    return q, ms.float32, ms.float32


def _pack(k: Tensor, v: Tensor) -> Tensor:
    return ops.concat((ops.reshape(k, (-1,)), ops.reshape(v, (-1,))))


def _pack32(k: Tensor, v: Tensor) -> Tensor:
    return _pack(ops.cast(k, ms.float32), ops.cast(v, ms.float32))


def _unpack(block: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    size = shape[0] * shape[1] * shape[2] * shape[3]
    return ops.reshape(block[:size], shape), ops.reshape(block[size:], shape)


def _merge(
    state: tuple[Tensor, ...], found: tuple[Tensor, ...], has_seen: Tensor | None
) -> tuple[Tensor, ...]:
    """Output, maxima and sums with those of further keys, exactly (Milakov and Gimelshein 2018).

    What the operator says of a query without a key (not in ``has_seen``) is not looked at.
    """
    maxima, sums, more = found[0], found[1], ops.cast(found[3], ms.float32)
    if has_seen is not None:
        batch, length = has_seen.shape
        by_head = ops.reshape(has_seen, (batch, 1, length, 1))
        maxima = ops.select(ops.broadcast_to(by_head, maxima.shape), maxima, state[1])
        sums = ops.select(ops.broadcast_to(by_head, sums.shape), sums, ops.zeros_like(sums))
        by_row = ops.reshape(has_seen, (batch, length, 1, 1))
        more = ops.select(ops.broadcast_to(by_row, more.shape), more, ops.zeros_like(more))
    top = ops.maximum(state[1], maxima)
    old, new = ops.exp(state[1] - top) * state[2], ops.exp(maxima - top) * sums
    total = old + new
    return state[0] * _by_row(old / total) + more * _by_row(new / total), top, total


def _by_row(stats: Tensor) -> Tensor:
    """[B, H, T, 8] with equal values in the last dim -> [B, T, H, 1]."""
    return ops.transpose(stats[:, :, :, :1], (0, 2, 1, 3))


def _split(state: tuple[Tensor, ...], half: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    out, maxima, sums = state
    first = (out[:, :half], maxima[:, :, :half], sums[:, :, :half])
    return first, (out[:, half:], maxima[:, :, half:], sums[:, :, half:])


def _join(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    out = ops.concat((first[0], second[0]), 1)
    return out, ops.concat((first[1], second[1]), 2), ops.concat((first[2], second[2]), 2)


def _padded(x: Tensor, rows: int, before: bool) -> Tensor:
    """x [B, T, H, D] with rows of zeros before or behind."""
    zeros = ops.zeros((x.shape[0], rows, x.shape[2], x.shape[3]), x.dtype)
    return ops.concat((zeros, x) if before else (x, zeros), 1)
