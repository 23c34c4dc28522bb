"""Bytes that a transformer layer keeps for backward, counted tensor by tensor.

With h = hidden_size, q, k, v the widths of all query, key and value heads, c of the weighted values, f of the
MLP, a heads and s tokens, a layer keeps per token and in elements of the activation dtype:

- for each norm its input and its output, which the next matrix reads: 2 h. Tensor parallelism alone leaves
  these on every rank, sequence parallelism splits them too;
- attention: q + k + v and c. Without flash attention also the probabilities, a s; with it one fp32 number a
  head. Selective recompute drops the probabilities;
- MLP: the input and the output of the activation function: 2 f, or 3 f when gated;
- experts: the same for the copies of the token that they get, and the copies themselves, before and after;
- with dropout: a mask of one byte after attention and after the MLP, and for the probabilities a mask and a
  second copy.

This gives the published sums of Korthikanti et al. (2022), in bytes over s b h with 16-bit activations: none
34 + 5 a s / h, tensor parallel 10 + 24/t + 5 a s / (h t), and with sequence parallelism all over t.
"""

from __future__ import annotations

from dataclasses import dataclass

from ms_zero.plan.layout import Layout
from ms_zero.plan.shapes import Attention, LayerShape, ModelShape

_FP32 = 4
_ID_BYTES = 12  # of a token: its id for the embedding, its label and the logarithm of its sum for the loss


@dataclass(frozen=True, kw_only=True)
class Kept:
    """How many copies of each tensor an implementation keeps; the defaults are those of fused kernels.

    Args:
        norm_copies: tensors of hidden_size that a norm and the matrix after it keep.
        qkv_copies: copies of queries, keys and values.
        rotary_copies: further tensors of the size of queries and keys that rotary positions keep.
        context_copies: copies of the weighted values.
        score_copies: tensors of the probabilities' size without flash attention.
        plain_copies: inner tensors of an MLP of two matrices.
        gated_copies: inner tensors of a gated MLP.
        loss_copies: fp32 tensors of the logits' size at the end of forward, besides the logits.
        token_numbers: fp32 numbers per token and layer, such as the statistics of norms.
        dropout: whether dropout is on.
        selective_drops_products: whether selective recompute also drops the output of the activation
            function and those of norms.

    """

    norm_copies: float = 2
    qkv_copies: float = 1
    rotary_copies: float = 0
    context_copies: float = 1
    score_copies: float = 1
    plain_copies: float = 2
    gated_copies: float = 3
    loss_copies: float = 2
    token_numbers: float = 4
    dropout: bool = False
    selective_drops_products: bool = False


FUSED = Kept()
"""Fused kernels: those of Ascend in 16 bits and this project's own on CPU; no dropout."""
COMPOSED = Kept(norm_copies=3, rotary_copies=2, plain_copies=7, gated_copies=5, token_numbers=20)
"""Kernels composed of plain operators, with stored probabilities: GPU, and Ascend in fp32."""
PUBLISHED = Kept(token_numbers=0, dropout=True)
"""What Korthikanti et al. count: dropout on, statistics of norms left out."""
MINDFORMERS_KEPT = Kept(selective_drops_products=True)
"""MindFormers' selective recompute names the cheap elementwise operations of its Llama."""


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
    layer: LayerShape, hidden_size: int, layout: Layout, kept: Kept, *, imbalance: float = 1.0
) -> LayerActivations:
    """Count one layer.

    Args:
        layer: the layer.
        hidden_size: width of the residual stream.
        layout: degrees, micro batch size, sequence length, precision and flash attention.
        kept: what the implementation keeps.
        imbalance: tokens that the busiest expert rank gets, over the mean.

    """
    width = layout.precision.activation
    tokens = layout.micro_batch_size * layout.seq_len / layout.cp
    along = layout.tp if layout.sequence_parallel else 1
    shared = _shared_elements(layer, hidden_size, kept) * width + kept.token_numbers * _FP32
    shared += 2 * hidden_size if kept.dropout else 0
    qkv = _qkv_elements(layer.attention, layout.tp)
    context = layer.attention.context_size / layout.tp
    scores = _score_bytes(layer.attention, layout, kept)
    inner, product = _inner_elements(layer, layout.tp, kept, imbalance)
    moved = _moved_elements(layer, hidden_size, imbalance) * width / along
    moved += _router_numbers(layer) * _FP32 / along
    rotary = kept.rotary_copies * _rotary_elements(layer.attention, layout.tp)
    plain = (kept.qkv_copies * qkv + rotary + kept.context_copies * context + inner) * width
    none = shared / along + plain + moved + scores
    dropped = scores
    if kept.selective_drops_products:
        dropped += product * width + layer.norms * hidden_size * width / along
    return LayerActivations(
        none=tokens * none,
        selective=tokens * (none - dropped),
        full=tokens * hidden_size * width / along,
        working=tokens * width * (2 * hidden_size / along + max(qkv + context, inner)),
    )


def kernels_of(target: str, activation_bytes: int) -> tuple[Kept, bool]:
    """What the kernels of a device target keep, and whether their attention stores no probabilities."""
    fused = target == "CPU" or (target == "Ascend" and activation_bytes == 2)
    return (FUSED if fused else COMPOSED), fused


def logits_bytes(vocab_size: int, layout: Layout, kept: Kept) -> float:
    """Logits of one microbatch on one device, in the activation dtype and as fp32, and their gradient."""
    tokens = layout.micro_batch_size * layout.seq_len / layout.cp
    width = layout.precision.activation + kept.loss_copies * layout.precision.logits
    return tokens * -(-vocab_size // layout.tp) * width


def saved_ends_bytes(shape: ModelShape, layout: Layout, kept: Kept) -> float:
    """What last norm, loss, ids and the tables of rotary positions add to the layers of one microbatch."""
    tokens = layout.micro_batch_size * layout.seq_len / layout.cp
    norm = kept.norm_copies * shape.hidden_size * layout.precision.activation + kept.token_numbers / 2 * _FP32
    loss = shape.vocab_size / layout.tp * layout.precision.logits
    attention = shape.blocks[0][1].attention
    tables = 2 * layout.seq_len * attention.head_dim * _FP32 if attention.rotary else 0
    return tokens * (norm + loss + _ID_BYTES) + tables


def dispatch_bytes(layer: LayerShape, hidden_size: int, layout: Layout, imbalance: float) -> float:
    """Buffers of the two all-to-all exchanges of a layer with experts: what is sent and what arrives."""
    if layer.experts is None or layout.ep == 1:
        return 0.0
    tokens = layout.micro_batch_size * layout.seq_len / layout.cp
    along = layout.tp if layout.sequence_parallel else 1
    copies = (1 + imbalance) * layer.experts.top_k * hidden_size
    return tokens * copies * layout.precision.activation / along


def _shared_elements(layer: LayerShape, hidden_size: int, kept: Kept) -> float:
    """Elements per token that tensor parallelism alone does not split."""
    latent = layer.attention.latent
    compressed = 2 * (latent.q_rank + latent.kv_rank) + latent.rope_head_dim if latent else 0
    return layer.norms * kept.norm_copies * hidden_size + compressed


def _qkv_elements(attention: Attention, tp: int) -> float:
    kv_heads = max(1.0, attention.num_kv_heads / tp)
    return attention.q_size / tp + kv_heads * (attention.head_dim + attention.value_head_dim)


def _rotary_elements(attention: Attention, tp: int) -> float:
    kv_heads = max(1.0, attention.num_kv_heads / tp)
    return attention.q_size / tp + kv_heads * attention.head_dim if attention.rotary else 0.0


def _score_bytes(attention: Attention, layout: Layout, kept: Kept) -> float:
    """Bytes per token that only the core of attention keeps."""
    heads = attention.num_heads / layout.tp
    if layout.flash_attention:
        return heads * _FP32
    keys = layout.seq_len if attention.window is None else min(layout.seq_len, attention.window)
    copies = kept.score_copies + (1 if kept.dropout else 0)
    return heads * keys * (copies * layout.precision.activation + (1 if kept.dropout else 0))


def _inner_elements(layer: LayerShape, tp: int, kept: Kept, imbalance: float) -> tuple[float, float]:
    """Inner elements of the MLP per token, and those of the activation function's output alone."""
    if layer.mlp is not None:
        copies = kept.gated_copies if layer.mlp.gated else kept.plain_copies
        return copies * layer.mlp.ffn_hidden_size / tp, layer.mlp.ffn_hidden_size / tp
    experts = layer.experts
    width = experts.top_k * imbalance * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
    return kept.gated_copies * width / tp, width / tp


def _moved_elements(layer: LayerShape, hidden_size: int, imbalance: float) -> float:
    """Copies of a token that experts read and write."""
    return 2 * imbalance * layer.experts.top_k * hidden_size if layer.experts else 0.0


def _router_numbers(layer: LayerShape) -> float:
    return 2 * layer.experts.num_experts if layer.experts else 0.0
