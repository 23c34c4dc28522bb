"""The shape of a decoder-only transformer: all that memory, FLOPs and traffic need to know of a model.

A shape is a list of blocks, each a number of equal layers. It has no weights and builds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ms_zero.config import GPTConfig, ModelConfig, MoEConfig

Norm = Literal["layernorm", "rmsnorm", "none"]


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Multi-head latent attention (DeepSeek-V2): keys and values come from one compressed vector a token.

    Args:
        q_rank: width of the compressed query; 0: queries are not compressed.
        kv_rank: width of the compressed key and value.
        nope_head_dim: part of a query or key head without positions.
        rope_head_dim: part with rotary positions; its key is shared by all heads.

    """

    q_rank: int
    kv_rank: int
    nope_head_dim: int
    rope_head_dim: int


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Self-attention of one layer.

    Args:
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: width of a query or key head.
        value_head_dim: width of a value head.
        qkv_bias: whether query, key and value projections have biases.
        out_bias: whether the output projection has a bias.
        qk_norm: norm of queries and keys: none, per head (one weight of head_dim each), or over all heads.
        latent: multi-head latent attention; None for plain projections.
        window: keys that a query sees at most; None: all before it.
        rotary: whether positions are rotary.

    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    latent: Latent | None = None
    window: int | None = None
    rotary: bool = True

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def k_size(self) -> int:
        """Width of all key heads together."""
        return self.num_kv_heads * self.head_dim

    @property
    def v_size(self) -> int:
        """Width of all value heads together."""
        return self.num_kv_heads * self.value_head_dim

    @property
    def context_size(self) -> int:
        """Width of the weighted values: what the output projection reads."""
        return self.num_heads * self.value_head_dim


@dataclass(frozen=True, kw_only=True)
class Mlp:
    """A dense MLP: two matrices, or three when gated."""

    ffn_hidden_size: int
    gated: bool
    bias: bool = False


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of gated MLPs without biases.

    Args:
        num_experts: routed experts.
        top_k: experts that each token visits.
        ffn_hidden_size: inner width of one routed expert.
        shared_ffn_hidden_size: inner width of all shared experts together; 0: none.
        shared_gate: whether a vector gates the shared experts (Qwen2-MoE).
        router_bias: whether the router has a bias per expert (DeepSeek-V3).
        capacity_factor: tokens of a sequence that an expert takes at most, over the even share; None: all.

    """

    num_experts: int
    top_k: int
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    router_bias: bool = False
    capacity_factor: float | None = None


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """One transformer layer; it has either a dense MLP or experts. ``norms``: norms over hidden_size."""

    attention: Attention
    mlp: Mlp | None = None
    experts: Experts | None = None
    norms: int = 2

    def __post_init__(self) -> None:
        assert (self.mlp is None) != (self.experts is None)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A whole decoder-only model.

    Args:
        name: how to call it in reports.
        family: gpt, llama or moe, or the architecture of a Hugging Face file.
        vocab_size: rows of the embedding, padding included.
        hidden_size: width of the residual stream.
        blocks: (number of equal layers, layer) in order.
        max_seq_len: longest sequence in tokens.
        norm: kind of all norms over hidden_size; layernorm has a bias.
        learned_positions: rows of the position embedding; 0: none.
        tie_embeddings: whether the head shares the embedding.
        final_norm: whether a norm stands before the head.
        other_parameters: exact count of parameters outside this description, such as a head's bias.
        note: what a user should know about how the shape was found; "" when there is nothing to say.

    """

    name: str
    family: str
    vocab_size: int
    hidden_size: int
    blocks: tuple[tuple[int, LayerShape], ...]
    max_seq_len: int
    norm: Norm
    learned_positions: int = 0
    tie_embeddings: bool = False
    final_norm: bool = True
    other_parameters: int = 0
    note: str = ""

    @cached_property
    def num_layers(self) -> int:
        """All layers."""
        return sum(count for count, _ in self.blocks)

    @property
    def is_moe(self) -> bool:
        """Whether any layer has experts."""
        return any(layer.experts is not None for _, layer in self.blocks)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer that has them (the smallest number, if layers differ); 0 without any."""
        counts = [layer.experts.num_experts for _, layer in self.blocks if layer.experts is not None]
        return min(counts, default=0)

    def layers(self) -> Iterator[LayerShape]:
        """Every layer in order."""
        for count, layer in self.blocks:
            for _ in range(count):
                yield layer

    def layers_between(self, start: int, stop: int) -> tuple[tuple[int, LayerShape], ...]:
        """The layers ``[start, stop)`` as (number, layer) in order."""
        found, first = [], 0
        for count, layer in self.blocks:
            overlap = min(stop, first + count) - max(start, first)
            if overlap > 0:
                found.append((overlap, layer))
            first += count
        return tuple(found)


def from_config(model: ModelConfig, name: str = "") -> ModelShape:
    """The shape of a model that the training config builds."""
    if model.family == "gpt":
        return _from_gpt(model, name or "gpt")
    if model.family == "moe":
        return _from_moe(model, name or "moe")
    assert model.family == "llama", model.family
    attention = Attention(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        value_head_dim=model.head_dim,
        qkv_bias=model.qkv_bias,
        qk_norm="head" if model.qk_norm else "none",
    )
    layer = LayerShape(attention=attention, mlp=Mlp(ffn_hidden_size=model.ffn_hidden_size, gated=True))
    return ModelShape(
        name=name or "llama",
        family="llama",
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        blocks=((model.num_layers, layer),),
        max_seq_len=model.max_seq_len,
        norm="rmsnorm",
        tie_embeddings=model.tie_embeddings,
    )


def _from_gpt(model: GPTConfig, name: str) -> ModelShape:
    head_dim = model.hidden_size // model.num_heads
    attention = Attention(
        num_heads=model.num_heads,
        num_kv_heads=model.num_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        qkv_bias=True,
        out_bias=True,
        rotary=False,
    )
    mlp = Mlp(ffn_hidden_size=model.ffn_hidden_size, gated=False, bias=True)
    return ModelShape(
        name=name,
        family="gpt",
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        blocks=((model.num_layers, LayerShape(attention=attention, mlp=mlp)),),
        max_seq_len=model.max_seq_len,
        norm="layernorm",
        learned_positions=model.max_seq_len,
        tie_embeddings=model.tie_embeddings,
    )


def _from_moe(model: MoEConfig, name: str) -> ModelShape:
    attention = _expert_model_attention(model)
    experts = Experts(
        num_experts=model.num_experts,
        top_k=model.experts_per_token,
        ffn_hidden_size=model.expert_ffn_hidden_size,
        shared_ffn_hidden_size=model.shared_ffn_hidden_size,
        shared_gate=model.shared_gate,
        router_bias=model.router_bias,
        capacity_factor=model.capacity_factor,
    )
    blocks = [(model.num_layers - model.dense_layers, LayerShape(attention=attention, experts=experts))]
    if model.dense_layers:
        mlp = Mlp(ffn_hidden_size=model.ffn_hidden_size, gated=True)
        blocks.insert(0, (model.dense_layers, LayerShape(attention=attention, mlp=mlp)))
    return ModelShape(
        name=name,
        family="moe",
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        blocks=tuple(block for block in blocks if block[0]),
        max_seq_len=model.max_seq_len,
        norm="rmsnorm",
        tie_embeddings=model.tie_embeddings,
    )


def _expert_model_attention(model: MoEConfig) -> Attention:
    latent = model.latent
    if latent is None:
        return Attention(
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            value_head_dim=model.head_dim,
            qkv_bias=model.qkv_bias,
            qk_norm="head" if model.qk_norm else "none",
        )
    return Attention(
        num_heads=model.num_heads,
        num_kv_heads=model.num_heads,
        head_dim=latent.nope_head_dim + latent.rope_head_dim,
        value_head_dim=latent.value_head_dim,
        latent=Latent(
            q_rank=latent.q_rank,
            kv_rank=latent.kv_rank,
            nope_head_dim=latent.nope_head_dim,
            rope_head_dim=latent.rope_head_dim,
        ),
    )
