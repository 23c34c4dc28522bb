"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values from a compressed vector.

Parameter paths are those of Hugging Face's DeepseekV3Attention. Rotary positions turn halves of the rotary
part, as everywhere in this package; checkpoints of DeepSeek pair neighbours, which is the same with the rows
of that part in another order.
"""

import math
from dataclasses import dataclass
from typing import Any

from mindspore import Tensor, mint, nn, ops

from ms_zero import kernels
from ms_zero._compat import function_class
from ms_zero.models.layers import Linear, RMSNorm, merge_heads, split_heads


class LatentAttention(nn.Cell):
    """Causal self-attention whose keys and values are expanded from a compressed vector.

    A query or key head is [nope_head_dim | rope_head_dim] wide, a value head value_head_dim. The rotary key
    is shared by all heads. q_rank 0: queries are not compressed. Attention kernels take heads of one width,
    so the narrower ones of keys and values are filled up with zeros, which changes no result.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        q_rank: int,
        kv_rank: int,
        nope_head_dim: int,
        rope_head_dim: int,
        value_head_dim: int,
        norm_eps: float,
        init_std: float,
        residual_std: float,
        target: str | None,
    ) -> None:
        super().__init__()
        self.kv_rank, self.nope_head_dim, self.rope_head_dim = kv_rank, nope_head_dim, rope_head_dim
        self.value_head_dim, self.head_dim = value_head_dim, nope_head_dim + rope_head_dim
        q_size = num_heads * self.head_dim
        self.q_proj = self.q_a_proj = self.q_a_layernorm = self.q_b_proj = None
        if q_rank:
            self.q_a_proj = Linear(hidden_size, q_rank, bias=False, init_std=init_std)
            self.q_a_layernorm = RMSNorm(q_rank, eps=norm_eps, target=target)
            self.q_b_proj = Linear(q_rank, q_size, bias=False, init_std=init_std)
        else:
            self.q_proj = Linear(hidden_size, q_size, bias=False, init_std=init_std)
        self.kv_a_proj_with_mqa = Linear(hidden_size, kv_rank + rope_head_dim, bias=False, init_std=init_std)
        self.kv_a_layernorm = RMSNorm(kv_rank, eps=norm_eps, target=target)
        expanded = num_heads * (nope_head_dim + value_head_dim)
        self.kv_b_proj = Linear(kv_rank, expanded, bias=False, init_std=init_std)
        self.o_proj = Linear(num_heads * value_head_dim, hidden_size, bias=False, init_std=residual_std)
        self.rotary = kernels.RotaryEmbedding(target)
        self.attention = kernels.CausalAttention(1.0 / math.sqrt(self.head_dim), target)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map x [B, T, H] to [B, T, H]; cos and sin of rope_head_dim, the rest as in `LlamaAttention`."""
        width = max(self.head_dim, self.value_head_dim)
        rotary = _Rotary(self.rotary, cos, sin)
        q = _Queries.apply(split_heads(self._queries(x), self.head_dim), rotary, self.nope_head_dim, width)
        compressed, shared_key = _Parts.apply(self.kv_a_proj_with_mqa(x), self.kv_rank)
        expanded = self.kv_b_proj(self.kv_a_layernorm(compressed))
        expanded = split_heads(expanded, self.nope_head_dim + self.value_head_dim)
        shared_key = split_heads(shared_key, self.rope_head_dim)
        k, v = _KeysAndValues.apply(expanded, shared_key, rotary, self.nope_head_dim, width)
        out = self.attention(q, k, v, mask)
        if width > self.value_head_dim:
            out = _First.apply(out, self.value_head_dim)
        return self.o_proj(merge_heads(out))

    def _queries(self, x: Tensor) -> Tensor:
        if self.q_proj is None:
            return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return self.q_proj(x)


@dataclass(frozen=True)
class _Rotary:
    """Rotation of heads by the tables of a batch, and back."""

    rotary: nn.Cell
    cos: Tensor
    sin: Tensor

    def turn(self, x: Tensor) -> Tensor:
        return self.rotary(x, self.cos, self.sin)

    def turn_back(self, x: Tensor) -> Tensor:
        return self.rotary(x, self.cos, -self.sin)


# Autograd would keep the inputs of every concatenation, and its gradient of mint.split is wrong on CPU when a
# part's is a view (MindSpore 2.10.0). Nothing of these inputs is needed backwards.


class _Parts(function_class):
    """The first and the other elements of the last dim."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, first: int) -> tuple[Tensor, Tensor]:
        return _cut(x, first)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return mint.cat(grads, -1), None


class _First(function_class):
    """The first elements of the last dim of [B, T, heads, D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        ctx.width = x.shape[-1]
        return mint.narrow(x, 3, 0, size).contiguous()

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return _filled(dx, ctx.width), None


class _Queries(function_class):
    """q [B, T, heads, nope + rope] with the rotary part turned and zeros up to `width`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, rotary: _Rotary, nope_dim: int, width: int) -> Tensor:
        ctx.rotary, ctx.nope_dim, ctx.head_dim = rotary, nope_dim, q.shape[-1]
        nope, rope = _cut(q, nope_dim)
        return _filled(mint.cat((nope, rotary.turn(rope)), -1), width)

    @staticmethod
    def backward(ctx: Any, dq: Tensor) -> tuple[Tensor, None, None, None]:
        nope, rope = _cut(mint.narrow(dq, 3, 0, ctx.head_dim), ctx.nope_dim)
        return mint.cat((nope, ctx.rotary.turn_back(rope)), -1), None, None, None


class _KeysAndValues(function_class):
    """Keys and values of the expanded vectors [B, T, heads, nope + value] and the key that heads share.

    The shared key is [B, T, 1, rope]; the results have zeros up to `width`.
    """

    @staticmethod
    def forward(
        ctx: Any, expanded: Tensor, shared: Tensor, rotary: _Rotary, nope_dim: int, width: int
    ) -> tuple[Tensor, Tensor]:
        nope, v = _cut(expanded, nope_dim)
        ctx.rotary, ctx.sizes = rotary, (nope_dim, shared.shape[-1], v.shape[-1])
        # The number of heads is that of the projection: tensor parallelism splits heads.
        turned = ops.broadcast_to(rotary.turn(shared), (*nope.shape[:3], shared.shape[-1]))
        return _filled(mint.cat((nope, turned), -1), width), _filled(v, width)

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        nope_dim, rope_dim, value_dim = ctx.sizes
        nope, rope = _cut(mint.narrow(dk, 3, 0, nope_dim + rope_dim), nope_dim)
        dexpanded = mint.cat((nope, mint.narrow(dv, 3, 0, value_dim)), -1)
        return dexpanded, ctx.rotary.turn_back(rope.sum(2, keepdims=True)), None, None, None


def _cut(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The first and the other elements of the last dim, each contiguous."""
    last, size = x.ndim - 1, x.shape[-1]
    parts = mint.narrow(x, last, 0, first), mint.narrow(x, last, first, size - first)
    return parts[0].contiguous(), parts[1].contiguous()


def _filled(x: Tensor, width: int) -> Tensor:
    """x [B, T, heads, D] with zeros up to `width`."""
    missing = width - x.shape[-1]
    if not missing:
        return x
    return mint.cat((x, mint.zeros((*x.shape[:-1], missing), dtype=x.dtype)), -1)
