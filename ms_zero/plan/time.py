"""How long an optimizer step takes, by cause.

What is assumed to overlap, and what is not:

- Tensor- and expert-parallel collectives hide behind nothing.
- The ring of context parallelism hides behind attention, to a share of it (`Efficiency.cp_overlap`).
- Gathers of weights and reductions of gradients hide behind the forward or backward they belong to, to a
  share (`Efficiency.dp_overlap`), all but the first or last layer's: once a step those of stages 0 to 2 that
  happen once a step, in every microbatch those of stage 3 and the reductions of stage 2.
- Pipeline messages run beside computation; who waits for one is idle.
- Transfers to and from the host hide behind the computation of the same phase (`Efficiency.offload_overlap`);
  optimizer states that live there are fetched and written back around the update, hidden by nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from types import MappingProxyType
from typing import NamedTuple

from ms_zero.errors import UserError
from ms_zero.hardware import Device
from ms_zero.pipeline.balance import balance
from ms_zero.plan.activations import FUSED, layer_activations, packed_share
from ms_zero.plan.efficiency import EFFICIENCY, Efficiency
from ms_zero.plan.flops import shape_flops
from ms_zero.plan.layout import Layout
from ms_zero.plan.network import Network, network_of
from ms_zero.plan.parameters import (
    DeviceParameters,
    device_embedding_parameters,
    device_head_parameters,
    device_layer_parameters,
)
from ms_zero.plan.pipeline import (
    ChunkSeconds,
    Pace,
    PipelineSeconds,
    closed_form,
    pace_of,
    simulated,
    simulated_by_name,
)
from ms_zero.plan.recompute import plan_recompute
from ms_zero.plan.report import TimeReport
from ms_zero.plan.shapes import LayerShape, ModelShape
from ms_zero.plan.update import update_bytes, update_seconds
from ms_zero.plan.work import Rates, Seconds, Work, embedding_work, head_work, layer_work


class _Chunks(NamedTuple):
    """One microbatch of every model chunk of a layout, before data parallelism and offload."""

    works: tuple[Work, ...]
    seconds: tuple[ChunkSeconds, ...]
    pace: Pace
    busiest: int
    """Pipeline rank that computes longest, and what it does."""
    busy: Seconds
    rank_works: tuple[Work, ...]
    totals: tuple[float, ...]
    """Seconds of each pipeline rank."""


class _Exchange(NamedTuple):
    """Data parallelism of one model chunk, or of one pipeline rank, nothing hidden."""

    gather: float
    reduce: float
    gather_gradients: float


class _Hidden(NamedTuple):
    """Exposed seconds of one chunk and microbatch that the schedule has to carry."""

    forward_dp: float
    backward_dp: float
    forward_offload: float
    backward_offload: float


class TimeModel:
    """Predicts step times of one model on one kind of device; build it once, ask it often.

    Args:
        shape: the model.
        device: peak rates and links, from the catalogue.
        dtype: precision of matrix multiplications, for the device's peak.
        efficiency: shares of the peaks.

    Raises:
        UserError: the catalogue lacks a figure that time depends on.

    """

    def __init__(
        self, shape: ModelShape, device: Device, dtype: str = "bf16", efficiency: Efficiency = EFFICIENCY
    ) -> None:
        self.shape = shape
        self.device = device
        self.efficiency = efficiency
        self.rates = _rates(device, dtype)
        self.network: Network = network_of(device)
        self._layer_works_of: dict[tuple, tuple[dict[tuple[LayerShape, str], Work], Work, Work]] = {}
        self._chunks_of: dict[tuple, _Chunks] = {}
        self._parameters_of: dict[tuple, tuple[DeviceParameters, ...]] = {}
        self._exchanges_of: dict[tuple, tuple[tuple[_Exchange, ...], tuple[_Exchange, ...]]] = {}
        self._flops_of: dict[int, float] = {}

    def estimate(self, layout: Layout) -> TimeReport:
        """Predict with the closed form of the pipeline; a schedule of one's own is simulated."""
        if layout.order is not None:
            return self.simulate(layout)
        hidden = self._hidden(layout)
        return self._report(layout, hidden, self._closed_form(layout, hidden), simulated=False)

    def step_seconds(self, layout: Layout) -> float:
        """Seconds of a step, as ``estimate`` predicts them; the search asks for nothing else."""
        assert layout.order is None
        return self._step(layout, self._closed_form(layout, self._hidden(layout)))

    def simulate(self, layout: Layout) -> TimeReport:
        """Predict with the pipeline run event by event."""
        chunks, transfer = self.chunk_seconds(layout), self.transfer_seconds(layout)
        if layout.order is None:
            run = simulated_by_name(layout.schedule, layout.pp, layout.microbatches, chunks, transfer)
        else:
            run = simulated(layout.order, chunks, transfer)
        return self._report(layout, self._hidden(layout), run, simulated=True)

    def chunk_seconds(self, layout: Layout) -> tuple[ChunkSeconds, ...]:
        """Seconds of each model chunk and microbatch, exposed communication included."""
        hidden, chunks = self._hidden(layout), self._chunks(layout)
        return chunks.seconds if hidden is None else _carried(chunks.seconds, hidden)

    def _closed_form(self, layout: Layout, hidden: tuple[_Hidden, ...] | None) -> PipelineSeconds:
        chunks, ranks = self._chunks(layout), layout.pp
        pace = chunks.pace
        if hidden is not None:
            forward = [each.forward_dp + each.forward_offload for each in hidden]
            backward = [each.backward_dp + each.backward_offload for each in hidden]
            pace = Pace(
                busiest=max(
                    total + sum(forward[rank::ranks]) + sum(backward[rank::ranks])
                    for rank, total in enumerate(chunks.totals)
                ),
                forward=pace.forward + sum(forward) / ranks,
                backward=pace.backward + sum(backward) / ranks,
                weight=pace.weight,
            )
        transfer, virtual = self.transfer_seconds(layout), layout.chunks // ranks
        return closed_form(layout.schedule, ranks, layout.microbatches, virtual, pace, transfer)

    def _step(self, layout: Layout, run: PipelineSeconds) -> float:
        moved = self._optimizer_transfers(layout)
        return run.total + self._once(layout) + self._update(layout) + moved + self.efficiency.step_seconds

    def transfer_seconds(self, layout: Layout) -> float:
        """Seconds of one pipeline message; sequence-parallel ranks send a part each."""
        if layout.pp == 1:
            return 0.0
        elements = layout.micro_batch_size * layout.seq_len / layout.cp * self.shape.hidden_size
        if layout.sequence_parallel:
            elements /= layout.tp
        stride = layout.devices // layout.pp
        return self.network.send(elements * layout.precision.activation, layout.pp, stride)

    def balanced_layers(self, layout: Layout) -> tuple[int, ...]:
        """Layers of each model chunk with which all take about equally long, embedding and head included."""
        layers, embedding, head = self._layer_works(layout)
        costs = [
            _total(layers[layer, kind])
            for layer, kind, number in self._kinds(layout, self.shape.blocks, 0)
            for _ in range(number)
        ]
        parts = balance(costs, layout.chunks, first=_total(embedding), last=_total(head))
        return tuple(map(len, parts))

    def parameters(self, layout: Layout) -> tuple[DeviceParameters, ...]:
        """Parameters of each model chunk on one device, before data-parallel sharding."""
        key = (layout.tp, layout.ep, layout.chunks, layout.chunk_layers)
        if key not in self._parameters_of:
            bounds = layout.layers_of_chunks(self.shape)
            self._parameters_of[key] = self._chunk_parameters(layout, bounds)
        return self._parameters_of[key]

    def _chunks(self, layout: Layout) -> _Chunks:
        key = (
            layout.pp, layout.virtual_stages, layout.chunk_layers, layout.recompute,
            layout.recompute_every, layout.recompute_budget, layout.order, _work_key(layout),
        )  # fmt: skip
        if layout.recompute == "budget":
            key += (layout.schedule, layout.microbatches)
        if key not in self._chunks_of:
            works = self._chunk_works(layout, layout.layers_of_chunks(self.shape))
            self._chunks_of[key] = _chunks(works, layout)
        return self._chunks_of[key]

    def _chunk_works(self, layout: Layout, bounds: tuple[int, ...]) -> tuple[Work, ...]:
        layers, embedding, head = self._layer_works(layout)
        sums: dict[tuple, Work] = {}
        works, start = [], 0
        for count in bounds:
            parts = self.shape.layers_between(start, start + count)
            flying = self._flying(layout, len(works))
            if (parts, flying) not in sums:
                sums[parts, flying] = _sum_works(
                    layers[layer, kind].times(number)
                    for layer, kind, number in self._kinds(layout, parts, flying)
                )
            works.append(sums[parts, flying])
            start += count
        works[0] = works[0].plus(embedding)
        works[-1] = works[-1].plus(head)
        return tuple(works)

    def _flying(self, layout: Layout, chunk: int) -> int:
        """Microbatches in flight that a recompute budget is shared by; 0 without one."""
        if layout.recompute != "budget":
            return 0
        return max(layout.in_flight(layout.rank_of(chunk)))

    def _kinds(
        self, layout: Layout, parts: tuple[tuple[int, LayerShape], ...], flying: int
    ) -> Iterator[tuple[LayerShape, str, int]]:
        """What the layers of a chunk run again, as (layer, none | selective | full, number)."""
        if layout.recompute != "budget" or not parts:
            yield from _by_recompute(parts, layout.recompute, layout.recompute_every)
            return
        layers = [layer for number, layer in parts for _ in range(number)]
        counts = [layer_activations(self.shape, layer, layout, FUSED) for _, layer in parts]
        largest = max(counts, key=lambda count: count.none)
        plan = plan_recompute(
            "budget",
            len(layers),
            budget_bytes=layout.recompute_budget,
            bytes_of=lambda kind: round(largest.kept(kind)),
            in_flight=flying,
        )
        yield from ((layer, kind, 1) for layer, kind in zip(layers, plan.kinds(len(layers)), strict=True))

    def _layer_works(self, layout: Layout) -> tuple[dict[tuple[LayerShape, str], Work], Work, Work]:
        """Work of each kind of layer by what it runs again; of the embedding; of the head."""
        key = _work_key(layout)
        if key not in self._layer_works_of:
            arguments = (self.shape, layout, self.rates, self.network, self.efficiency)
            layers = {
                (layer, kind): layer_work(layer, *arguments, kind)
                for layer in {layer for _, layer in self.shape.blocks}
                for kind in ("none", "selective", "full")
            }
            self._layer_works_of[key] = layers, embedding_work(*arguments), head_work(*arguments)
        return self._layer_works_of[key]

    def _chunk_parameters(self, layout: Layout, bounds: tuple[int, ...]) -> tuple[DeviceParameters, ...]:
        shape, counts, start = self.shape, [], 0
        for chunk, count in enumerate(bounds):
            dense = experts = 0
            for number, layer in shape.layers_between(start, start + count):
                held = device_layer_parameters(
                    layer, shape.hidden_size, shape.norm, tp=layout.tp, ep=layout.ep
                )
                dense += number * held.dense
                experts += number * held.experts
            start += count
            if chunk == 0:
                dense += device_embedding_parameters(shape, tp=layout.tp)
            if chunk == len(bounds) - 1:
                dense += device_head_parameters(shape, tp=layout.tp, has_embedding=chunk == 0)
            counts.append(DeviceParameters(dense=dense, experts=experts))
        return tuple(counts)

    # Data parallelism

    def _gather(self, layout: Layout, held: DeviceParameters, width: float) -> float:
        """Seconds to gather, or to reduce and scatter, a chunk over the ranks that shard it."""
        seconds = self.network.gather(held.dense * width, layout.shard_degree, layout.tp)
        if held.experts:
            stride = layout.tp * layout.ep
            seconds += self.network.gather(held.experts * width, layout.expert_shard_degree, stride)
        return seconds

    def _exchange(self, layout: Layout, held: DeviceParameters) -> _Exchange:
        """Gather weights; reduce gradients, scattered over shards and then summed over replicas."""
        width = layout.precision.reduce
        gather_gradients = self._gather(layout, held, width)
        reduce = gather_gradients
        if layout.dp_replicate > 1:
            stride = layout.tp * layout.shard_degree
            shard = held.dense / layout.shard_degree + held.experts / layout.expert_shard_degree
            reduce += self.network.all_reduce(shard * width, layout.dp_replicate, stride)
        gather = self._gather(layout, held, layout.precision.gathered)
        return _Exchange(gather=gather, reduce=reduce, gather_gradients=gather_gradients)

    def _exchanges(self, layout: Layout) -> tuple[tuple[_Exchange, ...], tuple[_Exchange, ...]]:
        """Data parallelism of each chunk, and of each pipeline rank."""
        key = (
            layout.tp, layout.ep, layout.pp, layout.virtual_stages, layout.chunk_layers,
            layout.shard_degree, layout.dp_replicate, layout.precision, layout.order,
        )  # fmt: skip
        if key not in self._exchanges_of:
            parameters = self.parameters(layout)
            ranks = tuple(_sum_parameters(layout.on_rank(parameters, rank)) for rank in range(layout.pp))
            known = {held: self._exchange(layout, held) for held in {*parameters, *ranks}}
            self._exchanges_of[key] = tuple(
                tuple(known[held] for held in parts) for parts in (parameters, ranks)
            )
        return self._exchanges_of[key]

    def _hidden(self, layout: Layout) -> tuple[_Hidden, ...] | None:
        """What data parallelism and offload add to each chunk and microbatch; None: nothing."""
        every = layout.dp * layout.cp > 1 and layout.syncs
        if not every and not layout.activation_offload and not layout.parameter_offload:
            return None
        parts = zip(
            self._chunks(layout).works,
            self._exchanges(layout)[0],
            self._offloaded_seconds(layout),
            strict=True,
        )
        known: dict[tuple[int, int, float], _Hidden] = {}  # most chunks are alike
        found = []
        for work, exchange, moved in parts:
            key = (id(work), id(exchange), moved)
            if key not in known:
                known[key] = self._hidden_in_chunk(layout, work, exchange, moved)
            found.append(known[key])
        return tuple(found)

    def _hidden_in_chunk(self, layout: Layout, work: Work, exchange: _Exchange, moved: float) -> _Hidden:
        layers = self.shape.num_layers / layout.chunks
        gather = exchange.gather if zero_stage_of(layout) == 3 else 0.0
        again = gather if layout.reshard_after_forward else 0.0
        reduce = exchange.reduce if layout.syncs else 0.0
        forward, backward = work.computing()
        share, free = self.efficiency.dp_overlap, self.efficiency.offload_overlap
        return _Hidden(
            forward_dp=_exposed(gather, share * forward, layers),
            backward_dp=_exposed(again + reduce, share * backward, layers),
            forward_offload=_exposed(moved, free * forward, layers),
            backward_offload=_exposed(moved, free * backward, layers),
        )

    def _offloaded_seconds(self, layout: Layout) -> list[float]:
        """Seconds that one phase of each chunk moves weights and activations between device and host."""
        if not layout.activation_offload and not layout.parameter_offload:
            return [0.0] * layout.chunks
        rate, seconds = self._host_rate(layout), []
        kept = self._kept_bytes(layout) if layout.activation_offload else 0.0
        for held in self.parameters(layout):
            num_bytes = kept
            if layout.parameter_offload:
                shards = held.dense / layout.shard_degree + held.experts / layout.expert_shard_degree
                num_bytes += shards * layout.precision.weight
            seconds.append(num_bytes / rate)
        return seconds

    def _kept_bytes(self, layout: Layout) -> float:
        """Bytes of activations that a mean chunk keeps of a microbatch."""
        split = _by_recompute(self.shape.blocks, layout.recompute, layout.recompute_every)
        layers = sum(
            number * layer_activations(self.shape, layer, layout, FUSED).kept(kind)
            for layer, kind, number in split
        )
        kept = layers / layout.chunks
        if layout.recompute == "budget":
            kept = min(kept, layout.recompute_budget / layout.virtual_stages)
        return packed_share(layout) * kept

    def _host_rate(self, layout: Layout) -> float:
        name = "nvme_bandwidth" if layout.offload_to == "nvme" else "host_bandwidth"
        rate = getattr(self.device, name)
        if rate is None:
            raise UserError(f"cluster {self.device.name}: offload needs {name}; add it to the cluster's file")
        return rate

    def _once(self, layout: Layout) -> float:
        """Exposed seconds of data parallelism that a step has once: the worst pipeline rank."""
        if layout.dp * layout.cp == 1:
            return 0.0
        stage, every = zero_stage_of(layout), layout.syncs
        share, layers = self.efficiency.dp_overlap, self.shape.num_layers / layout.pp
        worst = 0.0
        ranks = self._exchanges(layout)[1]
        for work, exchange in set(zip(self._chunks(layout).rank_works, ranks, strict=True)):
            forward, backward = work.computing()
            seconds = 0.0
            if not every:  # stage 0 gathers again what it scattered
                reduce = exchange.reduce + (exchange.gather_gradients if stage == 0 else 0.0)
                seconds += _exposed(reduce, share * backward, layers)
            if stage in (1, 2):
                seconds += _exposed(exchange.gather, share * forward, layers)
            worst = max(worst, seconds)
        return worst

    # The optimizer

    def owned_parameters(self, layout: Layout) -> float:
        """Parameters whose optimizer state the fullest device keeps."""
        sharded = zero_stage_of(layout) >= 1
        dense = layout.shard_degree if sharded else 1
        experts = layout.expert_shard_degree if sharded else 1
        parameters = self.parameters(layout)
        return max(
            sum(held.dense / dense + held.experts / experts for held in layout.on_rank(parameters, rank))
            for rank in range(layout.pp)
        )

    def _update(self, layout: Layout) -> float:
        moved = update_bytes(layout.precision).total
        rate = self.rates.memory * self.efficiency.memory
        return update_seconds(self.owned_parameters(layout), moved, rate)

    def _optimizer_transfers(self, layout: Layout) -> float:
        if not layout.optimizer_offload:
            return 0.0
        states = layout.precision.master + layout.precision.moments
        moved = 2 * states * layout.optimizer_offload * self.owned_parameters(layout)
        return moved / self._host_rate(layout)

    # All together

    def _report(
        self, layout: Layout, hidden: tuple[_Hidden, ...] | None, run: PipelineSeconds, *, simulated: bool
    ) -> TimeReport:
        chunks, count = self._chunks(layout), layout.microbatches
        busy = chunks.busy.times(count)
        own = () if hidden is None else layout.on_rank(hidden, chunks.busiest)
        every_dp = count * sum(each.forward_dp + each.backward_dp for each in own)
        every_offload = count * sum(each.forward_offload + each.backward_offload for each in own)
        once, update, moved = self._once(layout), self._update(layout), self._optimizer_transfers(layout)
        step = self._step(layout, run)
        exposed = {"tp": busy.tp, "cp": busy.cp, "ep": busy.ep, "pp": run.transfer, "dp": every_dp + once}
        idle = run.total - run.transfer - busy.total - every_dp - every_offload
        return TimeReport(
            step=step,
            compute=busy.compute,
            recompute=busy.recompute,
            bubble=idle if layout.pp > 1 else 0.0,
            exposed=MappingProxyType(exposed),
            optimizer=update,
            offload=every_offload + moved,
            other=self.efficiency.step_seconds,
            simulated=simulated,
            **self._throughput(layout, step, busy),
        )

    def _throughput(self, layout: Layout, step: float, busy: Seconds) -> dict[str, float]:
        if layout.seq_len not in self._flops_of:
            self._flops_of[layout.seq_len] = shape_flops(self.shape, layout.seq_len).train
        rate = layout.tokens_per_step / step
        model = self._flops_of[layout.seq_len] * rate / layout.devices
        return {
            "tokens_per_second": rate,
            "tokens_per_second_per_device": rate / layout.devices,
            "flops_per_device": model,
            "hardware_flops_per_device": model * (1 + busy.recompute / busy.compute),
            "mfu": model / self.rates.matmul,
        }


def zero_stage_of(layout: Layout) -> int:
    """The ZeRO stage whose communication a layout has.

    MindFormers' levels shard weights too, but levels 1 and 2 gather them once a step for all microbatches and
    keep them until backward: they send what stages 1 and 2 send. Level 3 gathers again, as stage 3 does.
    """
    return layout.zero_stage if layout.hsdp_level is None else layout.hsdp_level


def _work_key(layout: Layout) -> tuple:
    """All of a layout that changes the work of a layer."""
    return (
        layout.tp, layout.cp, layout.context, layout.ep, layout.micro_batch_size, layout.seq_len,
        layout.sequence_parallel, layout.flash_attention, layout.precision, layout.engine,
    )  # fmt: skip


def _by_recompute(
    parts: tuple[tuple[int, LayerShape], ...], recompute: str, every: int
) -> Iterator[tuple[LayerShape, str, int]]:
    """Split a chunk's layers by what they run again: (layer, none | selective | full, number)."""
    position = 0
    for number, layer in parts:
        full = {"full": number, "sqrt": number}.get(recompute, 0)
        if recompute == "every_k":  # layers 0, k, 2k ... of the chunk
            full = -(-(position + number) // every) - -(-position // every)
        yield layer, "full", full
        yield layer, "selective" if recompute == "selective" else "none", number - full
        position += number


def _rates(device: Device, dtype: str) -> Rates:
    peak = device.peak_flops.get(dtype)
    if peak is None:
        known = ", ".join(device.peak_flops) or "none"
        raise UserError(
            f"cluster {device.name}: no peak rate is known for {dtype} (known: {known}), so time cannot be "
            "predicted; add it to the cluster's file, or use another precision or cluster"
        )
    if device.memory_bandwidth is None:
        raise UserError(
            f"cluster {device.name}: the catalogue has no memory_bandwidth, so time cannot be predicted; add "
            "a value and its source to the cluster's file"
        )
    return Rates(matmul=peak, memory=float(device.memory_bandwidth))


def _exposed(seconds: float, hides: float, layers: float) -> float:
    """What `hides` seconds cannot hide; a layer's part has nothing to hide behind."""
    return max(seconds / max(1.0, layers), seconds - hides)


def _chunks(works: tuple[Work, ...], layout: Layout) -> _Chunks:
    seconds = tuple(
        ChunkSeconds(forward=w.forward.total, backward=w.backward.total, weight=w.weight.total) for w in works
    )
    ranks = layout.pp
    rank_works = tuple(_sum_works(layout.on_rank(works, rank)) for rank in range(ranks))
    totals = tuple(map(_total, rank_works))
    busiest = totals.index(max(totals))
    forward, backward, weight = rank_works[busiest]
    busy = forward.plus(backward).plus(weight)
    return _Chunks(works, seconds, pace_of(seconds, ranks), busiest, busy, rank_works, totals)


def _total(work: Work) -> float:
    return sum(phase.total for phase in work)


def _sum_works(works: Iterable[Work]) -> Work:
    total = Work()
    for work in works:
        total = total.plus(work)
    return total


def _sum_parameters(parameters: Sequence[DeviceParameters, ...]) -> DeviceParameters:
    return DeviceParameters(
        dense=sum(each.dense for each in parameters), experts=sum(each.experts for each in parameters)
    )


def _carried(seconds: tuple[ChunkSeconds, ...], hidden: tuple[_Hidden, ...]) -> tuple[ChunkSeconds, ...]:
    """Chunks with what data parallelism and offload add to them."""
    return tuple(
        ChunkSeconds(
            forward=chunk.forward + extra.forward_dp + extra.forward_offload,
            backward=chunk.backward + extra.backward_dp + extra.backward_offload,
            weight=chunk.weight,
        )
        for chunk, extra in zip(seconds, hidden, strict=True)
    )
