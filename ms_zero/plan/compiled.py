"""What a rank of a pipeline stage sends and holds when MindSpore cuts the step (``engine: graph``).

The eager engine's formulas with what the compiler does otherwise (2.10.0; compiled and counted, see
``scripts/check_graph.py``):

- a collective of the forward has its mirror image in backward: an all-reduce an all-reduce, a gather a
  scatter; full recompute repeats those of a block but the last;
- Ulysses with tp also exchanges over tp, since it numbers heads by cp first and projections by tp first;
- every parameter is shared by all ranks that hold the same part of it: those of dp and cp, and of tp where
  tp does not cut it. Level 1 to 3 of hsdp shard it over them, or over dp_shard x cp ranks when there are
  replicas, if their number divides its first dim; replicas sum the shards of a step with microbatches, and
  whole gradients without;
- weights are gathered in the width of the computation, those of norms and routers in fp32; without
  accumulation levels 1 and 2 gather them as they are, fp32;
- where no cast joins the two uses of a tied table (fp32), level 2 scatters the gradient of each in every
  microbatch;
- an expert has a fixed number of slots for each sequence, full or empty: its capacity, or one for every token
  where it takes all. Slots travel between the ranks of ep, and are summed over those of tp.

Sums of single numbers (the loss, the norm of the gradient) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ms_zero.plan.layout import Layout
from ms_zero.plan.parameters import Weight, expert_weights, layer_weights, norm_weights
from ms_zero.plan.shapes import Attention, Experts, LayerShape, ModelShape
from ms_zero.plan.traffic import (
    context_parallel,
    expert_parallel,
    pipeline,
    tensor_parallel,
    tensor_parallel_ends,
    ulysses,
)
from ms_zero.plan.zero import hsdp_traffic

_FP32 = 4
# Token ids and labels, int32.
_TOKEN = 4


def stage_bytes(shape: ModelShape, layout: Layout, stage: int) -> dict[str, float]:
    """Bytes that a rank of a pipeline stage sends in an optimizer step, by what for.

    "tp", "cp", "ep", "pp" and "dp" as in `ms_zero.plan.traffic.step_bytes`; "other": token ids, which every
    data-parallel rank gathers to take its part of each microbatch.
    """
    layers = [found for chunk in _chunks(layout, stage) for found in _layers(shape, layout, chunk)]
    count, ends = layout.microbatches, _end_bytes(shape, layout, stage)
    return {
        "tp": count * (sum(_tensor_bytes(shape, layout, *layer) for layer in layers) + ends),
        "cp": count * sum(_context_bytes(layout, *layer) for layer in layers),
        "ep": count * sum(_expert_bytes(shape, layout, *layer) for layer in layers),
        "pp": _pipeline_bytes(shape, layout, stage),
        "dp": sum(_data_bytes(weight, layout, again) for weight, again in _weights(shape, layout, stage))
        + _tied_bytes(shape, layout),
        "other": _input_bytes(layout, stage),
    }


def held_bytes(shape: ModelShape, layout: Layout, stage: int) -> dict[str, float]:
    """Bytes of weights, summed gradients and moments that a rank of a pipeline stage holds between steps.

    "gradients": the sums of microbatches; 0 without accumulation, where none outlive the step.
    """
    found = {"weights": 0.0, "gradients": 0.0, "moments": 0.0}
    level, accumulates = layout.hsdp_level or 0, layout.pp > 1 or layout.microbatches > 1
    for weight, _ in _weights(shape, layout, stage):
        shards = _shards(weight, layout)
        found["weights"] += _FP32 * weight.elements / shards
        found["moments"] += layout.precision.moments * weight.elements / shards
        found["gradients"] += accumulates * _FP32 * weight.elements / (shards if level >= 2 else 1)
    return found


def is_vocabulary_cut(vocab_size: int, tp: int) -> bool:
    """Whether tp cuts the tables of tokens; else each tp rank works on rows of its own with whole tables."""
    return vocab_size % tp == 0


def _chunks(layout: Layout, stage: int) -> Sequence[int]:
    return layout.on_rank(range(layout.chunks), stage)


def _ends(layout: Layout, stage: int) -> tuple[bool, bool]:
    """Whether a stage has the table of tokens, and whether it has the head."""
    return stage == layout.rank_of(0), stage == layout.rank_of(layout.chunks - 1)


def _layers(shape: ModelShape, layout: Layout, chunk: int) -> Iterator[tuple[LayerShape, bool]]:
    """The layers of a chunk, and whether their forward runs again."""
    counts, every = layout.layers_of_chunks(shape), layout.recompute_every
    full = {"full": 1, "every_k": every}.get(layout.recompute)
    number = sum(counts[:chunk])
    for count, layer in shape.layers_between(number, number + counts[chunk]):
        for _ in range(count):
            yield layer, full is not None and number % full == 0
            number += 1


def _tokens(layout: Layout) -> float:
    """Rows of activations that a tensor-parallel group has together, in a microbatch."""
    return layout.micro_batch_size * layout.seq_len / layout.cp


def _tensor_bytes(shape: ModelShape, layout: Layout, layer: LayerShape, runs_again: bool) -> float:
    """Of a layer, for a microbatch: four all-reduces, or as many pairs of a gather and a scatter.

    The last product of a block does not run again, nor what sums it: one all-reduce of two, or one scatter.
    """
    elements = tensor_parallel(_tokens(layout), shape.hidden_size, layout.tp)
    if layer.experts:
        sent = _routed_tensor_elements(layer.experts, layout, elements, runs_again)
    else:
        sent = (1 + ((3 if layout.sequence_parallel else 2) / 8 if runs_again else 0)) * elements
    sent *= layout.precision.activation
    if layout.cp > 1 and layout.context == "ulysses":
        sent += _exchange_bytes(layer.attention, layout, layout.tp, runs_again)
    return sent


def _routed_tensor_elements(experts: Experts, layout: Layout, dense: float, runs_again: bool) -> float:
    """As :func:`_tensor_bytes`, of a layer with experts; ``dense``: the elements of one without.

    Attention is half of those. Slots are summed, there and back. With sequence parallelism rows are gathered
    for the router, and their gradients scattered. Shared experts are an MLP.
    """
    slots = slots_per_token(experts, layout.seq_len) * dense / 2
    gathered = dense / 4 if layout.sequence_parallel else 0.0
    shared = dense / 2 if experts.shared_ffn_hidden_size else 0.0
    sent = dense / 2 + slots + gathered + shared
    return sent * 1.5 if runs_again else sent


def slots_per_token(experts: Experts, length: int) -> float:
    """Slots of all experts for a sequence, over its tokens."""
    if experts.capacity_factor is None:
        return experts.num_experts
    even = experts.top_k * length / experts.num_experts
    return experts.num_experts * min(length, math.ceil(even * experts.capacity_factor)) / length


def _expert_bytes(shape: ModelShape, layout: Layout, layer: LayerShape, runs_again: bool) -> float:
    """Of a layer, for a microbatch: slots go to the experts' ranks and come back, and so do gradients."""
    if not layer.experts:
        return 0.0
    slots = _tokens(layout) * slots_per_token(layer.experts, layout.seq_len)
    elements = expert_parallel(slots, shape.hidden_size, 1, layout.ep)
    return elements * layout.precision.activation * (1.5 if runs_again else 1)


def _end_bytes(shape: ModelShape, layout: Layout, stage: int) -> float:
    """Of the table of tokens, the head and the loss, for a microbatch; where tp cuts the vocabulary."""
    if not is_vocabulary_cut(shape.vocab_size, layout.tp):
        return 0.0
    tokens, (is_first, is_last) = _tokens(layout), _ends(layout, stage)
    ends = tensor_parallel_ends(tokens, shape.hidden_size, layout.tp) * layout.precision.activation
    # A gather before the head is the other half of the scatter after the table.
    share = (is_first + is_last) / 2 if layout.sequence_parallel else is_first
    return share * ends + is_last * _loss_bytes(layout)


def _loss_bytes(layout: Layout) -> float:
    """Maximum, sum and label's logit of each token, and the gradients of both sums."""
    return 5 * 2 * (layout.tp - 1) / layout.tp * _tokens(layout) * _FP32


def _context_bytes(layout: Layout, layer: LayerShape, runs_again: bool) -> float:
    """Of a layer, for a microbatch."""
    attention = layer.attention
    if layout.context == "ulysses":
        return _exchange_bytes(attention, layout, layout.cp, runs_again)
    keys = (attention.k_size + attention.v_size) / layout.tp
    once = context_parallel(_tokens(layout) * layout.cp, keys, layout.cp) / 3
    again = runs_again or layout.recompute == "selective"  # the ring is what selective runs again
    return once * ((2 + again) * layout.precision.activation + _FP32)


def _exchange_bytes(attention: Attention, layout: Layout, degree: int, runs_again: bool) -> float:
    """Of queries, keys, values and the result, each exchanged by ``degree`` ranks, and of their gradients."""
    sizes = attention.q_size + attention.k_size + attention.v_size + attention.context_size
    elements = ulysses(_tokens(layout) * degree, sizes / layout.tp, degree)
    return (1 + runs_again / 2) * elements * layout.precision.activation


def _pipeline_bytes(shape: ModelShape, layout: Layout, stage: int) -> float:
    """Forward to the next chunk, back to the one before, where it is another rank's; and a tied table."""
    if layout.pp == 1:
        return 0.0
    others = [layout.rank_of(chunk) != stage for chunk in range(layout.chunks)]
    borders = sum(sum(others[max(chunk - 1, 0) : chunk + 2]) for chunk in _chunks(layout, stage))
    split = layout.tp if layout.sequence_parallel else 1
    width = layout.precision.activation
    sent = borders * layout.microbatches * width * pipeline(_tokens(layout), shape.hidden_size, split)
    if shape.tie_embeddings and sum(_ends(layout, stage)) == 1:  # the table goes, its gradient comes back
        sent += layout.microbatches * width * _table(shape, layout).elements
    return sent


def _input_bytes(layout: Layout, stage: int) -> float:
    if layout.pp == 1 and layout.microbatches == 1:
        return 0.0
    inputs = sum(_ends(layout, stage))
    samples = layout.microbatches * layout.micro_batch_size * layout.dp
    return inputs * samples * layout.seq_len * _TOKEN * (layout.dp - 1) / layout.dp


# Weights and gradients


def _weights(shape: ModelShape, layout: Layout, stage: int) -> Iterator[tuple[Weight, bool]]:
    """Every parameter of a stage on a rank, and whether level 3 gathers it again for backward.

    It does where several microbatches share the graph, or forward runs again; not where rows are looked up.
    """
    is_first, is_last = _ends(layout, stage)
    is_tied = shape.tie_embeddings and is_first and is_last
    shared = layout.microbatches > 1
    if is_first:
        yield _table(shape, layout), is_tied and shared
        if shape.learned_positions:
            yield Weight(shape.learned_positions, shape.hidden_size), False
    for chunk in _chunks(layout, stage):
        for layer, runs_again in _layers(shape, layout, chunk):
            for weight in layer_weights(layer, shape.hidden_size, shape.norm, tp=layout.tp):
                yield weight, shared or runs_again
            if layer.experts:
                degrees = {"tp": layout.tp, "ep": layout.ep}
                for weight in expert_weights(layer.experts, shape.hidden_size, **degrees):
                    yield weight, shared or runs_again
    if is_last:
        yield from ((weight, shared) for weight in norm_weights(shape.norm, shape.hidden_size))
        if not shape.tie_embeddings:
            yield _table(shape, layout), shared


def _table(shape: ModelShape, layout: Layout) -> Weight:
    """Of tokens: in the embedding or the head."""
    if is_vocabulary_cut(shape.vocab_size, layout.tp):
        return Weight(shape.vocab_size // layout.tp, shape.hidden_size, is_cut=True)
    return Weight(shape.vocab_size, shape.hidden_size)


def _holders(weight: Weight, layout: Layout) -> int:
    """Ranks with the same part of a parameter."""
    ranks = layout.dp * layout.cp * (1 if weight.is_cut else layout.tp)
    return ranks // layout.ep if weight.is_expert else ranks


def _shards(weight: Weight, layout: Layout) -> int:
    """Ranks that a parameter is sharded over; 1: it is not."""
    if not layout.hsdp_level:
        return 1
    shards = layout.shard_degree if layout.dp_replicate > 1 else _holders(weight, layout)
    return 1 if weight.rows % shards else shards


def _data_bytes(weight: Weight, layout: Layout, gathers_again: bool) -> float:
    """Of a parameter and its gradient in a step."""
    holders, shards, count = _holders(weight, layout), _shards(weight, layout), layout.microbatches
    if shards == 1:
        return 2 * (holders - 1) / holders * weight.elements * _FP32
    gathered = _FP32 if weight.is_norm else layout.precision.gathered
    traffic = hsdp_traffic(layout.hsdp_level, count, gathers_again=gathers_again)
    sent = traffic.sent_bytes(weight.elements, shards, 1, weight=gathered, wire=_FP32, kept=_FP32)
    is_scattered_first = count > 1 or layout.hsdp_level == 3
    replicas, summed = holders // shards, weight.elements / (shards if is_scattered_first else 1)
    return sent + 2 * (replicas - 1) / replicas * summed * _FP32


def _tied_bytes(shape: ModelShape, layout: Layout) -> float:
    """Of the second gradient of a tied table: that of lookups does not join that of the head."""
    joins = layout.pp > 1 or layout.hsdp_level != 2 or layout.microbatches == 1
    if not shape.tie_embeddings or joins or layout.precision.activation < _FP32:
        return 0.0
    table = _table(shape, layout)
    shards = _shards(table, layout)
    return layout.microbatches * (shards - 1) / shards * table.elements * _FP32
