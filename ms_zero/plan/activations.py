"""Bytes of a layer's activations and of the logits under a layout; ``saved`` counts what operators keep."""

from __future__ import annotations

from dataclasses import dataclass

from ms_zero.plan.layout import Layout
from ms_zero.plan.saved import BlockShape, Split, block_of, bytes_by_kind, edge_bytes
from ms_zero.plan.shapes import LayerShape, ModelShape

FUSED = "ascend"
"""Kernels that are assumed of an accelerator: fused attention, norms and activations in 16 bits."""
MINDFORMERS_KEPT = "mindformers"
_UNFUSED = "published"
_FP32 = 4
_BLOCK = 256  # elements that share a scale, see `ms_zero.memory.compress`


@dataclass(frozen=True, kw_only=True)
class LayerActivations:
    """Bytes that one layer keeps of one microbatch on one device, by what is recomputed.

    ``working`` are the gradients and temporaries of its backward.
    """

    none: float
    selective: float
    full: float
    working: float

    def kept(self, kind: str) -> float:
        """Bytes under "none", "selective" or "full"."""
        return {"none": self.none, "selective": self.selective, "full": self.full}[kind]


def layer_activations(
    shape: ModelShape, layer: LayerShape, layout: Layout, kernels: str, *, imbalance: float = 1.0
) -> LayerActivations:
    """Count one layer.

    Args:
        shape: the model.
        layer: one of its layers.
        layout: degrees, micro batch size, sequence length, precision and flash attention.
        kernels: one of ``saved.IMPLEMENTATIONS``.
        imbalance: tokens that the busiest expert rank gets, over the mean.

    """
    block, split = block_of(shape, layer, imbalance), _split(layer, layout)
    kinds = bytes_by_kind(block, split, implementation=_implementation(kernels, layout))
    return LayerActivations(**kinds, working=_working_bytes(block, layout))


def kernels_of(target: str, activation_bytes: int) -> tuple[str, bool]:
    """The kernels of an accelerator, and whether their attention stores no probabilities."""
    return ("ascend", True) if target == "Ascend" and activation_bytes == 2 else ("portable", False)


def saved_ends_bytes(shape: ModelShape, layout: Layout, kernels: str) -> float:
    """What last norm, head and loss add to the layers of one microbatch."""
    layer = shape.blocks[0][1]
    edges = edge_bytes(
        block_of(shape, layer), shape.vocab_size, _split(layer, layout), implementation=kernels
    )
    return edges.final_norm + edges.head + edges.loss


def logits_bytes(vocab_size: int, layout: Layout) -> float:
    """Logits of one microbatch on one device: in fp32, their gradient, and as the head gives them."""
    precision = layout.precision
    width = 2 * precision.logits + (precision.activation if precision.activation < precision.logits else 0)
    return _tokens(layout) * -(-vocab_size // layout.tp) * width


def packed_share(layout: Layout) -> float:
    """Bytes of what layers keep over those of its dtype; compression adds an fp32 scale to each block."""
    if layout.activation_bits is None:
        return 1.0
    return (layout.activation_bits / 8 + _FP32 / _BLOCK) / layout.precision.activation


def dispatch_bytes(layer: LayerShape, hidden_size: int, layout: Layout, imbalance: float) -> float:
    """Buffers of the two all-to-all exchanges of a layer with experts: what is sent and what arrives."""
    if layer.experts is None or layout.ep == 1:
        return 0.0
    copies = (1 + imbalance) * layer.experts.top_k * hidden_size
    return _tokens(layout) * copies * layout.precision.activation


def _tokens(layout: Layout) -> float:
    return layout.micro_batch_size * layout.seq_len / layout.cp


def _split(layer: LayerShape, layout: Layout) -> Split:
    window = layer.attention.window
    return Split(
        batch=layout.micro_batch_size,
        seq_len=layout.seq_len / layout.cp,
        keys=layout.seq_len if window is None else min(layout.seq_len, window),
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        activation_bytes=layout.precision.activation,
        dropout=layout.dropout,
        rounded=layout.precision.rounded,
    )


def _implementation(kernels: str, layout: Layout) -> str:
    """Without flash attention an accelerator stores probabilities as the published count does."""
    return _UNFUSED if kernels in (FUSED, MINDFORMERS_KEPT) and not layout.flash_attention else kernels


def _working_bytes(block: BlockShape, layout: Layout) -> float:
    """Two tensors of the residual stream, and the widest inner gradients: of attention or of the MLP."""
    along = layout.tp if layout.sequence_parallel else 1
    value_head_dim = block.value_head_dim or block.head_dim
    key_values = max(block.num_kv_heads, layout.tp) * (block.head_dim + value_head_dim)
    attention = block.num_heads * (block.head_dim + value_head_dim) + key_values
    inner = (3 if block.gated else 2) * block.ffn_hidden_size
    if block.experts is not None:
        experts = block.experts
        inner = 3 * (experts.copies * experts.ffn_hidden_size + experts.shared_ffn_hidden_size)
    elements = 2 * block.hidden_size / along + max(attention, inner) / layout.tp
    return _tokens(layout) * elements * layout.precision.activation
