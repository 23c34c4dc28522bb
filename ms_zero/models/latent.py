"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values from a compressed vector.

Parameter paths are those of Hugging Face's DeepseekV3Attention. Rotary positions turn halves of the rotary
part, as everywhere in this package; checkpoints of DeepSeek pair neighbours, which is the same with the rows
of that part in another order.
"""

import math

from mindspore import Tensor, mint, nn, ops

from ms_zero import kernels
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
        q = self._queries(x, cos, sin)
        k, v = self._keys_and_values(x, cos, sin)
        width = max(self.head_dim, self.value_head_dim)
        out = self.attention(_filled(q, width), _filled(k, width), _filled(v, width), mask)
        if width > self.value_head_dim:
            out, _ = _parts(out, self.value_head_dim)
        return self.o_proj(merge_heads(out))

    def _queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.q_proj is None:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        else:
            q = self.q_proj(x)
        nope, rope = _parts(split_heads(q, self.head_dim), self.nope_head_dim)
        return mint.cat((nope, self.rotary(rope, cos, sin)), -1)

    def _keys_and_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        compressed, rope = _parts(self.kv_a_proj_with_mqa(x), self.kv_rank)
        rope = self.rotary(split_heads(rope, self.rope_head_dim), cos, sin)
        expanded = self.kv_b_proj(self.kv_a_layernorm(compressed))
        expanded = split_heads(expanded, self.nope_head_dim + self.value_head_dim)
        nope, v = _parts(expanded, self.nope_head_dim)
        # The number of heads is that of the projection: tensor parallelism splits heads.
        rope = ops.broadcast_to(rope, (*nope.shape[:3], self.rope_head_dim))
        return mint.cat((nope, rope), -1), v


def _parts(x: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """The first and the other elements of the last dim.

    Not by mint.split, whose gradient on CPU is wrong when a part's is a view (MindSpore 2.10.0).
    """
    size = x.shape[-1]
    return mint.narrow(x, x.ndim - 1, 0, first), mint.narrow(x, x.ndim - 1, first, size - first)


def _filled(x: Tensor, width: int) -> Tensor:
    """x [B, T, heads, D] with zeros up to `width`."""
    missing = width - x.shape[-1]
    if not missing:
        return x
    return mint.cat((x, mint.zeros((*x.shape[:-1], missing), dtype=x.dtype)), -1)
