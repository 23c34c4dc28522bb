"""Latent attention as operators with shard strategies, of the parameters of `ms_zero.models.latent`."""

from __future__ import annotations

import math

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_zero.graph.strategies import (
    ColumnLinear,
    EnterRegion,
    FlashAttention,
    Grid,
    ProductAttention,
    Rotary,
    RowLinear,
    RowNorm,
    heads_per_rank,
)
from ms_zero.models.latent import LatentAttention
from ms_zero.models.layers import Linear


class WholeLinear(nn.Cell):
    """y = x W^T, all of W on every rank, on the rows that it has between regions: [N, in] -> [N, out]."""

    def __init__(self, linear: Linear, grid: Grid, dtype: ms.Type) -> None:
        super().__init__()
        assert linear.bias is None, linear.bias.name
        self.weight, self.dtype, self.parameter_rules = linear.weight, dtype, linear.parameter_rules
        self.matmul = ops.MatMul(transpose_b=True).shard(
            (grid.layout(grid.rows, "None"), grid.layout("None", "None"))
        )
        self.cast = ops.Cast()

    def construct(self, x: Tensor) -> Tensor:
        """Apply the product."""
        return self.matmul(x, self.cast(self.weight, self.dtype))


class _Slice(nn.Cell):
    """Elements [start, stop) of the last dim, which no axis cuts."""

    def __init__(self, start: int, stop: int, cut: tuple[int, ...]) -> None:
        super().__init__()
        self.start, self.stop, self.ones = start, stop, (1,) * len(cut)
        self.slice = ops.StridedSlice().shard((cut,))

    def construct(self, x: Tensor) -> Tensor:
        shape = x.shape
        begin = (0,) * (len(shape) - 1) + (self.start,)
        return self.slice(x, begin, (*shape[:-1], self.stop), self.ones)


class ShardedLatentAttention(nn.Cell):
    """Of the parameters of a LatentAttention: compression on whole weights, heads cut over tp.

    With sequence parallelism each rank compresses its own rows, and the compressed rows are gathered.
    """

    def __init__(
        self, plain: LatentAttention, num_heads: int, eps: float, grid: Grid, dtype: ms.Type
    ) -> None:
        super().__init__()
        heads_per_rank(num_heads, num_heads, grid)
        self.num_heads, self.dtype = num_heads, dtype
        self.nope, self.rope = plain.nope_head_dim, plain.rope_head_dim
        self.value, self.rank = plain.value_head_dim, plain.kv_rank
        head = self.nope + self.rope
        self.width = max(head, self.value)
        self.enter = EnterRegion(grid)
        self.q_proj = self.q_a_proj = self.q_a_layernorm = self.q_b_proj = None
        if plain.q_proj is None:
            self.q_a_proj = WholeLinear(plain.q_a_proj, grid, dtype)
            self.q_a_layernorm = RowNorm(plain.q_a_layernorm, eps, grid, dtype)
            self.q_b_proj = ColumnLinear(plain.q_b_proj, grid, dtype)
        else:
            self.q_proj = ColumnLinear(plain.q_proj, grid, dtype)
        self.kv_a_proj_with_mqa = WholeLinear(plain.kv_a_proj_with_mqa, grid, dtype)
        self.kv_a_layernorm = RowNorm(plain.kv_a_layernorm, eps, grid, dtype)
        self.kv_b_proj = ColumnLinear(plain.kv_b_proj, grid, dtype)
        self.o_proj = RowLinear(plain.o_proj, grid, dtype)
        self.rotary = Rotary(grid)
        if dtype == ms.float32:
            self.attention = ProductAttention(num_heads, num_heads, self.width, grid)
        else:
            self.attention = FlashAttention(num_heads, self.width, grid)
        self.scale = math.sqrt(self.width / head)  # attention divides by the root of the padded width
        self._cut(grid)

    def _cut(self, grid: Grid) -> None:
        """The operators without parameters."""
        rows, whole = (grid.parts(grid.rows), 1), (grid.dp, grid.cp, grid.tp, 1)
        self.compressed = _Slice(0, self.rank, rows)
        self.shared = _Slice(self.rank, self.rank + self.rope, rows)
        self.q_nope = _Slice(0, self.nope, whole)
        self.q_rope = _Slice(self.nope, self.nope + self.rope, whole)
        self.k_nope = _Slice(0, self.nope, whole)
        self.v_part = _Slice(self.nope, self.nope + self.value, whole)
        self.out_part = _Slice(0, self.value, whole)
        self.missing = _Slice(0, abs(self.nope + self.rope - self.value), whole)
        self.join = ops.Concat(-1).shard((whole, whole))
        self.zeros = ops.ZerosLike().shard((whole,))
        self.spread = ops.Add().shard(((grid.dp, grid.cp, 1, 1), whole))
        self.multiply = ops.Mul().shard((whole, ()))
        self.reshape = ops.Reshape()
        # The key that heads share has a head dim of 1, which no axis cuts.
        self.turn_shared = Rotary(Grid(dp=grid.dp, cp=grid.cp))

    def construct(self, x: Tensor, shape: tuple[int, int], cos: Tensor, sin: Tensor) -> Tensor:
        """Map x [B T, H] to [B T, H]; shape: (B, T); cos and sin [1, T, 1, rope]."""
        heads = (*shape, self.num_heads, -1)
        q = self.reshape(self.queries(x), heads)
        q_rope = self.rotary(self.q_rope(q), cos, sin)
        q = self.join((self.q_nope(q), q_rope))
        if self.scale != 1.0:
            q = self.multiply(q, self.scale)
        latent = self.kv_a_proj_with_mqa(x)
        expanded = self.kv_b_proj(self.enter(self.kv_a_layernorm(self.compressed(latent))))
        expanded = self.reshape(expanded, heads)
        shared = self.reshape(self.enter(self.shared(latent)), (*shape, 1, self.rope))
        shared = self.turn_shared(shared, cos, sin)
        spread = self.spread(shared, self.zeros(q_rope))
        k, v = self.join((self.k_nope(expanded), spread)), self.v_part(expanded)
        if self.value < self.width:  # heads of attention have one width: zeros change nothing
            v = self.join((v, self.zeros(self.missing(k))))
        elif self.value > k.shape[-1]:
            missing = self.zeros(self.missing(v))
            q, k = self.join((q, missing)), self.join((k, missing))
        out = self.attention(q, k, v)
        if self.width > self.value:
            out = self.out_part(out)
        return self.o_proj(self.reshape(out, (shape[0] * shape[1], self.num_heads * self.value)))

    def queries(self, x: Tensor) -> Tensor:
        """Map x [N, H] to [N, heads x head dim]."""
        if self.q_a_proj is None:
            return self.q_proj(self.enter(x))
        return self.q_b_proj(self.enter(self.q_a_layernorm(self.q_a_proj(x))))
