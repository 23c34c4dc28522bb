"""Llama family: pre-RMSNorm, rotary positions, grouped-query attention, SwiGLU (Touvron et al. 2023).

Parameter paths are those of Hugging Face's LlamaForCausalLM. `qkv_bias` gives Qwen2, `qk_norm` Qwen3.
"""

import math

import mindspore as ms
from mindspore import Tensor, nn

from ms_zero import kernels
from ms_zero.errors import UserError
from ms_zero.models.dropout import Dropout, DropoutState, name_dropouts_by_path
from ms_zero.models.layers import (
    Embedding,
    Linear,
    RMSNorm,
    merge_heads,
    name_parameters_by_path,
    split_heads,
)
from ms_zero.models.rope import RopeScaling, RotaryTables


class LlamaAttention(nn.Cell):
    """Causal grouped-query self-attention with rotary positions."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        qkv_bias: bool,
        qk_norm: bool,
        norm_eps: float,
        init_std: float,
        residual_std: float,
        target: str | None,
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        q_size, kv_size = num_heads * head_dim, num_kv_heads * head_dim
        self.q_proj = Linear(hidden_size, q_size, bias=qkv_bias, init_std=init_std)
        self.k_proj = Linear(hidden_size, kv_size, bias=qkv_bias, init_std=init_std)
        self.v_proj = Linear(hidden_size, kv_size, bias=qkv_bias, init_std=init_std)
        self.o_proj = Linear(q_size, hidden_size, bias=False, init_std=residual_std)
        self.q_norm = RMSNorm(head_dim, eps=norm_eps, target=target) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps=norm_eps, target=target) if qk_norm else None
        self.rotary = kernels.RotaryEmbedding(target)
        self.attention = kernels.CausalAttention(1.0 / math.sqrt(head_dim), target)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map x [B, T, H] to [B, T, H]; cos and sin [T, head_dim] or [B, T, head_dim].

        mask: see `kernels.CausalAttention`.
        """
        # The numbers of heads follow from the widths of the projections.
        q = split_heads(self.q_proj(x), self.head_dim)
        k = split_heads(self.k_proj(x), self.head_dim)
        v = split_heads(self.v_proj(x), self.head_dim)
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(q, cos, sin), self.rotary(k, cos, sin)
        return self.o_proj(merge_heads(self.attention(q, k, v, mask)))


class LlamaMLP(nn.Cell):
    """down(silu(gate(x)) * up(x))."""

    def __init__(
        self, hidden_size: int, ffn_size: int, *, init_std: float, residual_std: float, target: str | None
    ) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, ffn_size, bias=False, init_std=init_std)
        self.up_proj = Linear(hidden_size, ffn_size, bias=False, init_std=init_std)
        self.down_proj = Linear(ffn_size, hidden_size, bias=False, init_std=residual_std)
        self.act = kernels.SwiGLU(target)

    def construct(self, x: Tensor) -> Tensor:
        """Map x [B, T, H] to [B, T, H]."""
        return self.down_proj(self.act(self.gate_proj(x), self.up_proj(x)))


class LlamaLayer(nn.Cell):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        ffn_size: int,
        *,
        qkv_bias: bool,
        qk_norm: bool,
        norm_eps: float,
        init_std: float,
        residual_std: float,
        dropout: float,
        dropout_state: DropoutState | None,
        target: str | None,
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size, eps=norm_eps, target=target)
        self.self_attn = LlamaAttention(
            hidden_size,
            num_heads,
            num_kv_heads,
            head_dim,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            norm_eps=norm_eps,
            init_std=init_std,
            residual_std=residual_std,
            target=target,
        )
        self.post_attention_layernorm = RMSNorm(hidden_size, eps=norm_eps, target=target)
        self.mlp = LlamaMLP(
            hidden_size, ffn_size, init_std=init_std, residual_std=residual_std, target=target
        )
        self.attn_dropout = Dropout(dropout, dropout_state) if dropout_state else None
        self.mlp_dropout = Dropout(dropout, dropout_state) if dropout_state else None

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None = None) -> Tensor:
        """Map x [B, T, H] to [B, T, H]; the other arguments are those of `LlamaAttention`."""
        y = self.self_attn(self.input_layernorm(x), cos, sin, mask)
        x = x + (y if self.attn_dropout is None else self.attn_dropout(y))
        y = self.mlp(self.post_attention_layernorm(x))
        return x + (y if self.mlp_dropout is None else self.mlp_dropout(y))


class LlamaModel(nn.Cell):
    """Embedding, layers and final norm."""

    chained_blocks = ("layers",)  # see ms_zero.memory.segment

    def __init__(
        self,
        embed_tokens: Embedding,
        rotary_emb: RotaryTables,
        layers: list[nn.Cell],
        norm: RMSNorm,
        dropout: Dropout | None,
        target: str | None,
    ) -> None:
        super().__init__()
        self.embed_tokens = embed_tokens
        self.rotary_emb = rotary_emb
        self.document_mask = kernels.DocumentMask(target)
        self.layers = nn.CellList(layers)
        self.norm = norm
        self.dropout = dropout

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Map int32 ids [B, T] to hidden states [B, T, H]; the other arguments are those of `Llama`."""
        cos, sin = self.rotary_emb(input_ids, position_ids)
        x = self.embed_tokens(input_ids)
        if self.dropout is not None:
            x = self.dropout(x)
        mask = None if document_starts is None else self.document_mask(document_starts, x)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


class Llama(nn.Cell):
    """Llama-style language model: int32 input_ids [B, T] -> fp32 logits [B, T, vocab_size].

    Parameters are created without storage; see `ms_zero.models.initialise`. target: device target of the
    kernels, None for the current one. Raises UserError when num_kv_heads does not divide num_heads, when
    head_dim is odd, for a dropout outside [0, 1) and, when called, for T > max_seq_len.

    dropout: as that of `GPT`, in the same three places.
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
        ffn_hidden_size: int,
        max_seq_len: int,
        norm_eps: float = 1e-5,
        init_std: float = 0.02,
        tie_embeddings: bool = False,
        rope_theta: float = 10000.0,
        rope_scaling: RopeScaling | None = None,
        qkv_bias: bool = False,
        qk_norm: bool = False,
        dropout: float = 0.0,
        target: str | None = None,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise UserError(f"model: num_kv_heads {num_kv_heads} does not divide num_heads {num_heads}")
        if head_dim % 2:
            raise UserError(f"model: head_dim {head_dim} is odd: rotary positions need an even one")
        self.dropout_state = DropoutState() if dropout else None
        layers = [
            LlamaLayer(
                hidden_size,
                num_heads,
                num_kv_heads,
                head_dim,
                ffn_hidden_size,
                qkv_bias=qkv_bias,
                qk_norm=qk_norm,
                norm_eps=norm_eps,
                init_std=init_std,
                residual_std=init_std / math.sqrt(2 * num_layers),
                dropout=dropout,
                dropout_state=self.dropout_state,
                target=target,
            )
            for _ in range(num_layers)
        ]
        self.model = LlamaModel(
            Embedding(vocab_size, hidden_size, init_std=init_std),
            RotaryTables(head_dim, max_seq_len, theta=rope_theta, scaling=rope_scaling),
            layers,
            RMSNorm(hidden_size, eps=norm_eps, target=target),
            Dropout(dropout, self.dropout_state) if self.dropout_state else None,
            target,
        )
        shared = self.model.embed_tokens.weight if tie_embeddings else None
        self.lm_head = Linear(hidden_size, vocab_size, bias=False, init_std=init_std, weight=shared)
        name_parameters_by_path(self)
        name_dropouts_by_path(self)

    def construct(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
    ) -> Tensor:
        """Return the logits.

        position_ids: int32 [T] or [B, T]; None: 0 ... T-1. document_starts: int32 [B, T], the first position
        that each token may attend to; None: the first of the sequence.
        """
        hidden = self.model(input_ids, position_ids, document_starts)
        return self.lm_head(hidden).astype(ms.float32)
