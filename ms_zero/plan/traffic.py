"""How many elements leave a rank, by mesh axis: the published formulas, forward and backward together.

With b s tokens of width h, t = tp, c = cp, e = ep, N = dp:

- tensor parallelism 8 b s h (t - 1)/t a layer, as all-reduces or as reduce-scatters and all-gathers;
- context parallelism (ring) K and V forward, K, V and their gradients backward, (c - 1)/c of each;
- expert parallelism two all-to-alls forward and two backward of k copies of a token, (e - 1)/e of them leave;
- a pipeline b s h at every border, each way;
- data parallelism by the book of ``ms_zero.plan.zero``.
"""

from __future__ import annotations

from ms_zero.plan.layout import Layout
from ms_zero.plan.shapes import ModelShape
from ms_zero.plan.zero import step_traffic


def tensor_parallel(tokens: float, hidden_size: int, degree: int) -> float:
    """Elements of one layer; ``tokens`` are those of the whole tensor-parallel group."""
    return 8 * tokens * hidden_size * (degree - 1) / degree


def context_parallel(tokens: float, key_value_size: int, degree: int) -> float:
    """Elements of one layer; ``tokens`` of the whole sequence, ``key_value_size`` of K and V together."""
    return 3 * tokens * key_value_size * (degree - 1) / degree


def expert_parallel(tokens: float, hidden_size: int, top_k: int, degree: int) -> float:
    """Elements of one layer; ``tokens`` are those that a rank routes."""
    return 4 * tokens * hidden_size * top_k * (degree - 1) / degree


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
    sums = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
    for number, layer in shape.blocks:
        key_values = (layer.attention.k_size + layer.attention.v_size) / layout.tp
        sums["tp"] += number * again * tensor_parallel(tokens, shape.hidden_size, layout.tp)
        sums["cp"] += number * context_parallel(tokens * layout.cp, key_values, layout.cp)
        if layer.experts:
            own = tokens / (layout.tp if layout.sequence_parallel else 1)
            copies = layer.experts.top_k
            sums["ep"] += number * again * expert_parallel(own, shape.hidden_size, copies, layout.ep)
    found = {axis: count * width * elements / layout.pp for axis, elements in sums.items()}
    split = layout.tp if layout.sequence_parallel else 1
    borders = 2 * layout.virtual_stages if layout.pp > 1 else 0
    found["pp"] = borders * count * width * pipeline(tokens, shape.hidden_size, split)
    found["dp"] = _data_bytes(layout, parameters)
    return found


def _data_bytes(layout: Layout, parameters: float) -> float:
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
        layout.shard_degree,
        layout.dp_replicate,
        weight=precision.gathered,
        wire=precision.reduce,
        kept=precision.gradient,
    )
