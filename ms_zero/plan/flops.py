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

``causal=True`` counts the keys that a query may see, (s + 1) / 2 on average: what a kernel that skips masked
blocks computes. With experts a token counts the ones that it visits, the shared ones and the router.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ms_zero.plan.shapes import Attention, LayerShape, ModelShape, from_config

if TYPE_CHECKING:
    from ms_zero.config import ModelConfig


@dataclass(frozen=True)
class LayerFlops:
    """Matrix-multiplication FLOPs of one forward pass through one layer, per token."""

    projections: int
    attention: float
    mlp: int

    @property
    def total(self) -> float:
        """The whole layer."""
        return self.projections + self.attention + self.mlp

    def recomputed(self, kind: str) -> float:
        """What backward runs again: kind none, selective (the core of attention) or full."""
        return {"none": 0, "selective": self.attention, "full": self.total}[kind]


@dataclass(frozen=True)
class ForwardFlops:
    """Matrix-multiplication FLOPs of one forward pass, per token, summed over the layers."""

    projections: int
    attention: float
    mlp: int
    head: int

    @property
    def layers(self) -> float:
        """All transformer layers without the head."""
        return self.projections + self.attention + self.mlp

    @property
    def train(self) -> float:
        """Forward and backward without recompute: the model FLOPs that MFU counts."""
        return 3 * (self.layers + self.head)

    @property
    def train_with_full_recompute(self) -> float:
        """Forward, backward and a second forward of the layers; the head is never recomputed."""
        return self.train + self.layers


def layer_flops(layer: LayerShape, hidden_size: int, seq_len: int, *, causal: bool = False) -> LayerFlops:
    """Count one layer; ``seq_len`` tokens attend to each other, fewer where the layer has a window."""
    attention, experts = layer.attention, layer.experts
    keys = _keys_seen(seq_len, attention.window, causal)
    if layer.mlp is not None:
        mlp = 2 * (3 if layer.mlp.gated else 2) * hidden_size * layer.mlp.ffn_hidden_size
    else:
        width = experts.top_k * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
        mlp = 2 * hidden_size * (3 * width + experts.num_experts + experts.shared_gate)
    return LayerFlops(
        projections=2 * _projection_elements(attention, hidden_size),
        attention=2 * (attention.q_size + attention.context_size) * keys,
        mlp=mlp,
    )


def head_flops(shape: ModelShape) -> int:
    """The output head, per token."""
    return 2 * shape.hidden_size * shape.vocab_size


def shape_flops(shape: ModelShape, seq_len: int, *, causal: bool = False) -> ForwardFlops:
    """Count one forward pass per token of a model shape."""
    width = shape.hidden_size
    layers = [(count, layer_flops(layer, width, seq_len, causal=causal)) for count, layer in shape.blocks]
    return ForwardFlops(
        projections=sum(count * flops.projections for count, flops in layers),
        attention=sum(count * flops.attention for count, flops in layers),
        mlp=sum(count * flops.mlp for count, flops in layers),
        head=head_flops(shape),
    )


@dataclass(frozen=True)
class SelectiveOverhead:
    """FLOPs that recomputing the core of attention adds, as a share of a step without recompute.

    ``published`` follows Korthikanti et al. (2022), who count s/(6h) more; ``exact`` counts each matrix
    multiplication that runs again.
    """

    published: float
    exact: float


def selective_overhead(shape: ModelShape, seq_len: int) -> SelectiveOverhead:
    """What selective recompute costs, by the paper's convention and by an exact count."""
    term = seq_len / (6 * shape.hidden_size)
    flops = shape_flops(shape, seq_len)
    return SelectiveOverhead(term / (1 + term), flops.attention / (3 * flops.layers))


def _keys_seen(seq_len: int, window: int | None, causal: bool) -> float:
    """Keys per query on average: an integer unless ``causal``."""
    if not causal:
        return seq_len if window is None else min(seq_len, window)
    span = seq_len if window is None else min(seq_len, window)
    # The first `span` queries see 1 ... span keys, the others span each.
    return (span * (span + 1) / 2 + (seq_len - span) * span) / max(1, seq_len)


def _projection_elements(attention: Attention, hidden_size: int) -> int:
    """Elements of the matrices around the core of attention."""
    out = attention.context_size * hidden_size
    latent = attention.latent
    if latent is None:
        return hidden_size * (attention.q_size + attention.k_size + attention.v_size) + out
    query = hidden_size * latent.q_rank + (latent.q_rank or hidden_size) * attention.q_size
    up = attention.num_heads * (latent.nope_head_dim + attention.value_head_dim)
    return query + hidden_size * (latent.kv_rank + latent.rope_head_dim) + latent.kv_rank * up + out


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


def model_flops_per_token(model: ModelConfig, seq_len: int) -> ForwardFlops:
    """Count one forward pass per token of a configured model."""
    if model.family == "moe":
        return shape_flops(from_config(model), seq_len)
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


def train_flops_per_token(model: ModelConfig, seq_len: int) -> int:
    """Model FLOPs of training per token, forward and backward: 6 per matrix parameter plus attention."""
    return model_flops_per_token(model, seq_len).train
