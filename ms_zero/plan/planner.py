"""Answers "how do I train this model on that cluster": the search, and the reasons around its result."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ms_zero.errors import UserError
from ms_zero.hardware import Device, load_device
from ms_zero.plan.candidates import RECOMPUTE, Space, divisors, skeletons
from ms_zero.plan.layout import FP32, MIXED_FP32_GRADIENTS, Layout, Precision
from ms_zero.plan.memory import Calibration, MemoryModel, explain_shortage
from ms_zero.plan.models import load_model
from ms_zero.plan.parameters import count_parameters
from ms_zero.plan.search import (
    Candidate,
    Capacity,
    Found,
    complexity,
    plainer_variant,
    search,
    smallest_peaks,
)
from ms_zero.plan.shapes import ModelShape
from ms_zero.plan.time import TimeModel

DTYPES = ("bf16", "fp16", "fp32")

# Share of a host's memory that a run may fill.
_HOST_SHARE = 0.9
# Layouts this close to the fastest count as equally fast: the simplest of them is recommended.
_AS_FAST = 1.03
# Public practice: tokens of a global batch by model size (GPT-3, Llama).
_BATCH_TOKENS = ((1e9, 2**19), (1e10, 2**21), (math.inf, 2**22))
_MICRO_BATCHES = (1, 2, 4, 8, 16)
_STEPS_BETWEEN = 32
# A smaller share of a step limits nothing.
_NOTABLE = 0.02


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked.

    Args:
        model: name or path, see ``ms_zero.plan.models.load_model``.
        cluster: name or path of a catalogue entry.
        devices: how many of them.
        seq_len: tokens of a sample.
        tokens: tokens to train on; None: not said.
        global_batch_size: samples of a step; None: by the size of the model.
        dtype: bf16, fp16 or fp32.
        offload: whether host memory may be used.
        calibration: what a measured run says about the memory model.

    """

    model: str
    cluster: str
    devices: int
    seq_len: int
    tokens: float | None = None
    global_batch_size: int | None = None
    dtype: str = "bf16"
    offload: bool = True
    calibration: Calibration | None = None


@dataclass(frozen=True, kw_only=True)
class Simple:
    """A simpler layout, and why it was not chosen."""

    name: str
    outcome: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The answer.

    Args:
        request: what was asked.
        shape: the model.
        device: one device of the cluster.
        space: what was searched, the batch included.
        capacity: bytes that a layout may use.
        memory: the memory model.
        time: the time model.
        found: the search's result.
        choice: what is recommended; None when nothing fits.
        simple: simpler layouts and why they lose.
        remedies: what would make it possible, when nothing fits.

    """

    request: Request
    shape: ModelShape
    device: Device
    space: Space
    capacity: Capacity
    memory: MemoryModel
    time: TimeModel
    found: Found
    choice: Candidate | None
    simple: tuple[Simple, ...]
    remedies: tuple[str, ...]

    def alternatives(self, count: int) -> list[Candidate]:
        """The recommended layout, then the fastest others that differ in more than batch and chunk sizes."""
        kinds, found = set(), []
        for candidate in [self.choice, *self.found.best] if self.choice else []:
            layout = candidate.layout
            kind = (layout.pp, layout.tp, layout.cp, layout.ep, layout.schedule, layout.zero_stage == 3)
            if kind not in kinds:
                kinds.add(kind)
                found.append(candidate)
        return found[:count]


def make_plan(request: Request) -> Plan:
    """Search, choose and explain.

    Raises:
        UserError: an unknown model or cluster, or figures that the catalogue lacks.

    """
    shape, device = load_model(request.model), load_device(request.cluster)
    _check(request, shape)
    memory = MemoryModel(shape, calibration=request.calibration)
    time = TimeModel(shape, device, request.dtype)
    space = space_of(request, shape, device)
    capacity = capacity_of(device)
    found = search(shape, time, memory, space, capacity)
    choice = choose(found, lambda each, limit: plainer_variant(each, time, memory, space, capacity, limit))
    plan = Plan(
        request=request,
        shape=shape,
        device=device,
        space=space,
        capacity=capacity,
        memory=memory,
        time=time,
        found=found,
        choice=choice,
        simple=(),
        remedies=(),
    )
    if choice is None:
        return replace(plan, remedies=tuple(remedies(plan)))
    return replace(plan, simple=tuple(simpler_layouts(plan, choice)))


def choose(found: Found, plainer: Callable[[Candidate, float], Candidate]) -> Candidate | None:
    """Recommend the simplest layout among those that are as good as the fastest.

    ``plainer`` gives the simplest variant of a candidate that takes no longer than a limit.
    """
    if not found.best:
        return None
    limit = found.best[0].time.step * _AS_FAST
    near = [plainer(each, limit) for each in found.best if each.time.step <= limit]
    return min(near, key=lambda each: (complexity(each.layout), each.time.step))


def space_of(request: Request, shape: ModelShape, device: Device) -> Space:
    """The layouts that a request allows."""
    batch = request.global_batch_size or default_batch(
        count_parameters(shape), request.seq_len, request.devices, device.devices_per_node or 1
    )
    return Space(
        devices=request.devices,
        seq_len=request.seq_len,
        global_batch_size=batch,
        devices_per_node=device.devices_per_node or 1,
        precision=precision_of(request.dtype),
        offload=request.offload,
    )


def capacity_of(device: Device) -> Capacity:
    """Bytes that the catalogue grants a layout; raises UserError when it knows no memory size."""
    if device.usable_memory is None:
        raise UserError(
            f"cluster {device.name}: the catalogue has no memory_bytes; add it and its source to the "
            "cluster's file, or name another cluster"
        )
    host = device.host_memory_bytes or 0
    return Capacity(device=device.usable_memory, host=_HOST_SHARE * host / (device.devices_per_node or 1))


def precision_of(dtype: str) -> Precision:
    """Bytes per element of a precision policy of run files: 16-bit weights, fp32 gradients and states."""
    return FP32 if dtype == "fp32" else MIXED_FP32_GRADIENTS


def default_batch(parameters: int, seq_len: int, devices: int, devices_per_node: int) -> int:
    """Samples of a step by the size of the model, as a number that many data-parallel degrees divide.

    At least one sample for each node; a power of two times the odd part of ``devices``.
    """
    tokens = next(tokens for size, tokens in _BATCH_TOKENS if parameters < size)
    wanted = max(1, tokens // seq_len, devices // devices_per_node)
    odd = devices // (devices & -devices)
    return odd * 2 ** max(0, round(math.log2(wanted / odd)))


def rule_of_thumb(shape: ModelShape) -> str:
    """What one would try first for a model of this size."""
    if shape.is_moe:
        return "experts: expert parallelism with ZeRO, and stages beyond one node"
    rules = (
        (1e9, "below 1B: a single device, copies for speed"),
        (7.5e9, "1-7B: ZeRO-2 or 3"),
        (71e9, "7-70B: tensor parallelism and sharded weights (FSDP)"),
        (410e9, "70-400B: tensor x pipeline x data parallelism"),
    )
    parameters = count_parameters(shape)
    return next((text for size, text in rules if parameters < size), "beyond 400B: 3D, better with experts")


def follows_rule(shape: ModelShape, layout: Layout) -> bool:
    """Whether a layout is of the kind that the rule of thumb names."""
    if shape.is_moe:
        return layout.ep > 1
    parameters = count_parameters(shape)
    if parameters < 1e9:
        return layout.tp == layout.pp == layout.cp == 1
    if parameters < 7.5e9:
        return layout.zero_stage >= 2 and layout.tp == layout.pp == 1
    if parameters < 71e9:
        return layout.tp > 1 and layout.zero_stage == 3 and layout.pp == 1
    return layout.tp > 1 and layout.pp > 1


# Why simpler ones lose


def simpler_layouts(plan: Plan, choice: Candidate) -> Iterator[Simple]:
    """Try what is simpler than the choice: data parallelism alone, by stage; without pipeline; no tricks."""
    for name, base in _simple_bases(plan):
        if base.devices == plan.space.devices and complexity(base) < complexity(choice.layout):
            yield Simple(name=name, outcome=_outcome(plan, choice, base))


def _simple_bases(plan: Plan) -> Iterator[tuple[str, Layout]]:
    devices, node = plan.space.devices, plan.space.devices_per_node
    base = Layout(seq_len=plan.space.seq_len, precision=plan.space.precision)
    if devices == 1:
        return
    for stage, name in enumerate(("data parallel, nothing sharded", "ZeRO-1", "ZeRO-2", "ZeRO-3")):
        yield name, base.replace(dp_shard=devices, zero_stage=stage)
    if devices > node > 1 and devices % node == 0:
        tensor = base.replace(tp=node, sequence_parallel=True, dp_shard=devices // node)
        yield f"tensor parallel {node} with ZeRO-1", tensor.replace(zero_stage=1)
        yield f"tensor parallel {node} with ZeRO-3", tensor.replace(zero_stage=3)


def _outcome(plan: Plan, choice: Candidate, base: Layout) -> str:
    """One line: why the best layout of a simple kind is not the choice."""
    if plan.space.global_batch_size % base.dp:
        return f"{base.dp} data-parallel ranks do not divide the batch of {plan.space.global_batch_size}"
    variants = list(_simple_variants(plan, base))
    wrong = variants[0].violations(plan.shape)
    if wrong:
        return wrong[0]
    best = min(
        (plan.time.estimate(each) for each in variants if plan.memory.peak(each) <= plan.capacity.device),
        key=lambda report: report.step,
        default=None,
    )
    if best is None:
        kind, every = RECOMPUTE[-1]
        least = variants[0].replace(recompute=kind, recompute_every=every)
        return explain_shortage(plan.memory.report(least), plan.capacity.device)
    slower = best.step / choice.time.step - 1
    if slower <= _AS_FAST - 1:
        return f"as fast within {100 * (_AS_FAST - 1):.0f}%"
    causes, ours = best.causes(), choice.time.causes()
    cause = max(causes, key=lambda name: causes[name] - ours[name])
    return f"{100 * slower:.0f}% slower: {cause} takes {causes[cause]:.2f} s of {best.step:.2f} s a step"


def _simple_variants(plan: Plan, base: Layout) -> Iterator[Layout]:
    """Micro batches from 1 up, each with the least recompute that fits, or with the most."""
    share = plan.space.global_batch_size // base.dp
    for micro in _MICRO_BATCHES:
        if share % micro:
            continue
        for kind, every in RECOMPUTE:
            variant = base.replace(
                micro_batch_size=micro, microbatches=share // micro, recompute=kind, recompute_every=every
            )
            if plan.memory.peak(variant) <= plan.capacity.device:
                break
        yield variant


def limit_of(plan: Plan, candidate: Candidate) -> str:
    """One line: what keeps a layout from being faster."""
    causes = candidate.time.causes()
    del causes["compute"]
    cause = max(causes, key=causes.__getitem__)
    share = causes[cause] / candidate.time.step
    text = f"{cause} ({100 * share:.0f}% of a step)" if share >= _NOTABLE else "computing"
    layout = candidate.layout
    if layout.recompute != "none":
        lighter = layout.replace(recompute="none")
        shortage = explain_shortage(plan.memory.report(lighter), plan.capacity.device)
        return f"{text}; without recompute {shortage}" if shortage else text
    return text


# When nothing fits


def remedies(plan: Plan) -> Iterator[str]:
    """Say what would make it possible: more devices, a shorter sequence, host memory."""
    space = plan.space
    layout = min(smallest_peaks(plan.shape, plan.memory, space), key=_first, default=(0.0, None))[1]
    if layout is None:
        yield f"no layout divides {space.devices} devices and a batch of {space.global_batch_size}"
        batch = smallest_batch(plan)
        yield f"a batch of {batch} samples, or a multiple, would do" if batch else "no batch would do"
        return
    shortage = explain_shortage(plan.memory.report(layout), plan.capacity.device)
    yield f"closest: {shortage or _host_shortage(plan, layout)} ({_words(layout)})"
    devices = smallest_devices(plan)
    yield f"enough: {devices} devices" if devices else "no number of these devices is enough"
    longest = largest_seq_len(plan)
    if longest:
        yield f"longest sequence on {space.devices} devices: {longest} tokens"
    else:
        yield f"no shorter sequence is enough on {space.devices} devices"
    yield from _offload_remedy(plan, layout)


def smallest_devices(plan: Plan, most: int = 2**17) -> int | None:
    """The smallest number of devices on which some layout fits: of whole nodes, or of as many again.

    Doubles the devices until one fits, then looks at the whole nodes in between. None: none up to ``most``.
    """
    devices = plan.space.devices
    while not _enough(plan, devices):
        devices *= 2
        if devices > most:
            return None
    node = plan.space.devices_per_node
    between = range(devices // 2 + node, devices, max(node, devices // 2 // _STEPS_BETWEEN // node * node))
    return next((count for count in between if count % node == 0 and _enough(plan, count)), devices)


def _enough(plan: Plan, devices: int) -> bool:
    """Whether some layout fits on so many devices, with a batch that they divide."""
    batch = -(-plan.space.global_batch_size // devices) * devices
    return _fits(plan, replace(plan.space, devices=devices, global_batch_size=batch))


def _host_shortage(plan: Plan, layout: Layout) -> str:
    needed = plan.memory.report(layout).host_peak
    return f"the host lacks {(needed - plan.capacity.host) / 1e9:.1f} GB for each device"


def _words(layout: Layout) -> str:
    degrees = ("pp", "tp", "cp", "ep", "dp_shard")
    return ", ".join(f"{name} {getattr(layout, name)}" for name in degrees if getattr(layout, name) > 1)


def smallest_batch(plan: Plan) -> int | None:
    """The smallest batch that some layout of the same devices divides; None: there is no layout."""
    batches = divisors(plan.space.devices)
    spaces = (replace(plan.space, global_batch_size=batch) for batch in batches)
    found = zip(batches, (next(skeletons(plan.shape, space), None) for space in spaces), strict=True)
    return next((batch for batch, layout in found if layout is not None), None)


def largest_seq_len(plan: Plan) -> int | None:
    """The longest shorter sequence that fits on the same devices, to an eighth; None: not even 128 tokens."""

    def too_long(seq_len: int) -> bool:
        return not _fits(plan, replace(plan.space, seq_len=seq_len))

    seq_len = plan.space.seq_len // 2
    while seq_len >= 128 and too_long(seq_len):
        seq_len //= 2
    if seq_len < 128:
        return None
    longer = range(seq_len, min(2 * seq_len, plan.space.seq_len), max(128, seq_len // 8))
    return longer[bisect_left(longer, True, lo=1, key=too_long) - 1]


def _offload_remedy(plan: Plan, layout: Layout | None) -> Iterator[str]:
    if plan.space.offload or layout is None:
        return
    space = replace(plan.space, offload=True)
    best = min(smallest_peaks(plan.shape, plan.memory, space), key=_first, default=None)
    if best is not None and best[0] <= plan.capacity.device:
        host = plan.memory.report(best[1]).host_peak
        enough = "which its host has" if host <= plan.capacity.host else "more than its share of the host"
        yield f"with offload it fits: {host / 1e9:.0f} GB of host memory for each device, {enough}"


def _fits(plan: Plan, space: Space) -> bool:
    return any(
        plan.capacity.admits(plan.memory, layout, peak)
        for peak, layout in smallest_peaks(plan.shape, plan.memory, space)
    )


def _first(pair: tuple[float, Layout]) -> float:
    return pair[0]


def _check(request: Request, shape: ModelShape) -> None:
    if request.devices < 1:
        raise UserError(f"--devices {request.devices}: expected at least 1")
    if request.seq_len < 1:
        raise UserError(f"--seq {request.seq_len}: expected at least 1")
    if request.seq_len > shape.max_seq_len:
        raise UserError(
            f"--seq {request.seq_len}: {shape.name} has {shape.max_seq_len} positions; use at most as many, "
            "or a model file with a larger max_seq_len"
        )
    if request.dtype not in DTYPES:
        raise UserError(f"--precision {request.dtype}: expected one of {', '.join(DTYPES)}")
    if request.global_batch_size is not None and request.global_batch_size < 1:
        raise UserError(f"--global-batch {request.global_batch_size}: expected at least 1")
