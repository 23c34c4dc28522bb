"""Exact parameter counts of a model shape: in all, active per token, per layer, and on one device.

With h = hidden_size, q, k, v the widths of all query, key and value heads, c of the weighted values, f of
the MLP: attention has h (q + k + v) + c h, an MLP 2 h f or 3 h f (gated), a norm h (2 h with a bias). Latent
attention (DeepSeek-V2) compresses: h r_q + r_q q for queries, h (r_kv + rope) + r_kv heads (nope + v) for
keys and values, and a norm of each compressed vector.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ms_zero.plan.shapes import Attention, Experts, LayerShape, Mlp, ModelShape, Norm


@dataclass(frozen=True, kw_only=True)
class LayerParameters:
    """Parameters of one layer by part.

    ``experts`` are all routed experts, ``active_experts`` those that one token visits.
    """

    attention: int
    mlp: int
    experts: int
    active_experts: int
    shared: int
    router: int
    norms: int

    @property
    def dense(self) -> int:
        """All but the routed experts."""
        return self.attention + self.mlp + self.shared + self.router + self.norms

    @property
    def total(self) -> int:
        """All."""
        return self.dense + self.experts

    @property
    def active(self) -> int:
        """What one token uses."""
        return self.dense + self.active_experts


@dataclass(frozen=True)
class Row:
    """One line of a parameter table: ``count`` equal parts named ``name``."""

    name: str
    count: int
    each: int
    active_each: int

    @property
    def total(self) -> int:
        """Parameters of all of them."""
        return self.count * self.each


def layer_parameters(layer: LayerShape, hidden_size: int, norm: Norm) -> LayerParameters:
    """Count one layer."""
    experts = layer.experts
    expert = 3 * hidden_size * experts.ffn_hidden_size if experts else 0
    return LayerParameters(
        attention=_attention(layer.attention, hidden_size),
        mlp=_mlp(layer.mlp, hidden_size) if layer.mlp else 0,
        experts=experts.num_experts * expert if experts else 0,
        active_experts=experts.top_k * expert if experts else 0,
        shared=_shared(experts, hidden_size) if experts else 0,
        router=_router(experts, hidden_size) if experts else 0,
        norms=layer.norms * norm_parameters(norm, hidden_size),
    )


def norm_parameters(norm: Norm, width: int) -> int:
    """Parameters of one norm."""
    return {"layernorm": 2, "rmsnorm": 1, "none": 0}[norm] * width


def embedding_parameters(shape: ModelShape) -> int:
    """Token and position embeddings."""
    return (shape.vocab_size + shape.learned_positions) * shape.hidden_size


def head_parameters(shape: ModelShape) -> int:
    """The output head and what belongs to it; a tied head has no matrix of its own."""
    own = 0 if shape.tie_embeddings else shape.vocab_size * shape.hidden_size
    norm = norm_parameters(shape.norm, shape.hidden_size) if shape.final_norm else 0
    return own + norm + shape.other_parameters


def count_parameters(shape: ModelShape) -> int:
    """All parameters, shared ones once."""
    return sum(row.total for row in parameter_table(shape))


def active_parameters(shape: ModelShape) -> int:
    """Parameters that one token uses: all but the experts that it does not visit."""
    return sum(row.count * row.active_each for row in parameter_table(shape))


def parameter_table(shape: ModelShape) -> tuple[Row, ...]:
    """Embedding, layers and head; equal neighbouring layers are one row."""
    embedding, head = embedding_parameters(shape), head_parameters(shape)
    rows = [Row("embedding", 1, embedding, embedding)]
    first = 0
    for count, layer in shape.blocks:
        counts = layer_parameters(layer, shape.hidden_size, shape.norm)
        last = first + count - 1
        name = f"layer {first}" if count == 1 else f"layers {first}-{last}"
        rows.append(Row(name, count, counts.total, counts.active))
        first += count
    return (*rows, Row("norm and head", 1, head, head))


@dataclass(frozen=True, kw_only=True)
class DeviceParameters:
    """Parameters of one layer on one device, before data-parallel sharding.

    ``dense`` is replicated over data- and context-parallel ranks, ``experts`` over those without ``ep``.
    """

    dense: int
    experts: int

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


def device_layer_parameters(
    layer: LayerShape, hidden_size: int, norm: Norm, *, tp: int, ep: int
) -> DeviceParameters:
    """Count what one of ``tp`` x ``ep`` ranks holds of a layer.

    Matrices are split by tp (column then row), together with the biases of column-split ones. Norms,
    routers, the down-projections of latent attention and the biases of row-split matrices are on every rank.
    With fewer key-value heads than tp each rank still holds one head.
    """
    experts = layer.experts
    dense = _device_attention(layer.attention, hidden_size, tp)
    dense += layer.norms * norm_parameters(norm, hidden_size)
    if layer.mlp:
        biases = _up_matrices(layer.mlp) * layer.mlp.ffn_hidden_size // tp + hidden_size
        matrices = (_up_matrices(layer.mlp) + 1) * hidden_size * layer.mlp.ffn_hidden_size // tp
        dense += matrices + (biases if layer.mlp.bias else 0)
    if experts is None:
        return DeviceParameters(dense=dense, experts=0)
    dense += _router(experts, hidden_size) + 3 * hidden_size * experts.shared_ffn_hidden_size // tp
    dense += hidden_size if experts.shared_gate else 0
    routed = experts.num_experts // ep * 3 * hidden_size * experts.ffn_hidden_size // tp
    return DeviceParameters(dense=dense, experts=routed)


def device_embedding_parameters(shape: ModelShape, *, tp: int) -> int:
    """Embedding of one tp rank: rows split (and padded), positions whole."""
    rows = -(-shape.vocab_size // tp)
    return (rows + shape.learned_positions) * shape.hidden_size


def device_head_parameters(shape: ModelShape, *, tp: int, has_embedding: bool) -> int:
    """Norm and head of one tp rank; a tied head on another stage than the embedding is a second copy."""
    matrix = -(-shape.vocab_size // tp) * shape.hidden_size
    norm = norm_parameters(shape.norm, shape.hidden_size) if shape.final_norm else 0
    own = 0 if shape.tie_embeddings and has_embedding else matrix
    return own + norm + shape.other_parameters


def _attention(attention: Attention, hidden_size: int) -> int:
    return sum(_attention_parts(attention, hidden_size, tp=1))


def _device_attention(attention: Attention, hidden_size: int, tp: int) -> int:
    return sum(_attention_parts(attention, hidden_size, tp=tp))


def _attention_parts(attention: Attention, hidden_size: int, *, tp: int) -> Iterator[int]:
    """Sizes of the tensors of an attention block on one tp rank."""
    heads = attention.num_heads // tp
    kv_heads = max(1, attention.num_kv_heads // tp)
    q_size, context = heads * attention.head_dim, heads * attention.value_head_dim
    yield context * hidden_size
    if attention.out_bias:
        yield hidden_size
    latent = attention.latent
    if latent is not None:
        if latent.q_rank:
            yield hidden_size * latent.q_rank + latent.q_rank
        yield (latent.q_rank or hidden_size) * q_size
        yield hidden_size * (latent.kv_rank + latent.rope_head_dim) + latent.kv_rank
        yield latent.kv_rank * heads * (latent.nope_head_dim + attention.value_head_dim)
        return
    k_size, v_size = kv_heads * attention.head_dim, kv_heads * attention.value_head_dim
    yield hidden_size * (q_size + k_size + v_size)
    if attention.qkv_bias:
        yield q_size + k_size + v_size
    if attention.qk_norm == "head":
        yield 2 * attention.head_dim
    elif attention.qk_norm == "full":
        yield q_size + k_size


def _up_matrices(mlp: Mlp) -> int:
    return 2 if mlp.gated else 1


def _mlp(mlp: Mlp, hidden_size: int) -> int:
    ups = _up_matrices(mlp)
    biases = ups * mlp.ffn_hidden_size + hidden_size if mlp.bias else 0
    return (ups + 1) * hidden_size * mlp.ffn_hidden_size + biases


def _shared(experts: Experts, hidden_size: int) -> int:
    gate = hidden_size if experts.shared_gate else 0
    return 3 * hidden_size * experts.shared_ffn_hidden_size + gate


def _router(experts: Experts, hidden_size: int) -> int:
    return hidden_size * experts.num_experts + (experts.num_experts if experts.router_bias else 0)
