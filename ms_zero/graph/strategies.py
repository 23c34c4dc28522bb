"""Twins of the models for AutoParallel: the same parameters, every operator with a shard strategy.

MindSpore's semi-automatic mode inserts the collectives that make the layouts of an operator's inputs and
outputs fit its neighbours'. Operators without a strategy get one that need not be cheap, so that the twins
are made of operators only, each of which has one. Within a pipeline stage the devices are a grid (dp, cp,
tp), ``tp`` fastest: that of `ms_zero.mesh`.

Activations are flat, [tokens, width]. Rows are cut over dp and cp, and outside of the regions of tensor
parallelism over tp as well with sequence parallelism:

    x --[gather rows]--> columns --> attention or activation --> rows of weights --[sum, scatter rows]--> x

Samples lie one behind the other, so that cutting rows over cp cuts a sequence only when a device has one
sample at a time; see :class:`Grid`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.ops.auto_generate import FlashAttentionScore, RmsNorm
from mindspore.parallel import Layout

from ms_zero.comm import Group
from ms_zero.config import GPTConfig, LlamaConfig
from ms_zero.errors import UserError
from ms_zero.graph.ring import LEFT_UP_CAUSAL, RingAttention, causal_mask, ring_order
from ms_zero.models.gpt import GPT, GPTAttention, GPTBlock
from ms_zero.models.layers import Embedding, LayerNorm, Linear, RMSNorm, name_parameters_by_path
from ms_zero.models.llama import Llama, LlamaAttention, LlamaLayer
from ms_zero.plan.compiled import is_vocabulary_cut

ContextKind = Literal["ring", "ulysses"]
_MASKED = -30000.0
_ROWS = ("dp", "cp")


@dataclass(frozen=True)
class Grid:
    """The devices of a pipeline stage and how they share a model.

    Attributes:
        dp: ranks with different samples.
        cp: ranks with different parts of a sequence.
        tp: ranks with different parts of the weights.
        sequence_parallel: whether tp cuts the rows of activations between the regions of tensor parallelism.
        context: how attention gets the keys and values of other cp ranks: "ring": block after block;
            "ulysses": each rank attends to all tokens with some of the heads.
        ring: this rank's group of cp ranks, for a ring.
        ep: ranks of dp, neighbours there, with different experts.
    """

    dp: int = 1
    cp: int = 1
    tp: int = 1
    sequence_parallel: bool = False
    context: ContextKind = "ring"
    ring: Group | None = None
    ep: int = 1

    def layout(self, *cuts: str | tuple[str, ...]) -> Layout:
        """A tensor's layout: for each dim the axes that cut it, "None" for none."""
        return Layout((self.dp, self.cp, self.tp), ("dp", "cp", "tp"))(*cuts)

    @property
    def rows(self) -> tuple[str, ...]:
        """Axes that cut the rows of activations between regions."""
        return (*_ROWS, "tp") if self.sequence_parallel and self.tp > 1 else _ROWS

    @property
    def passes_blocks(self) -> bool:
        """Whether samples are in the order of a ring, `ms_zero.graph.ring.ring_order`."""
        return self.cp > 1 and self.context == "ring"

    def positions(self, length: int) -> np.ndarray:
        """Positions of a sample's tokens in the order in which the devices share them, int32."""
        return ring_order(length, self.cp if self.passes_blocks else 1)

    def parts(self, cuts: str | tuple[str, ...]) -> int:
        """Into how many parts axes cut."""
        return math.prod(getattr(self, axis) for axis in ([cuts] if isinstance(cuts, str) else cuts))


class ColumnLinear(nn.Cell):
    """y = x W^T + b with the rows of W cut over tp: [N, in] -> [N, out], of which a rank has out / tp."""

    def __init__(self, linear: Linear, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        self.weight, self.bias, self.dtype = linear.weight, linear.bias, dtype
        self.parameter_rules = linear.parameter_rules
        _must_divide(grid.tp, linear.weight.shape[0], linear.weight.name)
        self.matmul = ops.MatMul(transpose_b=True).shard(
            (grid.layout(_ROWS, "None"), grid.layout("tp", "None"))
        )
        self.add = ops.Add().shard((grid.layout(_ROWS, "tp"), grid.layout("tp")))
        self.cast = ops.Cast()

    def construct(self, x: Tensor) -> Tensor:
        """Apply the product."""
        y = self.matmul(x, self.cast(self.weight, self.dtype))
        return y if self.bias is None else self.add(y, self.cast(self.bias, self.dtype))


class RowLinear(nn.Cell):
    """y = x W^T + b with the columns of W cut over tp: [N, in], of which a rank has in / tp -> [N, out]."""

    def __init__(self, linear: Linear, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        self.weight, self.bias, self.dtype = linear.weight, linear.bias, dtype
        self.parameter_rules = linear.parameter_rules
        _must_divide(grid.tp, linear.weight.shape[1], linear.weight.name)
        self.matmul = ops.MatMul(transpose_b=True).shard(
            (grid.layout(_ROWS, "tp"), grid.layout("None", "tp")), (grid.layout(grid.rows, "None"),)
        )
        self.add = ops.Add().shard((grid.layout(grid.rows, "None"), grid.layout("None")))
        self.cast = ops.Cast()

    def construct(self, x: Tensor) -> Tensor:
        """Apply the product."""
        y = self.matmul(x, self.cast(self.weight, self.dtype))
        return y if self.bias is None else self.add(y, self.cast(self.bias, self.dtype))


class RowNorm(nn.Cell):
    """The norm of each row, in fp32: [N, H] -> [N, H] of `dtype`, whole rows on a rank."""

    def __init__(self, norm: LayerNorm | RMSNorm, eps: float, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        self.weight, self.dtype = norm.weight, dtype
        self.parameter_rules = norm.parameter_rules
        self.bias = norm.bias if isinstance(norm, LayerNorm) else None
        rows = grid.parts(grid.rows)
        if self.bias is None:
            self.norm = RmsNorm(eps).shard(((rows, 1), (1,)))
        else:
            self.norm = ops.LayerNorm(1, 1, eps).shard(((rows, 1), (1,), (1,)))
        self.cast = ops.Cast()

    def construct(self, x: Tensor) -> Tensor:
        """Normalise."""
        x = self.cast(x, ms.float32)
        y = self.norm(x, self.weight)[0] if self.bias is None else self.norm(x, self.weight, self.bias)[0]
        return self.cast(y, self.dtype)


class EnterRegion(nn.Cell):
    """Rows as tensor parallelism wants them: one gather for all projections that read them."""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        self.enter = ops.Identity().shard((grid.layout(_ROWS, "None"),))

    def construct(self, x: Tensor) -> Tensor:
        """Return x [N, H]."""
        return self.enter(x)


class Rotary(nn.Cell):
    """x cos + rotate(x) sin: x [B, T, heads, D] with heads over tp.

    Args:
        grid: the devices.
        by_sample: whether every sample has tables of its own.
    """

    def __init__(self, grid: Grid, *, by_sample: bool = False) -> None:
        super().__init__()
        full, table = (grid.dp, grid.cp, grid.tp, 1), (grid.dp if by_sample else 1, grid.cp, 1, 1)
        self.multiply, self.add = ops.Mul().shard((full, table)), ops.Add().shard((full, full))
        self.negative, self.concat = ops.Neg().shard((full,)), ops.Concat(-1).shard((full, full))
        self.split = ops.Split(3, 2).shard((full,))

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x; cos and sin [1, T, 1, D], by sample [B, T, 1, D]."""
        first, second = self.split(x)
        rotated = self.concat((self.negative(second), first))
        return self.add(self.multiply(x, cos), self.multiply(rotated, sin))


class FlashAttention(nn.Cell):
    """Causal attention of 16-bit queries [B, T, H, D] on keys and values [B, T, Hkv, D]."""

    def __init__(self, num_heads: int, head_dim: int, grid: Grid) -> None:
        super().__init__()
        self.flash = FlashAttentionScore(
            head_num=num_heads,
            scale_value=1.0 / math.sqrt(head_dim),
            input_layout="BSND",
            sparse_mode=LEFT_UP_CAUSAL,
        )
        heads = (grid.dp, 1, grid.cp * grid.tp, 1)  # Ulysses, where there are cp ranks
        self.flash.shard((heads, heads, heads, (1, 1)))
        self.masked = FlashAttentionScore(
            head_num=num_heads, scale_value=1.0 / math.sqrt(head_dim), input_layout="BSND"
        )
        self.masked.shard((heads, heads, heads, (grid.dp, 1, 1, 1)))
        self.mask = causal_mask()

    def construct(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return [B, T, H, D]; hidden: of `DocumentMask`."""
        if hidden is None:
            return self.flash(q, k, v, None, None, None, self.mask)[3]
        return self.masked(q, k, v, None, None, None, hidden)[3]


class ProductAttention(nn.Cell):
    """Causal attention by two batched products, with the probabilities kept: for fp32, and not for long T."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, grid: Grid) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim, self.scale = num_kv_heads, head_dim, 1.0 / math.sqrt(head_dim)
        dp, cp, tp = grid.dp, grid.cp, grid.tp
        whole = (dp, tp, 1, 1)
        self.to_heads = ops.Transpose().shard(((dp, 1, tp, 1),))
        self.to_rows = ops.Transpose().shard((whole,))
        self.scores = ops.BatchMatMul(transpose_b=True).shard((whole, whole))
        self.multiply = ops.Mul().shard((whole, ()))
        self.mask_add = ops.Add().shard((whole, (1, 1, 1, 1)))
        self.softmax = ops.Softmax(-1).shard((whole,))
        self.combine = ops.BatchMatMul().shard((whole, whole))
        self.reshape = ops.Reshape()
        self.tile, self.cast = ops.Tile().shard(((dp, 1, 1, 1),)), ops.Cast()
        self.penalty = ops.Mul().shard(((dp, 1, 1, 1), ()))
        self.hide = ops.Add().shard((whole, (dp, 1, 1, 1)))
        masks: dict[tuple[int, int], Tensor] = {}

        def causal(length: int, repeats: int) -> Tensor:
            if (length, repeats) not in masks:
                mask = np.triu(np.full((length, length), _MASKED, np.float32), 1)
                masks[length, repeats] = Tensor(np.tile(mask, (repeats, 1))[None, None])
            return masks[length, repeats]

        self.causal = ms.constexpr(causal)
        assert cp == 1, cp

    def construct(self, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None = None) -> Tensor:
        """Return [B, T, H, D]; hidden: of `DocumentMask`."""
        batch, length, heads, _ = q.shape
        order = (0, 2, 1, 3)
        q, k, v = self.to_heads(q, order), self.to_heads(k, order), self.to_heads(v, order)
        # The query heads of one key-value head are stacked along time: no repeated keys and values.
        stacked = (batch, self.num_kv_heads, -1, self.head_dim)
        scores = self.multiply(self.scores(self.reshape(q, stacked), k), self.scale)
        repeats = heads // self.num_kv_heads
        if hidden is None:
            scores = self.mask_add(scores, self.causal(length, repeats))
        else:
            penalty = self.penalty(self.cast(hidden, ms.float32), _MASKED)
            scores = self.hide(scores, self.tile(penalty, (1, 1, repeats, 1)))
        out = self.combine(self.softmax(scores), v)
        return self.to_rows(self.reshape(out, (batch, heads, length, self.head_dim)), order)


class Attention(nn.Cell):
    """The attention of either family up to its last projection, of the parameters of a plain one.

    Args:
        plain: GPTAttention or LlamaAttention.
        num_heads: query heads of the whole model.
        num_kv_heads: key-value heads.
        norm_eps: of the norms of queries and keys.
        grid: the devices.
        dtype: of the computation.
    """

    def __init__(
        self,
        plain: nn.Cell,
        num_heads: int,
        num_kv_heads: int,
        norm_eps: float,
        grid: Grid,
        dtype: ms.Type,
    ) -> None:
        super().__init__()
        head_dim = plain.head_dim
        heads_per_rank(num_heads, num_kv_heads, grid)
        self.q_shape, self.kv_shape = (num_heads, head_dim), (num_kv_heads, head_dim)
        self.enter = EnterRegion(grid)
        self.q_proj = ColumnLinear(plain.q_proj, grid, dtype)
        self.k_proj = ColumnLinear(plain.k_proj, grid, dtype)
        self.v_proj = ColumnLinear(plain.v_proj, grid, dtype)
        self.has_norms = getattr(plain, "q_norm", None) is not None
        if self.has_norms:
            self.q_norm = HeadNorm(plain.q_norm, norm_eps, grid, dtype)
            self.k_norm = HeadNorm(plain.k_norm, norm_eps, grid, dtype)
        self.rotary, self.rotary_by_sample = Rotary(grid), Rotary(grid, by_sample=True)
        if grid.passes_blocks:
            self.attention = RingAttention(num_heads, head_dim, grid)
        elif dtype == ms.float32:
            self.attention = ProductAttention(num_heads, num_kv_heads, head_dim, grid)
        else:
            self.attention = FlashAttention(num_heads, head_dim, grid)
        self.reshape = ops.Reshape()

    def heads(
        self,
        x: Tensor,
        shape: tuple[int, int],
        cos: Tensor | None,
        sin: Tensor | None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Map x [B T, H] to [B T, heads D].

        Args:
            x: rows of all samples.
            shape: (B, T).
            cos: [1, T, 1, D], [B, T, 1, D] with positions of its own for each sample, None: no rotation.
            sin: as `cos`.
            hidden: of `DocumentMask`; None: a sample is one text.
        """
        q, k, v = self.projected(x, shape, cos, sin)
        return self.joined(self.attention(q, k, v, hidden), shape)

    def projected(
        self, x: Tensor, shape: tuple[int, int], cos: Tensor | None, sin: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, T, heads, D] of x [B T, H]."""
        x = self.enter(x)
        q = self.reshape(self.q_proj(x), shape + self.q_shape)
        k = self.reshape(self.k_proj(x), shape + self.kv_shape)
        v = self.reshape(self.v_proj(x), shape + self.kv_shape)
        if self.has_norms:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos is not None:
            rotary = self.rotary if cos.shape[0] == 1 else self.rotary_by_sample
            q, k = rotary(q, cos, sin), rotary(k, cos, sin)
        return q, k, v

    def joined(self, out: Tensor, shape: tuple[int, int]) -> Tensor:
        """Map what attention returns, [B, T, heads, D], to [B T, heads D]."""
        return self.reshape(out, (shape[0] * shape[1], self.q_shape[0] * self.q_shape[1]))


class ShardedGPTAttention(Attention):
    """Of the parameters of a GPTAttention."""

    def __init__(self, plain: GPTAttention, num_heads: int, grid: Grid, dtype: ms.Type) -> None:
        super().__init__(plain, num_heads, num_heads, 0.0, grid, dtype)
        self.c_proj = RowLinear(plain.c_proj, grid, dtype)

    def construct(
        self,
        x: Tensor,
        shape: tuple[int, int],
        cos: Tensor | None,
        sin: Tensor | None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Map x [B T, H] to [B T, H]; see `Attention.heads`."""
        return self.c_proj(self.heads(x, shape, cos, sin, hidden))


class ShardedLlamaAttention(Attention):
    """Of the parameters of a LlamaAttention."""

    def __init__(
        self, plain: LlamaAttention, num_heads: int, num_kv_heads: int, eps: float, grid: Grid, dtype: ms.Type
    ) -> None:
        super().__init__(plain, num_heads, num_kv_heads, eps, grid, dtype)
        self.o_proj = RowLinear(plain.o_proj, grid, dtype)

    def construct(
        self,
        x: Tensor,
        shape: tuple[int, int],
        cos: Tensor | None,
        sin: Tensor | None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Map x [B T, H] to [B T, H]; see `Attention.heads`."""
        return self.o_proj(self.heads(x, shape, cos, sin, hidden))


def heads_per_rank(num_heads: int, num_kv_heads: int, grid: Grid) -> None:
    """Refuse heads that the grid cannot share evenly."""
    degree = grid.tp * (grid.cp if grid.context == "ulysses" else 1)
    name = "tp x cp" if degree != grid.tp else "tp"
    for kind, number in (("attention heads", num_heads), ("key-value heads", num_kv_heads)):
        if number % degree:
            raise UserError(
                f"graph: {name} {degree} does not divide {number} {kind}: choose a degree that does"
            )


class HeadNorm(nn.Cell):
    """The norm of each head of queries or keys: [B, T, heads, D]."""

    def __init__(self, norm: RMSNorm, eps: float, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        self.weight, self.dtype, self.parameter_rules = norm.weight, dtype, norm.parameter_rules
        self.norm, self.cast = RmsNorm(eps).shard(((grid.dp, grid.cp, grid.tp, 1), (1,))), ops.Cast()

    def construct(self, x: Tensor) -> Tensor:
        """Normalise."""
        return self.cast(self.norm(self.cast(x, ms.float32), self.weight)[0], self.dtype)


class GeluMLP(nn.Cell):
    """The MLP of GPT."""

    def __init__(self, plain: nn.Cell, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        self.enter = EnterRegion(grid)
        self.c_fc, self.c_proj = ColumnLinear(plain.c_fc, grid, dtype), RowLinear(plain.c_proj, grid, dtype)
        self.act = ops.GeLU().shard(((grid.parts(_ROWS), grid.tp),))

    def construct(self, x: Tensor) -> Tensor:
        """Map x [N, H] to [N, H]."""
        return self.c_proj(self.act(self.c_fc(self.enter(x))))


class GatedMLP(nn.Cell):
    """The MLP of Llama."""

    def __init__(self, plain: nn.Cell, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        self.enter = EnterRegion(grid)
        self.gate_proj = ColumnLinear(plain.gate_proj, grid, dtype)
        self.up_proj = ColumnLinear(plain.up_proj, grid, dtype)
        self.down_proj = RowLinear(plain.down_proj, grid, dtype)
        cut = (grid.parts(_ROWS), grid.tp)
        self.sigmoid, self.multiply = ops.Sigmoid().shard((cut,)), ops.Mul().shard((cut, cut))

    def construct(self, x: Tensor) -> Tensor:
        """Map x [N, H] to [N, H]."""
        x = self.enter(x)
        gate = self.gate_proj(x)
        return self.down_proj(self.multiply(self.multiply(gate, self.sigmoid(gate)), self.up_proj(x)))


class Block(nn.Cell):
    """x + attention(norm(x)), then x + mlp(norm(x)); subclasses name the parts as their family does."""

    attention_name = ""

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        cut = grid.layout(grid.rows, "None")
        self.add = ops.Add().shard((cut, cut))

    def join(self, x: Tensor, y: Tensor) -> Tensor:
        """The residual sum."""
        return self.add(x, y)

    def recompute_attention(self) -> None:
        """Run softmax(q k) v again in backward, and nothing else of the block."""
        core = getattr(self, self.attention_name).attention
        # Of a Cell MindSpore leaves the last operator out, and FlashAttention is a single one.
        parts = (core.flash, core.masked) if isinstance(core, FlashAttention) else (core,)
        for part in parts:
            part.recompute()


class ShardedGPTBlock(Block):
    """Of the parameters of a GPTBlock."""

    attention_name = "attn"

    def __init__(self, plain: GPTBlock, num_heads: int, eps: float, grid: Grid, dtype: ms.Type) -> None:
        super().__init__(grid)
        self.ln_1 = RowNorm(plain.ln_1, eps, grid, dtype)
        self.attn = ShardedGPTAttention(plain.attn, num_heads, grid, dtype)
        self.ln_2 = RowNorm(plain.ln_2, eps, grid, dtype)
        self.mlp = GeluMLP(plain.mlp, grid, dtype)

    def construct(
        self,
        x: Tensor,
        shape: tuple[int, int],
        cos: Tensor | None,
        sin: Tensor | None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Map x [B T, H] to [B T, H]; see Attention."""
        x = self.join(x, self.attn(self.ln_1(x), shape, cos, sin, hidden))
        return self.join(x, self.mlp(self.ln_2(x)))


class ShardedLlamaLayer(Block):
    """Of the parameters of a LlamaLayer."""

    attention_name = "self_attn"

    def __init__(
        self, plain: LlamaLayer, num_heads: int, num_kv_heads: int, eps: float, grid: Grid, dtype: ms.Type
    ) -> None:
        super().__init__(grid)
        self.input_layernorm = RowNorm(plain.input_layernorm, eps, grid, dtype)
        heads = (num_heads, num_kv_heads)
        self.self_attn = ShardedLlamaAttention(plain.self_attn, *heads, eps, grid, dtype)
        self.post_attention_layernorm = RowNorm(plain.post_attention_layernorm, eps, grid, dtype)
        self.mlp = GatedMLP(plain.mlp, grid, dtype)

    def construct(
        self,
        x: Tensor,
        shape: tuple[int, int],
        cos: Tensor | None,
        sin: Tensor | None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Map x [B T, H] to [B T, H]; see Attention."""
        x = self.join(x, self.self_attn(self.input_layernorm(x), shape, cos, sin, hidden))
        return self.join(x, self.mlp(self.post_attention_layernorm(x)))


class TokenRows(nn.Cell):
    """Rows of the table of tokens by index; tp cuts the table where it divides the vocabulary."""

    def __init__(self, plain: Embedding, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        self.weight, self.parameter_rules, self.dtype = plain.weight, plain.parameter_rules, dtype
        self.gather, self.cast, self.sends_table = ops.Gather(), ops.Cast(), False
        rows, is_cut = grid.parts(grid.rows), is_vocabulary_cut(plain.weight.shape[0], grid.tp)
        self.copy = ops.Identity().shard((grid.layout("tp" if is_cut else "None", "None"),))
        if is_cut:
            self.gather.shard(((grid.tp, 1), (grid.parts(_ROWS),)), ((rows, 1),))
        else:
            self.gather.shard(((1, 1), (rows,)))

    def construct(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Map int32 [N] to [N, H]; returns the table too, in `dtype`, for a head that is tied to it."""
        table = self.cast(self.weight, self.dtype)
        return self.gather(table, indices, 0), self.copy(table) if self.sends_table else table


class PositionRows(nn.Cell):
    """Rows of the table of positions for every token."""

    def __init__(self, plain: Embedding, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        self.weight, self.parameter_rules, self.dtype = plain.weight, plain.parameter_rules, dtype
        rows = grid.parts(grid.rows)
        self.gather, self.cast = ops.Gather().shard(((1, 1), (rows,))), ops.Cast()
        self.most, self.reshape = plain.weight.shape[0], ops.Reshape()

        def indices(batch: int, length: int, most: int) -> Tensor:
            if length > most:
                raise UserError(f"model: a sequence of {length} tokens exceeds max_seq_len {most}")
            return Tensor(np.tile(grid.positions(length), batch))

        self.indices = ms.constexpr(indices)

    def construct(self, shape: tuple[int, int], positions: Tensor | None = None) -> Tensor:
        """Return [B T, H] for shape (B, T); positions: int32 [B, T]."""
        if positions is None:
            return self.at(self.indices(shape[0], shape[1], self.most))
        return self.at(self.reshape(positions, (-1,)))

    def at(self, indices: Tensor) -> Tensor:
        """Rows [N, H] of the positions int32 [N]."""
        return self.gather(self.cast(self.weight, self.dtype), indices, 0)


class Head(nn.Cell):
    """Logits, fp32 [N, V]: columns cut over tp where it divides the vocabulary, else rows.

    A tied head has no weight of its own. It is given the table, so that a pipeline sends it to the last stage
    and its gradient back, like any other tensor of a microbatch. A Parameter that two stages use MindSpore
    2.10.0 sends once in a step, but counts its gradient in the norm on both stages, does not add them up with
    hsdp level 1, does not compile with level 3, and sends another dtype than is expected where it is cast.
    """

    def __init__(self, plain: Linear, grid: Grid, dtype: ms.Type, *, tied: bool) -> None:
        super().__init__()
        self.dtype, self.is_tied = dtype, tied
        if not tied:
            self.weight, self.parameter_rules = plain.weight, plain.parameter_rules
        rows, columns = logit_cuts(plain.weight.shape[0], grid)
        self.matmul = ops.MatMul(transpose_b=True).shard(
            (grid.layout(rows, "None"), grid.layout(columns, "None"))
        )
        self.cast, self.widen = ops.Cast(), ops.Cast()

    def construct(self, x: Tensor, table: Tensor) -> Tensor:
        """Map x [N, H]; table [V, H]: used when tied."""
        weight = self.cast(table if self.is_tied else self.weight, self.dtype)
        return self.widen(self.matmul(x, weight), ms.float32)


def logit_cuts(vocab_size: int, grid: Grid) -> tuple[tuple[str, ...], str]:
    """Axes that cut the rows and the columns of logits."""
    return (_ROWS, "tp") if is_vocabulary_cut(vocab_size, grid.tp) else ((*_ROWS, "tp"), "None")


class DocumentMask(nn.Cell):
    """Starts of documents, int32 [B, T] -> what attention is to be told of them.

    A mask, uint8 [B, 1, T, T], 1 where a query sees no key; with a ring the starts as they are.
    """

    def __init__(self, grid: Grid) -> None:
        super().__init__()
        cut = (grid.dp, 1, 1, 1)
        self.less, self.either = ops.Less().shard(((1, 1, 1, 1), cut)), ops.LogicalOr()
        self.either.shard((cut, (1, 1, 1, 1)))
        self.reshape, self.cast, self.is_mask = ops.Reshape(), ops.Cast(), not grid.passes_blocks

        def constants(length: int) -> tuple[Tensor, Tensor]:
            places = np.arange(length, dtype=np.int32)
            return Tensor(places[None, None, None]), Tensor(np.triu(np.ones((1, 1, length, length), bool), 1))

        self.keys = ms.constexpr(lambda length: constants(length)[0])
        self.later = ms.constexpr(lambda length: constants(length)[1])

    def construct(self, starts: Tensor) -> Tensor:
        """Return it."""
        if not self.is_mask:
            return starts
        batch, length = starts.shape
        earlier = self.less(self.keys(length), self.reshape(starts, (batch, 1, length, 1)))
        return self.cast(self.either(earlier, self.later(length)), ms.uint8)


class ShardedGPTTransformer(nn.Cell):
    """Of the parameters of a GPTTransformer."""

    def __init__(self, plain: nn.Cell, num_heads: int, eps: float, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        self.wte, self.wpe = TokenRows(plain.wte, grid, dtype), PositionRows(plain.wpe, grid, dtype)
        cut = grid.layout(grid.rows, "None")
        self.add, self.reshape = ops.Add().shard((cut, cut)), ops.Reshape()
        self.h = nn.CellList([ShardedGPTBlock(block, num_heads, eps, grid, dtype) for block in plain.h])
        self.ln_f, self.document_mask = RowNorm(plain.ln_f, eps, grid, dtype), DocumentMask(grid)

    def construct(
        self, input_ids: Tensor, positions: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Map int32 ids [B, T] to [B T, H], and return the table of tokens."""
        shape = input_ids.shape
        rows, table = self.wte(self.reshape(input_ids, (-1,)))
        x = self.add(rows, self.wpe(shape, positions))
        hidden = None if starts is None else self.document_mask(starts)
        for block in self.h:
            x = block(x, shape, None, None, hidden)
        return self.ln_f(x), table


class ShardedGPT(nn.Cell):
    """A GPT of the parameters of a plain one, for AutoParallel: int32 ids [B, T] -> fp32 logits [B T, V]."""

    def __init__(self, plain: GPT, num_heads: int, eps: float, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        self.transformer = ShardedGPTTransformer(plain.transformer, num_heads, eps, grid, dtype)
        tied = plain.lm_head.weight is plain.transformer.wte.weight
        self.lm_head = Head(plain.lm_head, grid, dtype, tied=tied)
        name_parameters_by_path(self)

    @property
    def blocks(self) -> nn.CellList:
        """The transformer blocks, in order."""
        return self.transformer.h

    @property
    def first_cells(self) -> tuple[nn.Cell, ...]:
        """What comes before the blocks."""
        return self.transformer.wte, self.transformer.wpe

    @property
    def last_cells(self) -> tuple[nn.Cell, ...]:
        """What comes after the blocks."""
        return self.transformer.ln_f, self.lm_head

    def construct(
        self, input_ids: Tensor, positions: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Return the logits; the other arguments are those of `ms_zero.models.GPT`."""
        x, table = self.transformer(input_ids, positions, starts)
        return self.lm_head(x, table)


class ShardedLlamaModel(nn.Cell):
    """Of the parameters of a LlamaModel."""

    def __init__(
        self, plain: nn.Cell, num_heads: int, num_kv_heads: int, eps: float, grid: Grid, dtype: ms.Type
    ) -> None:
        super().__init__()
        self.embed_tokens = TokenRows(plain.embed_tokens, grid, dtype)
        self.reshape, self.dtype, self.document_mask = ops.Reshape(), dtype, DocumentMask(grid)
        tables, most = plain.rotary_emb.table, plain.rotary_emb.max_seq_len

        def table(length: int, is_cos: bool) -> Tensor:
            return Tensor(tables(length, is_cos).asnumpy()[grid.positions(length)])

        self.table = ms.constexpr(table)
        self.whole = ms.constexpr(lambda is_cos: tables(most, is_cos))
        self.gather = ops.Gather().shard(((1, 1), (grid.parts(_ROWS),)))
        layers = [
            ShardedLlamaLayer(layer, num_heads, num_kv_heads, eps, grid, dtype) for layer in plain.layers
        ]
        self.layers = nn.CellList(layers)
        self.norm = RowNorm(plain.norm, eps, grid, dtype)

    def angles(self, shape: tuple[int, int], positions: Tensor | None, is_cos: bool) -> Tensor:
        """The table of all samples [1, T, 1, D], or of each by its positions [B, T, 1, D]."""
        if positions is None:
            return self.reshape(self.table(shape[1], is_cos).astype(self.dtype), (1, shape[1], 1, -1))
        rows = self.gather(self.whole(is_cos), self.reshape(positions, (-1,)), 0)
        return self.reshape(rows.astype(self.dtype), (shape[0], shape[1], 1, -1))

    def construct(
        self, input_ids: Tensor, positions: Tensor | None, starts: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Map int32 ids [B, T] to [B T, H], and return the table of tokens."""
        shape = input_ids.shape
        cos, sin = self.angles(shape, positions, True), self.angles(shape, positions, False)
        hidden = None if starts is None else self.document_mask(starts)
        x, table = self.embed_tokens(self.reshape(input_ids, (-1,)))
        for layer in self.layers:
            x = layer(x, shape, cos, sin, hidden)
        return self.norm(x), table


class ShardedLlama(nn.Cell):
    """A Llama of the parameters of a plain one, for AutoParallel: int32 ids [B, T] -> fp32 logits [B T,
    V]."""

    def __init__(
        self, plain: Llama, num_heads: int, num_kv_heads: int, eps: float, grid: Grid, dtype: ms.Type
    ) -> None:
        super().__init__()
        self.model = ShardedLlamaModel(plain.model, num_heads, num_kv_heads, eps, grid, dtype)
        tied = plain.lm_head.weight is plain.model.embed_tokens.weight
        self.lm_head = Head(plain.lm_head, grid, dtype, tied=tied)
        name_parameters_by_path(self)

    @property
    def blocks(self) -> nn.CellList:
        """The layers, in order."""
        return self.model.layers

    @property
    def first_cells(self) -> tuple[nn.Cell, ...]:
        """What comes before the layers."""
        return (self.model.embed_tokens,)

    @property
    def last_cells(self) -> tuple[nn.Cell, ...]:
        """What comes after the layers."""
        return self.model.norm, self.lm_head

    def construct(
        self, input_ids: Tensor, positions: Tensor | None = None, starts: Tensor | None = None
    ) -> Tensor:
        """Return the logits; the other arguments are those of `ms_zero.models.Llama`."""
        x, table = self.model(input_ids, positions, starts)
        return self.lm_head(x, table)


class ShardedCrossEntropySum(nn.Cell):
    """`ms_zero.kernels.CrossEntropySum` on logits as `Head` leaves them: each rank sees its rows and columns.

    Args:
        vocab_size: columns of the whole logits.
        grid: the devices.
        ignore_index: labels that count nothing.
    """

    def __init__(self, vocab_size: int, grid: Grid, ignore_index: int = -100) -> None:
        super().__init__()
        rows, columns = logit_cuts(vocab_size, grid)
        row, column = grid.parts(rows), 1 if columns == "None" else grid.tp
        full, one = (row, column), (row, 1)
        self.vocab_size, self.ignore_index = vocab_size, ignore_index
        self.max = ops.ReduceMax(keep_dims=True).shard((full,))
        self.subtract = ops.Sub().shard((full, one))
        self.exp, self.log = ops.Exp().shard((full,)), ops.Log().shard((one,))
        self.sum, self.reshape = ops.ReduceSum(keep_dims=True).shard((full,)), ops.Reshape()
        self.one_hot = ops.OneHot().shard((full, (), ()))
        self.multiply = ops.Mul().shard((full, full))
        self.difference, self.masked = ops.Sub().shard((one, one)), ops.Mul().shard((one, one))
        self.not_equal, self.choose = ops.NotEqual().shard(((row,), ())), ops.Mul().shard(((row,), (row,)))
        self.to_int, self.to_float = ops.Cast(), ops.Cast()
        self.total = ops.ReduceSum().shard((one,))
        self.on, self.off = Tensor(1.0, ms.float32), Tensor(0.0, ms.float32)

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Map fp32 [N, V] and int32 [N] to the sum, fp32 0-d."""
        valid = self.not_equal(labels, self.ignore_index)
        # An ignored label is read at column 0; multiplying by 0 removes its value and its gradient.
        columns = self.choose(labels, self.to_int(valid, ms.int32))
        shifted = self.subtract(logits, ops.stop_gradient(self.max(logits, -1)))
        log_sum = self.log(self.sum(self.exp(shifted), -1))
        one_hot = self.one_hot(columns, self.vocab_size, self.on, self.off)
        picked = self.sum(self.multiply(shifted, one_hot), -1)
        valid = self.reshape(self.to_float(valid, ms.float32), (-1, 1))
        return self.total(self.masked(self.difference(log_sum, picked), valid))


def sharded_model(plain: nn.Cell, config: GPTConfig | LlamaConfig, grid: Grid, dtype: ms.Type) -> nn.Cell:
    """The twin of a plain model; it shares its parameters.

    Raises:
        UserError: the degrees do not divide the model.
    """
    eps = config.norm_eps
    if isinstance(plain, GPT):
        return ShardedGPT(plain, config.num_heads, eps, grid, dtype)
    if isinstance(plain, Llama):
        return ShardedLlama(plain, config.num_heads, config.num_kv_heads, eps, grid, dtype)
    raise UserError(f"graph: no strategies are known for a {type(plain).__name__}")


def _must_divide(degree: int, size: int, name: str) -> None:
    if size % degree:
        raise UserError(f"graph: tp {degree} does not divide the {size} rows or columns of {name}")
