"""FLOPs of a decoder-only transformer: an exact count of its matrix multiplications.

A multiply-add is 2 FLOPs. Per token and layer, forward, with h = hidden_size, q = num_heads * head_dim,
k = num_kv_heads * head_dim, f = ffn_hidden_size, s = seq_len, V = vocab_size::

    projections  2 h (q + 2k) + 2 q h        query, key, value; output
    attention    4 q s                       scores and weighted values, all s keys
    mlp          4 h f  (6 h f when gated)   two matrices, or three (SwiGLU)
    head         2 h V                       once per token, not per layer

Backward multiplies twice per forward multiplication (inputs and weights), so training is three times forward;
full recompute of the layers adds their forward once more. The embedding lookup, norms, biases, activations,
softmax and rotary positions are no matrix multiplications and are left out.

Attention counts every key, also those that a causal mask hides. This is the convention of Narayanan et al.
(SC21), whose formula it equals for GPT (q = k = h, f = 4h, B sequences, L layers)::

    training                      72 B s L h^2 (1 + s/(6h) + V/(12 L h))
    training with full recompute  96 B s L h^2 (1 + s/(6h) + V/(16 L h))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ms_zero.config import GPTConfig, LlamaConfig


@dataclass(frozen=True)
class ForwardFlops:
    """Matrix-multiplication FLOPs of one forward pass, per token, summed over the layers."""

    projections: int
    attention: int
    mlp: int
    head: int

    @property
    def layers(self) -> int:
        """All transformer layers without the head."""
        return self.projections + self.attention + self.mlp

    @property
    def train(self) -> int:
        """Forward and backward without recompute: the model FLOPs that MFU counts."""
        return 3 * (self.layers + self.head)

    @property
    def train_with_full_recompute(self) -> int:
        """Forward, backward and a second forward of the layers; the head is never recomputed."""
        return self.train + self.layers


def forward_flops_per_token(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    ffn_hidden_size: int,
    gated_mlp: bool,
    seq_len: int,
) -> ForwardFlops:
    """Count one forward pass per token; see the module for the formulas.

    Args:
        vocab_size: columns of the head, padding included.
        hidden_size: width of the residual stream.
        num_layers: transformer layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; equal to ``num_heads`` without grouped-query attention.
        head_dim: width of one head.
        ffn_hidden_size: inner width of the MLP.
        gated_mlp: True for SwiGLU (three matrices), False for two matrices.
        seq_len: tokens that attend to each other.
    """
    query, key_value = num_heads * head_dim, num_kv_heads * head_dim
    return ForwardFlops(
        projections=num_layers * 2 * hidden_size * (2 * query + 2 * key_value),
        attention=num_layers * 4 * query * seq_len,
        mlp=num_layers * 2 * (3 if gated_mlp else 2) * hidden_size * ffn_hidden_size,
        head=2 * hidden_size * vocab_size,
    )


def model_flops_per_token(model: GPTConfig | LlamaConfig, seq_len: int) -> ForwardFlops:
    """Count one forward pass per token of a configured model."""
    if model.family == "llama":
        heads = {"num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    else:
        assert model.family == "gpt", model.family
        heads = {"num_kv_heads": model.num_heads, "head_dim": model.hidden_size // model.num_heads}
    return forward_flops_per_token(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        gated_mlp=model.family == "llama",
        seq_len=seq_len,
        **heads,
    )


def train_flops_per_token(model: GPTConfig | LlamaConfig, seq_len: int) -> int:
    """Model FLOPs of training per token, forward and backward: 6 per matrix parameter plus attention."""
    return model_flops_per_token(model, seq_len).train
