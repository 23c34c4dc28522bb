"""How many elements leave a rank, by mesh axis: the published formulas, forward and backward together.

With b s tokens of width h, t = tp, c = cp, e = ep, N = dp:

- tensor parallelism 8 b s h (t - 1)/t a layer, as all-reduces or as reduce-scatters and all-gathers, and
  half of that at the ends of the model: the sum of the embedding and that of the gradient before the head;
- context parallelism (ring) K and V forward, K, V and their gradients backward, (c - 1)/c of each; Ulysses
  1/c of Q, K, V and the result forward and of their gradients backward, (c - 1)/c of them leave;
- expert parallelism two all-to-alls forward and two backward of k copies of a token, (e - 1)/e of them leave;
  tensor-parallel ranks route the same tokens, also under sequence parallelism;
- a pipeline b s h at every border, each way;
- data parallelism by the book of ``ms_zero.plan.zero``, of experts among the ranks that hold the same ones.
"""

from __future__ import annotations

from itertools import pairwise

from ms_zero.plan.layout import Layout
from ms_zero.plan.parameters import device_layer_parameters
from ms_zero.plan.shapes import Attention, ModelShape
from ms_zero.plan.zero import step_traffic

_FP32 = 4


def tensor_parallel(tokens: float, hidden_size: int, degree: int) -> float:
    """Elements of one layer; ``tokens`` are those of the whole tensor-parallel group."""
    return 8 * tokens * hidden_size * (degree - 1) / degree


def tensor_parallel_ends(tokens: float, hidden_size: int, degree: int) -> float:
    """Elements of an embedding and a head that are cut by their vocabulary; ``tokens`` as of a layer."""
    return tensor_parallel(tokens, hidden_size, degree) / 2


def context_parallel(tokens: float, key_value_size: int, degree: int) -> float:
    """Elements of one layer, as a ring; ``tokens`` of the whole sequence, ``key_value_size`` of K and V."""
    return 3 * tokens * key_value_size * (degree - 1) / degree


def ulysses(tokens: float, sizes: float, degree: int) -> float:
    """Elements of one layer; ``tokens`` of the whole sequence, ``sizes`` of Q, K, V and the result."""
    return 2 * tokens / degree * sizes * (degree - 1) / degree


def context_bytes(attention: Attention, layout: Layout) -> float:
    """Bytes that a context-parallel rank sends in one layer for one microbatch, forward and backward.

    The gradients of K and V go round a ring in fp32, because every rank adds to them. With fewer key-value
    heads than ranks, Ulysses sends copies. Recompute of attention repeats what its forward sends.
    """
    degree, width = layout.cp, layout.precision.activation
    tokens = layout.micro_batch_size * layout.seq_len
    again = layout.recompute in ("full", "sqrt", "selective")
    head = max(attention.head_dim, attention.value_head_dim)
    heads = attention.num_heads / layout.tp
    kv_heads = heads if attention.latent else max(1.0, attention.num_kv_heads / layout.tp)
    if layout.context == "ring":
        once = context_parallel(tokens, 2 * kv_heads * head, degree) / 3
        return once * ((2 + again) * width + _FP32)
    sent = 2 * heads + 2 * max(kv_heads, float(degree))
    return ulysses(tokens, sent * head, degree) * width * (1 + again / 2)


def expert_parallel(tokens: float, hidden_size: int, top_k: int, degree: int) -> float:
    """Elements of one layer; ``tokens`` are those that a rank routes."""
    return 4 * tokens * hidden_size * top_k * (degree - 1) / degree


def router_bytes(num_experts: int, layout: Layout) -> float:
    """Bytes of one layer and microbatch: context-parallel ranks give each other their routers' logits."""
    own = layout.micro_batch_size * layout.seq_len / layout.cp
    forwards = 2 if layout.recompute in ("full", "sqrt") else 1
    return (layout.cp - 1) * own * num_experts * _FP32 * forwards


def pipeline(tokens: float, hidden_size: int, tensor_degree: int = 1) -> float:
    """Elements over one border in one direction; split where tensor-parallel ranks scatter and gather."""
    return tokens * hidden_size / tensor_degree


def step_bytes(shape: ModelShape, layout: Layout, parameters: float) -> dict[str, float]:
    """Bytes that a device in the middle of the pipeline sends in an optimizer step, by mesh axis.

    Args:
        shape: the model.
        layout: how it is trained; full recompute repeats the collectives of a layer's forward.
        parameters: parameters of one device before data-parallel sharding.

    """
    tokens = layout.micro_batch_size * layout.seq_len / layout.cp
    count, width = layout.microbatches, layout.precision.activation
    again = 1.5 if layout.recompute in ("full", "sqrt") else 1.0
    sums, context = {"tp": 0.0, "ep": 0.0}, 0.0
    for number, layer in shape.blocks:
        sums["tp"] += number * again * tensor_parallel(tokens, shape.hidden_size, layout.tp)
        context += number * context_bytes(layer.attention, layout)
        if layer.experts:
            context += number * router_bytes(layer.experts.num_experts, layout)
            copies = layer.experts.top_k
            sums["ep"] += number * again * expert_parallel(tokens, shape.hidden_size, copies, layout.ep)
    found = {axis: count * width * elements / layout.pp for axis, elements in sums.items()}
    found["cp"] = count * context / layout.pp
    split = layout.tp if layout.sequence_parallel else 1
    borders = _borders(layout)
    found["pp"] = borders * count * width * pipeline(tokens, shape.hidden_size, split)
    experts = _device_experts(shape, layout)
    found["dp"] = _data_bytes(layout, parameters - experts, layout.shard_degree)
    found["dp"] += _data_bytes(layout, experts, layout.expert_shard_degree)
    return found


def _borders(layout: Layout) -> int:
    """Messages of a microbatch that a rank in the middle of the pipeline sends."""
    if layout.pp == 1:
        return 0
    if layout.order is None:
        return 2 * layout.virtual_stages
    pairs = pairwise(layout.order.placement)
    ends = [rank for pair in pairs if pair[0] != pair[1] for rank in pair]
    return ends.count(layout.pp // 2)


def _device_experts(shape: ModelShape, layout: Layout) -> float:
    """Parameters of the routed experts of a device."""
    degrees = {"tp": layout.tp, "ep": layout.ep}
    return sum(
        number * device_layer_parameters(layer, shape.hidden_size, shape.norm, **degrees).experts / layout.pp
        for number, layer in shape.blocks
    )


def end_bytes(shape: ModelShape, layout: Layout) -> float:
    """Bytes that tensor parallelism sends at both ends of the model in an optimizer step."""
    tokens = layout.micro_batch_size * layout.seq_len / layout.cp
    count, width = layout.microbatches, layout.precision.activation
    return count * width * tensor_parallel_ends(tokens, shape.hidden_size, layout.tp)


def _data_bytes(layout: Layout, parameters: float, degree: int) -> float:
    passes = step_traffic(
        layout.zero_stage if layout.hsdp_level is None else layout.hsdp_level,
        layout.microbatches,
        synchronise=layout.syncs,
        reshard_after_forward=layout.reshard_after_forward,
        replicas=layout.dp_replicate,
    )
    precision = layout.precision
    return passes.sent_bytes(
        parameters,
        degree,
        layout.dp_replicate,
        weight=precision.gathered,
        wire=precision.reduce,
        kept=precision.gradient,
    )
