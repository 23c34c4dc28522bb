"""Causal attention of some queries to one block of keys after the other, without gradients of its own.

What context parallelism is made of: queries stay where they are, blocks of keys and values come by. The
result so far is a weighted mean of values with the logarithm of its weights' sum; a further block is merged
into it exactly (Milakov and Gimelshein 2018; Liu et al. 2023, Ring Attention, arXiv:2310.01889). The gradient
of a block needs the final result and log sums only, so blocks may come in any order and from anywhere.

Buffers are linear in the sequence: the native CPU kernel works on tiles as `CausalAttention` does, the form
of MindSpore's operators (other targets; not run on an NPU or a GPU) on a few queries and a whole block of
keys. PyNative only.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import mindspore as ms
from mindspore import Tensor, ops

from ms_zero.kernels import cpu
from ms_zero.kernels.dispatch import select

# Queries that the form of operators works on at once.
_ROWS = 64
# exp() of it is 0, and it can be subtracted from itself.
_LOWEST = -1e30


@dataclass(frozen=True)
class Where:
    """Where a block of queries and one of keys lie in their sequence.

    Attributes:
        queries: int32 [Tq], positions, ascending.
        keys: int32 [Tk], positions, ascending.
        starts: int32 [B, Tq], the first position that each query may attend to; None: 0.
    """

    queries: Tensor
    keys: Tensor
    starts: Tensor | None = None


@dataclass(frozen=True)
class Attended:
    """What queries got of the keys that they have met.

    Attributes:
        out: fp32 [B, Tq, H, D]; 0 for a query that has seen no key.
        log_sums: fp32 [B, H, Tq], log of the sum of exp(scale q k); +inf without a key.
    """

    out: Tensor
    log_sums: Tensor


@dataclass(frozen=True)
class BlockGradients:
    """Gradients so far, fp32: `q` [B, Tq, H, D], `k` and `v` [B, Tk, Hkv, D]."""

    q: Tensor
    k: Tensor
    v: Tensor


class _Implementation(Protocol):
    def add(
        self, attended: Attended, q: Tensor, k: Tensor, v: Tensor, where: Where, scale: float
    ) -> Attended: ...

    def add_gradients(
        self,
        grads: BlockGradients,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        result: Attended,
        where: Where,
        scale: float,
    ) -> BlockGradients: ...


class BlockAttention:
    """softmax(scale q k^T, masked to visible keys) v, one block of keys at a time; see the module.

    A query sees the keys from its start to its own position. q [B, Tq, H, D], k and v [B, Tk, Hkv, D] as in
    `CausalAttention`, one dtype.
    """

    def __init__(self, scale: float, target: str | None = None) -> None:
        self.scale = scale
        implementations = {"CPU": _Native, "CPU-portable": _Composed, "GPU": _Composed, "Ascend": _Composed}
        self._implementation: _Implementation = select("BlockAttention", implementations, target)()

    def begin(self, q: Tensor) -> Attended:
        """The result of queries that have met no key."""
        batch, length, heads, _ = q.shape
        nothing = ops.zeros((batch, heads, length), ms.float32) + float("inf")
        return Attended(ops.zeros(q.shape, ms.float32), nothing)

    def add(self, attended: Attended, q: Tensor, k: Tensor, v: Tensor, where: Where) -> Attended:
        """The result with a further block of keys; `attended` is used up (overwritten where that helps)."""
        return self._implementation.add(attended, q, k, v, where, self.scale)

    def add_gradients(
        self,
        grads: BlockGradients,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        result: Attended,
        where: Where,
    ) -> BlockGradients:
        """Gradients with what the queries and a block of keys give each other; `grads` is used up.

        Args:
            grads: so far.
            q: the queries.
            k: the block's keys.
            v: its values.
            dout: gradient of the result, of the dtype of q.
            result: of the queries and all keys; its `out` is of the dtype of q.
            where: positions.
        """
        return self._implementation.add_gradients(grads, q, k, v, dout, result, where, self.scale)


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    batch, length, heads, head_dim = q.shape
    assert k.shape[0] == batch and k.shape[3] == head_dim and heads % k.shape[2] == 0, (q.shape, k.shape)
    return batch, length, k.shape[1], heads, k.shape[2], head_dim


class _Native:
    """ops/attention/cpu, in place."""

    def add(
        self, attended: Attended, q: Tensor, k: Tensor, v: Tensor, where: Where, scale: float
    ) -> Attended:
        code, places = cpu.dtype_code(q), (where.queries, where.keys, where.starts)
        results = attended.out, attended.log_sums
        cpu.call("msz_attention_block", q, k, v, code, *places, *results, *_sizes(q, k), scale)
        return attended

    def add_gradients(
        self,
        grads: BlockGradients,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        result: Attended,
        where: Where,
        scale: float,
    ) -> BlockGradients:
        given = q, k, v, result.out, dout, cpu.dtype_code(q), where.queries, where.keys, where.starts
        sums = grads.q, grads.k, grads.v
        cpu.call("msz_attention_block_grad", *given, result.log_sums, *sums, *_sizes(q, k), scale)
        return grads


class _Composed:
    """MindSpore's operators, `_ROWS` queries at a time."""

    def add(
        self, attended: Attended, q: Tensor, k: Tensor, v: Tensor, where: Where, scale: float
    ) -> Attended:
        values, outs, sums = _by_head(v), [], []
        for tile in _tiles(q, _by_head(k), attended, where, scale):
            out, log_sums = self._merge(tile, values)
            outs.append(_unstacked(out, tile.shape))
            sums.append(log_sums.reshape(q.shape[0], q.shape[2], -1))
        return Attended(ops.concat(outs, 1), ops.concat(sums, 2))

    @staticmethod
    def _merge(tile: _Tile, v: Tensor) -> tuple[Tensor, Tensor]:
        """The result and the log sums of a tile with a further block of values [B, Hkv, Tk, D]."""
        visible, log_sums, out = tile.visible, tile.log_sums, tile.out
        scores = tile.scores * visible + (1.0 - visible) * _LOWEST
        has_before = (log_sums < float("inf")).astype(ms.float32)
        before = ops.Select()(log_sums < float("inf"), log_sums, ops.zeros_like(log_sums) + _LOWEST)
        top = ops.Maximum()(ops.ReduceMax(keep_dims=True)(scores, -1), before)
        weights = ops.Exp()(scores - top) * visible
        kept = ops.Exp()(before - top) * has_before
        total = kept + ops.ReduceSum(keep_dims=True)(weights, -1)
        seen = total > 0
        safe = ops.Select()(seen, total, ops.ones_like(total))
        merged = (out * kept + ops.BatchMatMul()(weights, v)) / safe
        nothing = ops.zeros_like(total) + float("inf")
        return merged, ops.Select()(seen, top + ops.Log()(safe), nothing)

    def add_gradients(
        self,
        grads: BlockGradients,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dout: Tensor,
        result: Attended,
        where: Where,
        scale: float,
    ) -> BlockGradients:
        keys, values = _by_head(k), _by_head(v)
        dq, dk, dv = [], _by_head(grads.k), _by_head(grads.v)
        for tile in _tiles(q, keys, result, where, scale):
            visible, log_sums, given = tile.visible, tile.log_sums, _stacked(dout[:, tile.rows], k.shape[2])
            # A hidden score may be far above the log sum, and a query without keys has +inf.
            log_sums = ops.Select()(log_sums < float("inf"), log_sums, ops.zeros_like(log_sums))
            scores = (tile.scores - log_sums) * visible + (1.0 - visible) * _LOWEST
            weights = ops.Exp()(scores) * visible
            products = ops.ReduceSum(keep_dims=True)(tile.out * given, -1)
            dscores = weights * (ops.BatchMatMul(transpose_b=True)(given, values) - products) * scale
            dq.append(_unstacked(ops.BatchMatMul()(dscores, keys), tile.shape))
            dk = dk + ops.BatchMatMul(transpose_a=True)(dscores, tile.queries)
            dv = dv + ops.BatchMatMul(transpose_a=True)(weights, given)
        back = (0, 2, 1, 3)
        return BlockGradients(
            grads.q + ops.concat(dq, 1),
            ops.Transpose()(dk, back),
            ops.Transpose()(dv, back),
        )


class _Tile(NamedTuple):
    """A few queries and what belongs to them, fp32, query heads of a key head one after the other.

    Attributes:
        rows: which queries.
        shape: [B, rows, H, D].
        queries: [B, Hkv, H / Hkv rows, D].
        scores: scale q k with all keys of a block, [B, Hkv, H / Hkv rows, Tk].
        visible: 1.0 where a query sees a key; see `_visible`.
        out: the result so far, as the queries.
        log_sums: [B, Hkv, H / Hkv rows, 1].
    """

    rows: slice
    shape: tuple[int, ...]
    queries: Tensor
    scores: Tensor
    visible: Tensor
    out: Tensor
    log_sums: Tensor


def _tiles(q: Tensor, keys: Tensor, so_far: Attended, where: Where, scale: float) -> Iterator[_Tile]:
    """All queries [B, Tq, H, D], `_ROWS` at a time, with keys [B, Hkv, Tk, D]."""
    length, kv_heads = q.shape[1], keys.shape[1]
    for start in range(0, length, _ROWS):
        rows = slice(start, min(start + _ROWS, length))
        queries = _stacked(q[:, rows], kv_heads)
        yield _Tile(
            rows,
            q[:, rows].shape,
            queries,
            ops.BatchMatMul(transpose_b=True)(queries, keys) * scale,
            _visible(where, rows, q.shape[2] // kv_heads),
            _stacked(so_far.out[:, rows], kv_heads),
            _stacked_sums(so_far.log_sums[:, :, rows], kv_heads),
        )


def _by_head(x: Tensor) -> Tensor:
    """[B, T, H, D] -> fp32 [B, H, T, D]."""
    return ops.Transpose()(x.astype(ms.float32), (0, 2, 1, 3))


def _stacked(x: Tensor, kv_heads: int) -> Tensor:
    """[B, rows, H, D] -> fp32 [B, Hkv, H / Hkv rows, D]: query heads of a key head one after the other."""
    batch, _, _, head_dim = x.shape
    return _by_head(x).reshape(batch, kv_heads, -1, head_dim)


def _unstacked(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    batch, rows, heads, head_dim = shape
    return ops.Transpose()(x.reshape(batch, heads, rows, head_dim), (0, 2, 1, 3))


def _stacked_sums(log_sums: Tensor, kv_heads: int) -> Tensor:
    """[B, H, rows] -> [B, Hkv, H / Hkv rows, 1]."""
    return log_sums.reshape(log_sums.shape[0], kv_heads, -1, 1)


def _visible(where: Where, rows: slice, copies: int) -> Tensor:
    """1.0 where a query sees a key: fp32 [B or 1, 1, copies * rows, Tk]."""
    keys = where.keys.reshape(1, 1, -1)
    seen = ops.LessEqual()(keys, where.queries[rows].reshape(1, -1, 1))
    if where.starts is not None:
        starts = where.starts[:, rows]
        seen = ops.LogicalAnd()(seen, ops.GreaterEqual()(keys, starts.reshape(*starts.shape, 1)))
    return ops.Tile()(seen.astype(ms.float32), (1, copies, 1)).expand_dims(1)
