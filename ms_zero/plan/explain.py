"""Puts plans and estimates into words: tables of plain text, one fact a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ms_zero.plan.compiled import stage_bytes
from ms_zero.plan.layout import Layout
from ms_zero.plan.parameters import active_parameters, count_parameters
from ms_zero.plan.planner import Plan, follows_rule, limit_of, rule_of_thumb
from ms_zero.plan.report import PARTS, MemoryReport, TimeReport, size_unit
from ms_zero.plan.search import Candidate
from ms_zero.plan.shapes import ModelShape
from ms_zero.plan.traffic import step_bytes

_SHOWN = 5


def explain_plan(plan: Plan, count: int = _SHOWN) -> Iterator[str]:
    """The answer to a request, line by line."""
    yield from _question(plan)
    if plan.choice is None:
        yield "nothing fits"
        yield from (f"  {remedy}" for remedy in plan.remedies)
        return
    yield ""
    yield from layout_table(plan, plan.alternatives(count))
    yield ""
    yield f"recommended: {describe(plan.choice.layout)}"
    yield from time_lines(plan.choice.time)
    held = plan.time.parameters(plan.choice.layout)
    mean = sum(each.total for each in held) / plan.choice.layout.pp
    yield from traffic_line(plan.shape, plan.choice.layout, mean)
    yield from memory_lines(plan.memory.report(plan.choice.layout), plan.capacity.device)
    if plan.request.tokens:
        yield (
            f"{count_text(plan.request.tokens)} tokens take {plan.choice.time.days(plan.request.tokens):.1f} "
            f"days, {plan.request.tokens / plan.choice.layout.tokens_per_step:.0f} steps"
        )
    if plan.simple:
        yield "simpler layouts"
        width = max(len(each.name) for each in plan.simple)
        yield from (f"  {each.name:{width}s}  {each.outcome}" for each in plan.simple)
    agrees = "agrees" if follows_rule(plan.shape, plan.choice.layout) else "differs"
    yield f"rule of thumb: {rule_of_thumb(plan.shape)} ({agrees})"


def _question(plan: Plan) -> Iterator[str]:
    shape, device, space = plan.shape, plan.device, plan.space
    total, active = count_parameters(shape), active_parameters(shape)
    uses = f" ({count_text(active)} active)" if active != total else ""
    yield f"{shape.name}: {count_text(total)} parameters{uses}, {shape.num_layers} layers"
    if shape.note:
        yield f"note: {shape.note}"
    yield (
        f"{space.devices} x {device.name}: {plan.time.rates.matmul / 1e12:.0f} TFLOP/s "
        f"{plan.request.dtype}, {plan.capacity.device / 1e9:.1f} GB usable, {space.devices_per_node} a node"
    )
    tokens = space.global_batch_size * space.seq_len
    chosen = "" if plan.request.global_batch_size else " (by model size)"
    yield f"a step: {space.global_batch_size} samples x {space.seq_len} = {count_text(tokens)} tokens{chosen}"
    yield (
        f"searched {plan.found.skeletons} combinations of degrees, batch and schedule; predicted "
        f"{plan.found.estimated} layouts, simulated {len(plan.found.best)}"
    )


def layout_table(plan: Plan, candidates: Sequence[Candidate]) -> Iterator[str]:
    """One line a candidate: its layout and what limits it."""
    yield from table(layout_rows(plan, candidates))


def layout_rows(plan: Plan, candidates: Sequence[Candidate]) -> list[tuple[str, ...]]:
    """The titles of the columns, then the cells of each candidate."""
    titles = ("", "layout", "tok/s/device", "MFU", "step", "memory", "limited by")
    return [titles] + [
        (
            str(number),
            describe(each.layout),
            f"{each.time.tokens_per_second_per_device:.0f}",
            f"{100 * each.time.mfu:.1f}%",
            f"{each.time.step:.2f} s",
            f"{each.memory / 1e9:.1f} GB",
            limit_of(plan, each),
        )
        for number, each in enumerate(candidates, 1)
    ]


def describe(layout: Layout) -> str:
    """A layout in a few words."""
    degrees = ("pp", "tp", "cp", "ep", "dp_replicate", "dp_shard")
    parts = [f"{name} {getattr(layout, name)}" for name in degrees if getattr(layout, name) > 1]
    if layout.dp * layout.cp > 1:
        parts.append(f"ZeRO-{layout.zero_stage}")
    if layout.pp > 1:
        virtual = f" x{layout.virtual_stages}" if layout.virtual_stages > 1 else ""
        parts.append(f"{layout.schedule}{virtual}")
    parts.append(f"micro batch {layout.micro_batch_size} x {layout.microbatches}")
    if layout.recompute != "none":
        every = f" {layout.recompute_every}" if layout.recompute == "every_k" else ""
        parts.append(f"recompute {layout.recompute}{every}")
    if layout.optimizer_offload:
        parts.append(f"{100 * layout.optimizer_offload:.0f}% of the optimizer on {layout.offload_to}")
    if layout.activation_offload or layout.activation_bits:
        how = f" in {layout.activation_bits} bits" if layout.activation_bits else ""
        parts.append(f"activations{how}{' on the host' if layout.activation_offload else ''}")
    if layout.parameter_offload:
        parts.append("weights on the host")
    return ", ".join(parts)


def time_lines(report: TimeReport) -> Iterator[str]:
    """A step by cause, and what follows from it."""
    how = " (pipeline simulated)" if report.simulated and report.bubble else ""
    yield f"a step takes {report.step:.3f} s{how}"
    for cause, seconds in report.causes().items():
        if seconds > 5e-4:
            yield f"  {cause:18s} {seconds:9.3f} s  {100 * seconds / report.step:5.1f}%"
    yield (
        f"  {report.tokens_per_second_per_device:.0f} tokens/s/device, "
        f"{report.flops_per_device / 1e12:.3g} TFLOP/s/device, MFU {100 * report.mfu:.1f}%"
    )


def traffic_line(shape: ModelShape, layout: Layout, parameters: float) -> Iterator[str]:
    """What a device in the middle of the pipeline sends in a step, by axis; nothing where it is alone."""
    if layout.engine == "graph":
        sent = stage_bytes(shape, layout, layout.pp // 2)
    else:
        sent = step_bytes(shape, layout, parameters)
    sent = {axis: size for axis, size in sent.items() if size}
    if sent:
        yield "a device sends in a step: " + ", ".join(
            f"{axis} {size / size_unit(size)[0]:.3g} {size_unit(size)[1]}" for axis, size in sent.items()
        )


def memory_lines(report: MemoryReport, capacity: float | None) -> Iterator[str]:
    """Memory of the fullest stage by part."""
    worst = report.worst
    size, unit = size_unit(worst.peak)
    room = f" of {capacity / size:.1f}" if capacity else ""
    where = f" in stage {worst.stage}" if len(report.stages) > 1 else ""
    yield f"memory: {worst.peak / size:.2f}{room} {unit}{where}, from {worst.low / size:.2f} {unit}"
    for name in PARTS:
        if worst.parts.get(name, 0.0) > 0.005 * size:
            yield f"  {name:18s} {worst.parts[name] / size:9.2f} {unit}"
    if report.host_peak:
        yield f"  {'on the host':18s} {report.host_peak / size:9.2f} {unit}"


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Columns as wide as they have to be."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (f"{cell:{width}s}" for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def count_text(number: float) -> str:
    """A number with the usual letter: 68.98 B, 2 T, 4.19 M."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.2f}".rstrip("0").rstrip(".") + f" {letter}"
    return f"{number:.0f}"


def lines(parts: Iterable[str]) -> str:
    """One text."""
    return "\n".join(parts)
