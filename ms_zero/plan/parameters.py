"""Exact parameter counts of a model shape: in all, active per token, per layer, and on one device.

With h = hidden_size, q, k, v the widths of all query, key and value heads, c of the weighted values, f of
the MLP: attention has h (q + k + v) + c h, an MLP 2 h f or 3 h f (gated), a norm h (2 h with a bias). Latent
attention (DeepSeek-V2) compresses: h r_q + r_q q for queries, h (r_kv + rope) + r_kv heads (nope + v) for
keys and values, and a norm of each compressed vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ms_zero.plan.shapes import Attention, Experts, Latent, LayerShape, Mlp, ModelShape, Norm


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
        attention=_count(_attention_weights(layer.attention, hidden_size, 1)),
        mlp=_count(_mlp_weights(layer.mlp, hidden_size, 1)) if layer.mlp else 0,
        experts=experts.num_experts * expert if experts else 0,
        active_experts=experts.top_k * expert if experts else 0,
        shared=_count(_shared_weights(experts, hidden_size, 1)) if experts else 0,
        router=_count(_router_weights(experts, hidden_size)) if experts else 0,
        norms=layer.norms * norm_parameters(norm, hidden_size),
    )


def norm_parameters(norm: Norm, width: int) -> int:
    """Parameters of one norm."""
    return _norm_vectors(norm) * width


def _norm_vectors(norm: Norm) -> int:
    return {"layernorm": 2, "rmsnorm": 1, "none": 0}[norm]


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


class Weight(NamedTuple):
    """A parameter on one device, before data-parallel sharding.

    Attributes:
        rows: its first dim.
        columns: elements of its other dims, 1 of a vector.
        is_cut: whether tp cuts it; every tp rank has all of another one.
        is_norm: whether it belongs to a norm or a router, which compute in fp32 under every policy.
        is_expert: whether it belongs to the routed experts, and ep cuts it.
    """

    rows: int
    columns: int = 1
    is_cut: bool = False
    is_norm: bool = False
    is_expert: bool = False

    @property
    def elements(self) -> int:
        """Of the tensor."""
        return self.rows * self.columns


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
    dense = _count(layer_weights(layer, hidden_size, norm, tp=tp))
    experts = layer.experts
    if experts is None:
        return DeviceParameters(dense=dense, experts=0)
    routed = experts.num_experts // ep * 3 * hidden_size * experts.ffn_hidden_size // tp
    return DeviceParameters(dense=dense, experts=routed)


def layer_weights(layer: LayerShape, hidden_size: int, norm: Norm, *, tp: int) -> Iterator[Weight]:
    """Every parameter of a layer on a tp rank, but the routed experts."""
    for _ in range(layer.norms):
        yield from norm_weights(norm, hidden_size)
    yield from _attention_weights(layer.attention, hidden_size, tp)
    if layer.mlp:
        yield from _mlp_weights(layer.mlp, hidden_size, tp)
    if layer.experts:
        yield from _router_weights(layer.experts, hidden_size)
        yield from _shared_weights(layer.experts, hidden_size, tp)


def norm_weights(norm: Norm, width: int) -> Iterator[Weight]:
    """The vectors of one norm."""
    for _ in range(_norm_vectors(norm)):
        yield Weight(width, is_norm=True)


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


def _attention_weights(attention: Attention, hidden_size: int, tp: int) -> Iterator[Weight]:
    heads = attention.num_heads // tp
    q_size, context = heads * attention.head_dim, heads * attention.value_head_dim
    yield Weight(hidden_size, context, is_cut=True)
    if attention.out_bias:
        yield Weight(hidden_size)
    if attention.latent is not None:
        yield from _latent_weights(attention, attention.latent, hidden_size, heads)
        return
    kv_heads = max(1, attention.num_kv_heads // tp)
    k_size, v_size = kv_heads * attention.head_dim, kv_heads * attention.value_head_dim
    for size in (q_size, k_size, v_size):
        yield Weight(size, hidden_size, is_cut=True)
        if attention.qkv_bias:
            yield Weight(size, is_cut=True)
    if attention.qk_norm == "head":
        yield from 2 * (Weight(attention.head_dim, is_norm=True),)
    elif attention.qk_norm == "full":
        yield from (Weight(size, is_cut=True, is_norm=True) for size in (q_size, k_size))


def _latent_weights(
    attention: Attention, latent: Latent, hidden_size: int, heads: int
) -> Iterator[Weight]:
    if latent.q_rank:
        yield Weight(latent.q_rank, hidden_size)
        yield Weight(latent.q_rank, is_norm=True)
    yield Weight(heads * attention.head_dim, latent.q_rank or hidden_size, is_cut=True)
    yield Weight(latent.kv_rank + latent.rope_head_dim, hidden_size)
    yield Weight(latent.kv_rank, is_norm=True)
    yield Weight(heads * (latent.nope_head_dim + attention.value_head_dim), latent.kv_rank, is_cut=True)


def _mlp_weights(mlp: Mlp, hidden_size: int, tp: int) -> Iterator[Weight]:
    width = mlp.ffn_hidden_size // tp
    for _ in range(2 if mlp.gated else 1):
        yield Weight(width, hidden_size, is_cut=True)
        if mlp.bias:
            yield Weight(width, is_cut=True)
    yield Weight(hidden_size, width, is_cut=True)
    if mlp.bias:
        yield Weight(hidden_size)


def expert_weights(experts: Experts, hidden_size: int, *, tp: int, ep: int) -> Iterator[Weight]:
    """The stacked weights of the routed experts of a rank."""
    size = experts.ffn_hidden_size // tp * hidden_size
    for _ in range(3):
        yield Weight(experts.num_experts // ep, size, is_cut=True, is_expert=True)


def _router_weights(experts: Experts, hidden_size: int) -> Iterator[Weight]:
    yield Weight(experts.num_experts, hidden_size, is_norm=True)
    if experts.router_bias:
        yield Weight(experts.num_experts, is_norm=True)


def _shared_weights(experts: Experts, hidden_size: int, tp: int) -> Iterator[Weight]:
    width = experts.shared_ffn_hidden_size // tp
    if width:
        yield from 2 * (Weight(width, hidden_size, is_cut=True),)
        yield Weight(hidden_size, width, is_cut=True)
    if experts.shared_gate:
        yield Weight(1, hidden_size)


def _count(weights: Iterable[Weight]) -> int:
    return sum(weight.elements for weight in weights)
