"""Memory of a device: what is held at the fullest moment of a training step, part by part.

Held all the time: weights, gradients, master weights and moments, each divided by the ranks that ZeRO shards
it over (`Layout`), and the framework's reserve. On top of that backward holds the activations of the
microbatches in flight (`layout.in_flight`, `activations`) and, at one moment or another, either the logits or
the gradients of one layer together with what recompute rebuilds; the larger of the two counts, not their sum.
Weights that ZeRO-3 gathers count for the largest unit and the one fetched ahead. The optimizer step is the
other candidate for the peak.

The estimate errs high: ``reserve`` holds the runtime's own memory and a margin for what an allocator loses.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ms_zero.errors import UserError
from ms_zero.plan.activations import (
    FUSED,
    LayerActivations,
    dispatch_bytes,
    layer_activations,
    logits_bytes,
    packed_share,
    saved_ends_bytes,
)
from ms_zero.plan.layout import Layout
from ms_zero.plan.parameters import (
    DeviceParameters,
    device_embedding_parameters,
    device_head_parameters,
    device_layer_parameters,
)
from ms_zero.plan.recompute import RecomputePlan, plan_recompute
from ms_zero.plan.report import MemoryReport, StageMemory
from ms_zero.plan.shapes import Attention, LayerShape, ModelShape
from ms_zero.plan.zero import HeldBytes, held_bytes

RESERVE = 1.5e9
"""Bytes of an accelerator that runtime, kernels and collective libraries take: an assumption to calibrate."""
MARGIN = 0.05
"""Share of what is allocated and freed within a step that an allocator loses to fragmentation."""
IMBALANCE = 1.2
"""Tokens of the busiest expert rank over the mean, as a load-balanced router leaves it."""
_STATIC_ERROR = 0.02


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What a measured run says about the estimate.

    Args:
        dynamic_scale: factor for activations, logits and temporaries.
        reserve: bytes of the runtime, in place of the default; None: keep it.
        source: where this comes from.

    """

    dynamic_scale: float = 1.0
    reserve: float | None = None
    source: str = ""


class _Chunk(NamedTuple):
    """The layers of a model chunk as (number, index of a distinct layer)."""

    groups: tuple[tuple[int, int], ...]

    @property
    def num_layers(self) -> int:
        return sum(count for count, _ in self.groups)


class _Stage(NamedTuple):
    """A pipeline rank and its chunks."""

    rank: int
    chunks: tuple[_Chunk, ...]
    has_embedding: bool
    has_head: bool


class _Sizes(NamedTuple):
    """Parameters of a stage on one device: of all layers and ends, and of the units that ZeRO gathers."""

    dense: int
    experts: int
    largest_dense: int
    largest_experts: int
    layer_dense: int
    layer_experts: int
    tied: int  # an embedding that is the head as well and stays gathered from the one to the other


class _Flow(NamedTuple):
    """Bytes of a stage that come and go with microbatches."""

    kept: float
    largest_layer: float
    logits: float
    transient: float
    moe: float


class MemoryModel:
    """Estimates any layout of one model; build it once and ask often."""

    def __init__(
        self,
        shape: ModelShape,
        *,
        kernels: str = FUSED,
        reserve: float = RESERVE,
        margin: float = MARGIN,
        imbalance: float = IMBALANCE,
        calibration: Calibration | None = None,
    ) -> None:
        """Prepare a model.

        Args:
            shape: the model.
            kernels: what computes, one of ``saved.IMPLEMENTATIONS``: it decides what is kept for backward.
            reserve: bytes of a device that the runtime takes.
            margin: share of activations and temporaries lost to fragmentation.
            imbalance: tokens of the busiest expert rank over the mean.
            calibration: corrections from a measured run.

        """
        calibration = calibration or Calibration()
        self.shape, self.kernels, self.margin, self.imbalance = shape, kernels, margin, imbalance
        self.reserve = reserve if calibration.reserve is None else calibration.reserve
        self.dynamic_scale = calibration.dynamic_scale
        self._layers: list[LayerShape] = list(dict.fromkeys(layer for _, layer in shape.blocks))
        self._stages: dict[tuple, tuple[tuple[_Stage, ...], tuple[_Stage, ...]]] = {}
        self._parameters: dict[tuple[int, int, int], DeviceParameters] = {}
        self._activations: dict[tuple, LayerActivations] = {}
        self._all_sizes: dict[tuple, _Sizes] = {}
        self._flows: dict[tuple, _Flow] = {}
        self._plans: dict[tuple, RecomputePlan] = {}

    def peak(self, layout: Layout) -> float:
        """Bytes that every device must have; the layout must be valid for the model."""
        stages, distinct = self._stages_of(layout)
        # Where gradients of weights wait, they do so longer on later ranks, with what was recomputed.
        among = stages if _puts_off(layout) and layout.recompute != "none" else distinct
        return max(self._stage(layout, stage).peak for stage in among)

    def fits(self, layout: Layout, capacity: float) -> bool:
        """Whether devices with this many usable bytes suffice."""
        return self.peak(layout) <= capacity

    def report(self, layout: Layout) -> MemoryReport:
        """Every stage, part by part."""
        stages, _ = self._stages_of(layout)
        return MemoryReport(stages=tuple(self._stage(layout, stage) for stage in stages))

    def saved(self, layout: Layout) -> float:
        """Bytes that the forward of one microbatch leaves for backward: what counting saved tensors shows.

        Without pipeline stages.
        """
        assert layout.pp == 1
        stages, _ = self._stages_of(layout)
        layers, _ = self._chunk(layout, stages[0].chunks[0], 1)
        return layers + saved_ends_bytes(self.shape, layout, self.kernels)

    def largest_seq_len(self, layout: Layout, capacity: float, step: int = 128) -> int:
        """The longest sequence, a multiple of ``step`` x tp x 2 cp, that fits; 0 when none does."""
        unit = step * layout.tp * 2 * layout.cp
        low, high = 0, self.shape.max_seq_len // unit
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.fits(layout.replace(seq_len=middle * unit), capacity)
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * unit

    def _stages_of(self, layout: Layout) -> tuple[tuple[_Stage, ...], tuple[_Stage, ...]]:
        """All stages, and the first of each kind: later ones of a kind hold no more microbatches.

        In a schedule of one's own they may, and every stage is a kind.
        """
        key = (layout.pp, layout.virtual_stages, layout.order, layout.chunk_layers)
        if key not in self._stages:
            stages = self._split(layout)
            kinds = {stage[1 if layout.order is None else 0 :]: stage for stage in reversed(stages)}
            self._stages[key] = (stages, tuple(kinds.values()))
        return self._stages[key]

    def _split(self, layout: Layout) -> tuple[_Stage, ...]:
        chunks, start = [], 0
        for count in layout.layers_of_chunks(self.shape):
            layers = self.shape.layers_between(start, start + count)
            chunks.append(_Chunk(tuple((number, self._layers.index(layer)) for number, layer in layers)))
            start += count
        first, last = layout.rank_of(0), layout.rank_of(layout.chunks - 1)
        return tuple(
            _Stage(rank, tuple(layout.on_rank(chunks, rank)), rank == first, rank == last)
            for rank in range(layout.pp)
        )

    def _stage(self, layout: Layout, stage: _Stage) -> StageMemory:
        sizes = self._sizes(layout, stage)
        held = (1,) if layout.pp == 1 else layout.in_flight(stage.rank)
        states, host = state_bytes(layout, sizes.dense, sizes.experts)
        backward = self._backward(layout, stage, sizes, held, host)
        bucket = min(2 * layout.bucket_bytes, layout.precision.gradient * (sizes.dense + sizes.experts))
        phase, moment = "backward", backward
        if bucket > sum(backward.values()):
            phase, moment = "optimizer", {"transient": bucket}
        moment = {name: size * self.dynamic_scale for name, size in moment.items() if size}
        reserve = self.reserve + self.margin * sum(moment.values())
        parts = {name: size for name, size in states.items() if size}
        uncertainty = reserve + _STATIC_ERROR * sum(parts.values())
        return StageMemory(
            stage=stage.rank,
            parts={**parts, **moment, "reserve": reserve},
            phase=phase,
            parameters=sizes.dense + sizes.experts,
            in_flight=held,
            uncertainty=uncertainty,
            host={name: size for name, size in host.items() if size},
        )

    def _sizes(self, layout: Layout, stage: _Stage) -> _Sizes:
        key = (stage, layout.tp, layout.ep)
        if key not in self._all_sizes:
            self._all_sizes[key] = self._count_sizes(layout, stage)
        return self._all_sizes[key]

    def _count_sizes(self, layout: Layout, stage: _Stage) -> _Sizes:
        dense, experts, layer_dense, layer_experts = 0, 0, 0, 0
        for chunk in stage.chunks:
            for count, index in chunk.groups:
                one = self._layer_parameters(index, layout.tp, layout.ep)
                dense += count * one.dense
                experts += count * one.experts
                if one.total > layer_dense + layer_experts:
                    layer_dense, layer_experts = one.dense, one.experts
        embedding, head = self._ends(layout.tp, stage)
        dense, ends = dense + embedding + head, max(embedding, head)
        largest = (ends, 0) if ends > layer_dense + layer_experts else (layer_dense, layer_experts)
        tied = stage.has_embedding and stage.has_head and self.shape.tie_embeddings
        return _Sizes(dense, experts, *largest, layer_dense, layer_experts, ends * tied)

    def _ends(self, tp: int, stage: _Stage) -> tuple[int, int]:
        """Parameters of embedding and head on a stage."""
        embedding = device_embedding_parameters(self.shape, tp=tp) if stage.has_embedding else 0
        if not stage.has_head:
            return embedding, 0
        return embedding, device_head_parameters(self.shape, tp=tp, has_embedding=stage.has_embedding)

    def _backward(
        self, layout: Layout, stage: _Stage, sizes: _Sizes, held: tuple[int, ...], host: dict[str, float]
    ) -> dict[str, float]:
        """What backward holds besides the states; offloaded activations are added to ``host``."""
        flow = self._flow(layout, stage, held)
        kept = flow.kept * packed_share(layout)
        if layout.activation_offload:
            host["activations"] = kept
            kept = min(kept, 2 * flow.largest_layer)
        return {
            "activations": kept,
            "logits": flow.logits if flow.logits >= flow.transient else 0.0,
            "transient": flow.transient if flow.transient > flow.logits else 0.0,
            "unsharded": _unsharded(layout, sizes),
            "buckets": self._buckets(layout, sizes),
            "moe": flow.moe,
        }

    def _flow(self, layout: Layout, stage: _Stage, held: tuple[int, ...]) -> _Flow:
        """What flows through a stage; neither data parallelism nor offload changes it."""
        key = (stage, held, _flow_key(layout), layout.recompute, layout.recompute_every)
        key += (_puts_off(layout), layout.order)
        if layout.recompute == "budget":
            key += (layout.recompute_budget,)
        if key not in self._flows:
            self._flows[key] = self._make_flow(layout, stage, held)
        return self._flows[key]

    def _make_flow(self, layout: Layout, stage: _Stage, held: tuple[int, ...]) -> _Flow:
        chunks = [self._chunk(layout, chunk, max(held)) for chunk in stage.chunks]
        indices = {index for chunk in stage.chunks for _, index in chunk.groups}
        layers = [self._layer_activations(index, layout) for index in indices]
        buffers = [
            dispatch_bytes(self._layers[index], self.shape.hidden_size, layout, self.imbalance)
            for index in indices
        ]
        rebuilt = max(rebuilt for _, rebuilt in chunks)
        kept = sum(count * kept for count, (kept, _) in zip(held, chunks, strict=True))
        if _puts_off(layout):
            kept += self._waiting(layout, stage, held, [kept for kept, _ in chunks])
        return _Flow(
            kept=kept,
            largest_layer=max((layer.none for layer in layers), default=0.0),
            logits=self._head(layout) if stage.has_head else 0.0,
            transient=rebuilt + max((layer.working for layer in layers), default=0.0),
            moe=max(buffers, default=0.0),
        )

    def _chunk(self, layout: Layout, chunk: _Chunk, flying: int) -> tuple[float, float]:
        """Bytes that a chunk keeps of one microbatch, and what recompute rebuilds at a time."""
        kind = layout.recompute
        layers = [(count, self._layer_activations(index, layout)) for count, index in chunk.groups]
        if not layers:
            return 0.0, 0.0
        if kind in ("none", "selective"):
            rebuilt = max(each.none - each.kept(kind) for _, each in layers)
            return sum(count * each.kept(kind) for count, each in layers), rebuilt
        if kind == "full":
            return sum(count * each.full for count, each in layers), max(each.none for _, each in layers)
        every = [each for count, each in layers for _ in range(count)]
        return _planned(self._plan(layout, chunk, flying), every)

    def _plan(self, layout: Layout, chunk: _Chunk, flying: int) -> RecomputePlan:
        number, kind = chunk.num_layers, layout.recompute
        if kind == "budget":
            layers = [self._layer_activations(index, layout) for _, index in chunk.groups]
            largest = max(layers, key=lambda one: one.none)
            return plan_recompute(
                kind,
                number,
                budget_bytes=layout.recompute_budget,
                bytes_of=lambda name: round(largest.kept(name)),
                in_flight=flying,
            )
        key = (kind, number, layout.recompute_every)
        if key not in self._plans:
            every = layout.recompute_every if kind == "every_k" else None
            self._plans[key] = plan_recompute(kind, number, every=every)
        return self._plans[key]

    def _head(self, layout: Layout) -> float:
        """Logits of a microbatch, and the input and output of the last norm."""
        tokens = layout.micro_batch_size * layout.seq_len / layout.cp
        ends = 2 * tokens * self.shape.hidden_size * layout.precision.activation
        return logits_bytes(self.shape.vocab_size, layout) + ends

    def _waiting(
        self, layout: Layout, stage: _Stage, held: tuple[int, ...], kept: list[float]
    ) -> float:
        """What gradients of weights wait with, besides what a microbatch keeps anyway, by chunk.

        With recompute nothing is left to be rebuilt; and the head's wait with the gradient of the logits.
        """
        flying, more = layout.in_flight(stage.rank, until_weights=False), 0.0
        plain = layout.replace(recompute="none")
        for chunk, count, until_inputs, size in zip(stage.chunks, held, flying, kept, strict=True):
            whole, _ = self._chunk(plain, chunk, count)
            more += max(0, count - until_inputs) * (whole - size)
        if not stage.has_head:
            return more
        tokens = layout.micro_batch_size * layout.seq_len / layout.cp
        return more + held[-1] * tokens * self.shape.vocab_size / layout.tp * layout.precision.activation

    def _buckets(self, layout: Layout, sizes: _Sizes) -> float:
        """Buffers of the reductions, the ring of context parallelism and the pipeline."""
        tokens = layout.micro_batch_size * layout.seq_len / layout.cp
        found = 0.0
        if layout.dp * layout.cp > 1:
            whole = layout.precision.reduce * (sizes.dense + sizes.experts)
            found += min(2.0 * layout.bucket_bytes, whole)
        if layout.pp > 1:
            found += 2 * tokens * self.shape.hidden_size * layout.precision.activation
        if layout.cp > 1:
            found += max(_context_buffers(layer.attention, layout) for layer in self._layers)
        return found

    def _layer_parameters(self, index: int, tp: int, ep: int) -> DeviceParameters:
        key = (index, tp, ep)
        if key not in self._parameters:
            self._parameters[key] = device_layer_parameters(
                self._layers[index], self.shape.hidden_size, self.shape.norm, tp=tp, ep=ep
            )
        return self._parameters[key]

    def _layer_activations(self, index: int, layout: Layout) -> LayerActivations:
        key = (index, _flow_key(layout))
        if key not in self._activations:
            self._activations[key] = layer_activations(
                self.shape, self._layers[index], layout, self.kernels, imbalance=self.imbalance
            )
        return self._activations[key]


def _context_buffers(attention: Attention, layout: Layout) -> float:
    """Ring: blocks of K and V here and arriving; fp32 gradients of Q, of the own block, and of a passing one.

    Ulysses: what an exchange sends and what arrives, of Q or the result, K and V.
    """
    tokens, width = layout.micro_batch_size * layout.seq_len / layout.cp, layout.precision.activation
    queries = tokens * attention.q_size / layout.tp
    key_values = tokens * max((attention.k_size + attention.v_size) / layout.tp, 2 * attention.head_dim)
    if layout.passes_context:
        return 2 * width * key_values + 4 * (queries + 3 * key_values)
    return 2 * width * (2 * queries + max(key_values, tokens * 2 * attention.head_dim * layout.cp))


def _puts_off(layout: Layout) -> bool:
    """Whether gradients of weights wait; what else they wait with is part of the activations."""
    return layout.splits_backward


def _flow_key(layout: Layout) -> tuple:
    """What the activations of a layer depend on."""
    return (
        layout.tp,
        layout.cp,
        layout.ep > 1,
        layout.sequence_parallel,
        layout.micro_batch_size,
        layout.seq_len,
        layout.flash_attention,
        layout.dropout,
        layout.precision.activation,
        layout.precision.rounded,
    )


def explain_shortage(report: MemoryReport, capacity: float) -> str:
    """One line: by how much the fullest stage exceeds ``capacity`` bytes, and why; "" when all fits."""
    worst = report.worst
    if worst.peak <= capacity:
        return ""
    part = worst.largest()
    return (
        f"out of memory by {(worst.peak - capacity) / 1e9:.1f} GB in stage {worst.stage}: "
        f"{part} take {worst.parts[part] / 1e9:.1f} of {worst.peak / 1e9:.1f} GB"
    )


def _planned(plan: RecomputePlan, layers: list[LayerActivations]) -> tuple[float, float]:
    """Kept and rebuilt bytes of a chunk whose layers are recomputed in different ways."""
    kinds = plan.kinds(len(layers))
    kept = sum(layer.kept(kind) for layer, kind in zip(layers, kinds, strict=True) if kind != "full")
    kept += sum(layers[segment[0]].full for segment in plan.segments)
    segments = [sum(layers[number].none for number in segment) for segment in plan.segments]
    cores = [layers[number].none - layers[number].selective for number in plan.selective]
    return kept, max([*segments, *cores], default=0.0)


def state_bytes(
    layout: Layout, dense: float, experts: float = 0
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes held through the whole step, by part, on the device and on the host.

    ``dense`` and ``experts`` are the parameters of one device before data-parallel sharding.
    """
    of_dense = _held_bytes(layout, layout.shard_degree)
    of_experts = _held_bytes(layout, layout.expert_shard_degree)
    weights = dense * of_dense.weights + experts * of_experts.weights
    master = dense * of_dense.master + experts * of_experts.master
    moments = dense * of_dense.moments + experts * of_experts.moments
    away = layout.optimizer_offload
    device = {
        "weights": 0.0 if layout.parameter_offload else weights,
        "gradients": dense * of_dense.gradients + experts * of_experts.gradients,
        "master": master * (1 - away),
        "moments": moments * (1 - away),
    }
    host = {
        "weights": weights if layout.parameter_offload else 0.0,
        "master": master * away,
        "moments": moments * away,
    }
    return device, host if layout.offload_to == "cpu" else {"weights": host["weights"]}


def _held_bytes(layout: Layout, degree: int) -> HeldBytes:
    """Bytes per parameter of ``degree`` ranks; MindFormers' optimizer parallel shards all but gradients."""
    precision = layout.precision
    return held_bytes(
        layout.zero_stage if layout.hsdp_level is None else 3,
        degree,
        weight=precision.weight,
        gradient=precision.gradient,
        master=precision.master,
        moments=precision.moments,
        synchronise=_gradients_are_shards(layout),
    )


def _gradients_are_shards(layout: Layout) -> bool:
    """Each gradient is reduced as it appears, unless those of several microbatches are added up first."""
    return layout.syncs or layout.microbatches == 1


def _unsharded(layout: Layout, sizes: _Sizes) -> float:
    """Gathered weights, the whole gradient of one unit, and its weights cast for computing.

    Only what is sharded is gathered. Where a block has too few parameters to be a unit of its own, all blocks
    together are one.
    """
    precision, hsdp = layout.precision, layout.hsdp_level
    if layout.unit_elements is not None and layout.unit_elements > sizes.layer_dense + sizes.layer_experts:
        sizes = sizes._replace(largest_dense=sizes.dense, largest_experts=sizes.experts)
        layout = layout.replace(prefetch=0)
    dense = layout.shard_degree > 1 or layout.parameter_offload
    experts = layout.expert_shard_degree > 1 or layout.parameter_offload
    largest = sizes.largest_dense * dense + sizes.largest_experts * experts
    layer = sizes.layer_dense * dense + sizes.layer_experts * experts
    found = precision.gradient * largest if _gradients_are_shards(layout) else 0.0
    if precision.weight != precision.activation:
        whole = max(sizes.largest_dense + sizes.largest_experts, sizes.tied + sizes.layer_dense)
        found += precision.activation * whole
    if hsdp in (1, 2) or (layout.zero_stage == 3 and not layout.reshard_after_forward):
        return found + precision.gathered * (sizes.dense * dense + sizes.experts * experts)
    if layout.zero_stage < 3 and not hsdp:
        return found
    current = max(largest, sizes.tied * dense + layer)
    return found + precision.gathered * (current + layout.prefetch * layer)


def require_valid(layout: Layout, shape: ModelShape) -> None:
    """Raise UserError with every reason why a layout cannot train a model."""
    found = layout.violations(shape)
    if found:
        raise UserError(f"{shape.name}: {'; '.join(found)}")
