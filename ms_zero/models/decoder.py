"""Decoders with experts: Mixtral, Qwen-MoE and DeepSeek, from one set of parts.

Layers as in Llama (pre-RMSNorm, rotary positions, grouped-query attention) with a mixture of experts in place
of the MLP. `latent` gives DeepSeek's attention, `dense_layers` its first layers, `shared_ffn_hidden_size` its
shared experts; `qkv_bias` and `shared_gate` give Qwen2-MoE, `qk_norm` Qwen3-MoE.

The auxiliary loss of the routers rides along: each layer is given and returns, beside the hidden states, a
number for each sequence, to which it adds its own. So whatever carries hidden states from layer to layer
(recompute, a pipeline) carries the loss too, and no gradient is injected anywhere.
"""

import math
from functools import partial
from typing import Protocol

import mindspore as ms
from mindspore import Tensor, mint, nn

from ms_zero.errors import UserError
from ms_zero.models.dropout import Dropout, DropoutState, name_dropouts_by_path
from ms_zero.models.latent import LatentAttention
from ms_zero.models.layers import Embedding, Linear, RMSNorm, name_parameters_by_path
from ms_zero.models.llama import LlamaAttention, LlamaMLP, LlamaModel
from ms_zero.models.moe import Mixture, MoE
from ms_zero.models.rope import RotaryTables


class Latent(Protocol):
    """Widths of latent attention, see `LatentAttention`."""

    q_rank: int
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int
    value_head_dim: int


class MoELayer(nn.Cell):
    """x + attention(norm(x)), then x + experts(norm(x)); or a plain MLP in place of the experts."""

    fp32_outputs = (1,)  # read by ms_zero.precision

    def __init__(
        self,
        hidden_size: int,
        attention: nn.Cell,
        mlp: nn.Cell,
        *,
        norm_eps: float,
        dropout: float,
        dropout_state: DropoutState | None,
        target: str | None,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps=norm_eps, target=target)
        self.self_attn = attention
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=norm_eps, target=target)
        self.mlp = mlp
        self.attn_dropout = Dropout(dropout, dropout_state) if dropout_state else None
        self.mlp_dropout = Dropout(dropout, dropout_state) if dropout_state else None

    def construct(
        self, x: Tensor, aux: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map x [B, T, H] and aux fp32 [B] to the same; the other arguments are those of `LlamaAttention`."""
        y = self.self_attn(self.input_layernorm(x), cos, sin, mask)
        x = x + (y if self.attn_dropout is None else self.attn_dropout(y))
        y = self.mlp(self.post_attention_layernorm(x))
        if isinstance(self.mlp, MoE):
            y, own = y
            aux = aux + own
        return x + (y if self.mlp_dropout is None else self.mlp_dropout(y)), aux


class MoEModel(LlamaModel):
    """Embedding, layers and final norm."""

    fp32_outputs = (1,)  # read by ms_zero.precision

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Map int32 ids [B, T] to hidden states [B, T, H] and the auxiliary loss [B]; see `MoEDecoder`."""
        cos, sin = self.rotary_emb(input_ids, position_ids)
        x = self.embed_tokens(input_ids)
        if self.dropout is not None:
            x = self.dropout(x)
        mask = None if document_starts is None else self.document_mask(document_starts, x)
        aux = mint.zeros((input_ids.shape[0],), dtype=ms.float32)
        for layer in self.layers:
            x, aux = layer(x, aux, cos, sin, mask)
        return self.norm(x), aux


class MoEDecoder(nn.Cell):
    """Language model with experts: int32 input_ids [B, T] -> fp32 logits [B, T, V] and auxiliary loss [B].

    Parameters are created without storage; see `ms_zero.models.initialise`. The auxiliary loss is what the
    routers of all layers add up to for each sequence, ready to be added to its mean token loss.

    Args:
        mixture: of the layers with experts.
        latent: widths of latent attention; None: grouped-query attention, with num_kv_heads and head_dim.
        dense_layers: first layers, with an MLP of width ffn_hidden_size in place of experts.
        target: device target of the kernels, None for the current one.

    The other arguments are those of `Llama`, and so are the errors. PyNative only.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        max_seq_len: int,
        mixture: Mixture,
        latent: Latent | None = None,
        dense_layers: int = 0,
        ffn_hidden_size: int | None = None,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        tie_embeddings: bool = False,
        rope_theta: float = 10000.0,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        dropout: float = 0.0,
        target: str | None = None,
    ) -> None:
        super().__init__()
        rope_dim = head_dim if latent is None else latent.rope_head_dim
        _check(num_heads, num_kv_heads, rope_dim, dense_layers, ffn_hidden_size)
        residual_std = init_std / math.sqrt(2 * num_layers)
        common = {"init_std": init_std, "residual_std": residual_std, "target": target}
        if latent is None:
            heads, options = (num_heads, num_kv_heads, head_dim), {"qkv_bias": qkv_bias, "qk_norm": qk_norm}
            attention = partial(LlamaAttention, hidden_size, *heads, norm_eps=norm_eps, **options, **common)
        else:
            widths = {name: getattr(latent, name) for name in Latent.__annotations__}
            attention = partial(
                LatentAttention, hidden_size, num_heads, norm_eps=norm_eps, **widths, **common
            )
        dense, routed = partial(LlamaMLP, hidden_size, ffn_hidden_size), partial(MoE, hidden_size, mixture)
        self.dropout_state = state = DropoutState() if dropout else None
        rest = {"norm_eps": norm_eps, "dropout": dropout, "dropout_state": state, "target": target}
        self.model = MoEModel(
            Embedding(vocab_size, hidden_size, init_std=init_std),
            RotaryTables(rope_dim, max_seq_len, theta=rope_theta),
            [
                MoELayer(hidden_size, attention(), (dense if at < dense_layers else routed)(**common), **rest)
                for at in range(num_layers)
            ],
            RMSNorm(hidden_size, eps=norm_eps, target=target),
            Dropout(dropout, self.dropout_state) if self.dropout_state else None,
            target,
        )
        self.bias_speed = mixture.bias_speed
        shared = self.model.embed_tokens.weight if tie_embeddings else None
        self.lm_head = Linear(hidden_size, vocab_size, bias=False, init_std=init_std, weight=shared)
        name_parameters_by_path(self)
        name_dropouts_by_path(self)

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return logits and auxiliary loss; the arguments are those of `Llama`."""
        hidden, aux = self.model(input_ids, position_ids, document_starts)
        return self.lm_head(hidden).astype(ms.float32), aux


def _check(
    num_heads: int, num_kv_heads: int, rope_dim: int, dense_layers: int, ffn_hidden_size: int | None
) -> None:
    if num_heads % num_kv_heads:
        raise UserError(f"model: num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")
    if rope_dim % 2:
        raise UserError(f"model: {rope_dim} rotary dims of a head: rotary positions need an even number")
    if dense_layers and ffn_hidden_size is None:
        raise UserError("model: dense_layers need ffn_hidden_size, the width of their MLP")
