"""Seconds that one microbatch takes in one layer, or in the head, of one device: by phase and cause.

Matrix multiplications run at a share of the device's peak, or at the rate at which their weights can be read
if that is slower; norms, residuals, activations and rotary positions at a share of its memory bandwidth.
"""

from __future__ import annotations

from operator import add
from typing import Literal, NamedTuple

from ms_zero.plan.efficiency import Efficiency
from ms_zero.plan.flops import head_flops, layer_flops
from ms_zero.plan.layout import Layout
from ms_zero.plan.network import Network
from ms_zero.plan.parameters import device_layer_parameters
from ms_zero.plan.shapes import LayerShape, ModelShape

_FP32 = 4
# Backward of fused attention computes the scores again: five products for two.
_FUSED_ATTENTION_BACKWARD = 2.5


class Seconds(NamedTuple):
    """Seconds by cause; tp, cp and ep are communication that nothing hides."""

    compute: float = 0.0
    recompute: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self)

    def plus(self, other: Seconds) -> Seconds:
        """Sum by cause."""
        return Seconds(*map(add, self, other))

    def times(self, count: float) -> Seconds:
        """A number of them."""
        return Seconds(*(count * part for part in self))


class Work(NamedTuple):
    """One microbatch: forward; backward without weight gradients, recompute included; weight gradients."""

    forward: Seconds = Seconds()
    backward: Seconds = Seconds()
    weight: Seconds = Seconds()

    def computing(self) -> tuple[float, float]:
        """Seconds of forward and of all backward without communication: what can hide other transfers."""
        backward = self.backward.compute + self.backward.recompute + self.weight.compute
        return self.forward.compute, backward

    def plus(self, other: Work) -> Work:
        """Sum by phase and cause."""
        return Work(*(mine.plus(theirs) for mine, theirs in zip(self, other, strict=True)))

    def times(self, count: float) -> Work:
        """A number of them."""
        return Work(*(part.times(count) for part in self))


class Rates(NamedTuple):
    """What a device computes and reads per second, before any efficiency."""

    matmul: float
    memory: float


def layer_work(
    layer: LayerShape,
    shape: ModelShape,
    layout: Layout,
    rates: Rates,
    network: Network,
    efficiency: Efficiency,
    recompute: Literal["none", "selective", "full"],
) -> Work:
    """One layer and one microbatch on one device; ``recompute`` says what this layer runs again."""
    tokens = layout.micro_batch_size * layout.seq_len / layout.cp
    products = _product_seconds(layer, shape, layout, tokens, rates, efficiency)
    attention = _attention_seconds(layer, shape, layout, tokens, rates, efficiency)
    vector = _vector_bytes(layer, shape, layout, tokens) / (rates.memory * efficiency.memory)
    vector += efficiency.layer_seconds
    tp = _tensor_seconds(shape, layout, tokens, network)
    context = _context_seconds(layer, layout, tokens, network)
    ep = efficiency.imbalance * _expert_seconds(layer, shape, layout, tokens, network)
    backward_attention = attention * (_FUSED_ATTENTION_BACKWARD if layout.flash_attention else 2)
    hidden = efficiency.cp_overlap if layout.passes_context else 0.0
    # The gradients of K and V go round as well, in fp32; else as many gradients are exchanged as values.
    more = 1 + _FP32 / layout.precision.activation if layout.passes_context else 1.0
    forward = Seconds(
        compute=products + attention + vector, tp=tp, ep=ep, cp=max(0.0, context - hidden * attention)
    )
    again = recompute == "full"
    backward = Seconds(
        compute=products + backward_attention + 2 * vector,
        recompute={"none": 0.0, "selective": attention, "full": forward.compute}[recompute],
        tp=tp * (1 + again),
        ep=ep * (1 + again),
        cp=max(0.0, more * context - hidden * backward_attention)
        + (recompute in ("selective", "full")) * forward.cp,
    )
    return Work(forward, backward, Seconds(compute=products))


def head_work(
    shape: ModelShape, layout: Layout, rates: Rates, network: Network, efficiency: Efficiency
) -> Work:
    """Head and loss of one microbatch; logits are split by tp and never computed again."""
    tokens = layout.micro_batch_size * layout.seq_len / layout.cp
    product = tokens * head_flops(shape) / layout.tp / (rates.matmul * efficiency.matmul)
    logits = tokens * shape.vocab_size / layout.tp * layout.precision.logits
    # The product writes them, the loss reads them for the maximum, the sum and the gradient.
    vector = 2 * logits / (rates.memory * efficiency.memory)
    volume = tokens * shape.hidden_size * layout.precision.activation
    tp = network.gather(volume, layout.tp, 1)
    return Work(
        Seconds(compute=product + vector, tp=tp),
        Seconds(compute=product + vector, tp=tp),
        Seconds(compute=product),
    )


def embedding_work(
    shape: ModelShape, layout: Layout, rates: Rates, network: Network, efficiency: Efficiency
) -> Work:
    """Embedding of one microbatch: rows are read and, over vocabulary-parallel ranks, summed."""
    tokens = layout.micro_batch_size * layout.seq_len / layout.cp
    volume = tokens * shape.hidden_size * layout.precision.activation
    vector = 2 * volume / (rates.memory * efficiency.memory)
    tp = network.gather(volume, layout.tp, 1)
    return Work(Seconds(compute=vector, tp=tp), Seconds(tp=tp), Seconds(compute=vector))


def _product_seconds(
    layer: LayerShape,
    shape: ModelShape,
    layout: Layout,
    tokens: float,
    rates: Rates,
    efficiency: Efficiency,
) -> float:
    flops = layer_flops(layer, shape.hidden_size, layout.seq_len)
    peak = rates.matmul
    seconds = tokens * flops.projections / layout.tp / (peak * efficiency.matmul)
    share = efficiency.expert_matmul if layer.experts else efficiency.matmul
    busiest = efficiency.imbalance if layer.experts and layout.ep > 1 else 1.0
    seconds += busiest * tokens * flops.mlp / layout.tp / (peak * share)
    held = device_layer_parameters(layer, shape.hidden_size, shape.norm, tp=layout.tp, ep=layout.ep).total
    reading = held * layout.precision.weight / (rates.memory * efficiency.memory)
    return max(seconds, reading)


def _attention_seconds(
    layer: LayerShape,
    shape: ModelShape,
    layout: Layout,
    tokens: float,
    rates: Rates,
    efficiency: Efficiency,
) -> float:
    """Fused attention skips the masked half; without it all scores are computed, written and read."""
    fused = layout.flash_attention
    flops = layer_flops(layer, shape.hidden_size, layout.seq_len, causal=fused)
    seconds = tokens * flops.attention / layout.tp / (rates.matmul * efficiency.attention)
    if fused:
        return seconds
    scores = tokens * layout.seq_len * layer.attention.num_heads / layout.tp
    passes = 6  # written, scaled and masked, softmax read and written, read
    return seconds + passes * scores * layout.precision.activation / (rates.memory * efficiency.memory)


def _vector_bytes(layer: LayerShape, shape: ModelShape, layout: Layout, tokens: float) -> float:
    """Bytes that the operators between the products read and write in forward."""
    attention, hidden = layer.attention, shape.hidden_size
    outside = 2 * layer.norms * hidden + 2 * 3 * hidden  # norms; two residual sums
    inside = 2 * (attention.q_size + attention.k_size)  # rotary positions, or biases
    if layer.mlp:
        inside += (3 if layer.mlp.gated else 2) * layer.mlp.ffn_hidden_size
    if layer.experts:
        experts = layer.experts
        inside += 3 * (experts.top_k * experts.ffn_hidden_size + experts.shared_ffn_hidden_size)
        outside += 4 * experts.top_k * hidden  # dispatch and combine, each read and written
    split = layout.tp if layout.sequence_parallel else 1
    return tokens * layout.precision.activation * (outside / split + inside / layout.tp)


def _tensor_seconds(shape: ModelShape, layout: Layout, tokens: float, network: Network) -> float:
    """Two all-reduces, or two pairs of all-gather and reduce-scatter: the same volume."""
    volume = tokens * shape.hidden_size * layout.precision.activation
    return 2 * network.all_reduce(volume, layout.tp, 1)


def _context_seconds(layer: LayerShape, layout: Layout, tokens: float, network: Network) -> float:
    """K and V go round the context-parallel ranks once; or four exchanges of all ranks."""
    attention = layer.attention
    if layout.cp == 1:
        return 0.0
    if layout.context == "ulysses":
        heads = attention.num_heads / layout.tp
        kv_heads = heads if attention.latent else max(attention.num_kv_heads / layout.tp, layout.cp)
        width = 2 * (heads + kv_heads) * max(attention.head_dim, attention.value_head_dim)
        return network.all_to_all(tokens * width * layout.precision.activation, layout.cp, layout.tp)
    width = attention.k_size + attention.v_size
    if attention.latent:  # keys and values are expanded for every head
        width = attention.num_heads * (attention.head_dim + attention.value_head_dim)
    block = tokens * max(width / layout.tp, 2 * attention.head_dim) * layout.precision.activation
    return (layout.cp - 1) * network.send(block, layout.cp, layout.tp)


def _expert_seconds(
    layer: LayerShape, shape: ModelShape, layout: Layout, tokens: float, network: Network
) -> float:
    """Every token's copies go to their experts and come back."""
    if layer.experts is None or layout.ep == 1:
        return 0.0
    volume = tokens * layer.experts.top_k * shape.hidden_size * layout.precision.activation
    return 2 * network.all_to_all(volume, layout.ep, layout.tp)

