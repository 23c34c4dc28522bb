"""Ordered remedies for the classic troubles of a run, each with the effect that is predicted for it.

Memory and speed: every single change to the layout is predicted, those that help are listed, best first.
Convergence and NaN: what the run file says is held against what usually goes wrong, suspects first.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ms_zero.errors import UserError
from ms_zero.plan.candidates import recompute_choices
from ms_zero.plan.layout import Layout
from ms_zero.plan.memory import MemoryModel
from ms_zero.plan.report import size_unit
from ms_zero.plan.time import TimeModel

if TYPE_CHECKING:
    from ms_zero.config import RunConfig

PROBLEMS = ("memory", "speed", "convergence", "nan")
"""What can be asked about."""


def remedies_for(
    problem: str,
    config: RunConfig,
    layout: Layout,
    memory: MemoryModel,
    time: TimeModel | None,
    capacity: float | None,
) -> Iterator[str]:
    """Numbered remedies for a problem, the most promising first.

    Args:
        problem: one of PROBLEMS.
        config: the run.
        layout: its layout.
        memory: its memory model.
        time: its time model; None when no time can be predicted.
        capacity: usable bytes of a device; None when not known.

    """
    if problem not in PROBLEMS:
        raise UserError(f"--diagnose {problem}: expected one of {', '.join(PROBLEMS)}")
    found = {
        "memory": lambda: _memory_remedies(layout, memory, time, capacity),
        "speed": lambda: _speed_remedies(layout, memory, time, capacity),
        "convergence": lambda: _convergence_suspects(config),
        "nan": lambda: _nan_suspects(config),
    }[problem]()
    yield f"remedies for {problem}, most promising first"
    lines = list(found) or ["nothing that is known for this run would help"]
    yield from (f"  {number}. {line}" for number, line in enumerate(lines, 1))


def single_changes(layout: Layout, memory: MemoryModel) -> Iterator[tuple[str, Layout]]:
    """Layouts that differ in one decision and train the same batch, as (what to do, layout)."""
    for text, changes in _changes(layout):
        changed = layout.replace(**changes)
        if _may_recompute(changed) and not changed.violations(memory.shape) and _has_a_plan(changed, memory):
            yield text, changed


def _may_recompute(layout: Layout) -> bool:
    """Whether the engine does this kind of recompute under this schedule."""
    kinds = dict(recompute_choices(layout))
    return layout.pp == 1 or layout.recompute in kinds or (layout.recompute == "selective" and len(kinds) > 1)


def _has_a_plan(layout: Layout, memory: MemoryModel) -> bool:
    """Whether a budget of recompute, if there is one, is enough."""
    try:
        memory.peak(layout)
    except UserError:
        return False
    return True


def _changes(layout: Layout) -> Iterator[tuple[str, dict[str, object]]]:
    micro, count = layout.micro_batch_size, layout.microbatches
    if micro > 1 and micro % 2 == 0:
        smaller = {"micro_batch_size": micro // 2, "microbatches": 2 * count}
        yield f"train.micro_batch_size {micro // 2}", smaller
    if count % 2 == 0:
        larger = {"micro_batch_size": 2 * micro, "microbatches": count // 2}
        yield f"train.micro_batch_size {2 * micro}", larger
    if layout.recompute != "full":
        yield "memory.recompute full", {"recompute": "full"}
    if layout.recompute == "none":
        yield "memory.recompute every_k, recompute_every 2", {"recompute": "every_k", "recompute_every": 2}
    else:
        yield "memory.recompute none", {"recompute": "none"}
    if not layout.activation_offload:
        yield "memory.activations host", {"activation_offload": True, "activation_bits": None}
    if layout.activation_offload or layout.activation_bits:
        yield "memory.activations device", {"activation_offload": False, "activation_bits": None}
    if not layout.flash_attention:
        yield "fused attention", {"flash_attention": True}
    is_compiled = layout.engine == "graph"
    if layout.dp * layout.cp > 1 and (is_compiled or layout.hsdp_level is None):
        for stage in {0, 1, 2, 3} - {layout.zero_stage}:
            level = {"hsdp_level": stage or None} if is_compiled else {}
            yield f"parallel.zero_stage {stage}", {"zero_stage": stage, "parameter_offload": False, **level}
    if layout.optimizer_offload < 1 and not is_compiled:
        yield "offload.optimizer cpu", {"optimizer_offload": 1.0}
    if layout.optimizer_offload > 0:
        yield "offload.optimizer none", {"optimizer_offload": 0.0}
    for axis in ("tp", "pp", "cp"):
        if layout.dp_shard % 2 == 0:
            text = f"parallel.{axis} {2 * getattr(layout, axis)}, half the data-parallel ranks"
            halved = {axis: 2 * getattr(layout, axis), "dp_shard": layout.dp_shard // 2}
            halved |= {"microbatches": 2 * count}
            yield text, halved | ({"sequence_parallel": True} if axis == "tp" else {})


def _memory_remedies(
    layout: Layout, memory: MemoryModel, time: TimeModel | None, capacity: float | None
) -> Iterator[str]:
    """What lowers the peak: first what makes it fit, quickest first; then the rest, smallest first."""
    now = memory.peak(layout)
    step = time.estimate(layout).step if time else 0.0
    size, unit = size_unit(now)
    rows = []
    for text, changed in single_changes(layout, memory):
        peak = memory.peak(changed)
        if peak < 0.99 * now:
            slower = time.estimate(changed).step / step - 1 if time else 0.0
            fits = capacity is not None and peak <= capacity
            rows.append((not fits, slower if fits else peak, text, peak, slower))
    for misses, _, text, peak, slower in sorted(rows):
        change = f", {_percent(slower)} step time" if time else ""
        verdict = "" if capacity is None else " (does not fit yet)" if misses else " (fits)"
        yield f"{text}: {now / size:.1f} -> {peak / size:.1f} {unit}{change}{verdict}"
    shorter = layout.seq_len // 2
    if shorter >= 1 and _has_a_plan(layout.replace(seq_len=shorter), memory):
        peak = memory.peak(layout.replace(seq_len=shorter))
        yield f"data.seq_len {shorter}: {now / size:.1f} -> {peak / size:.1f} {unit}, another training"


def _speed_remedies(
    layout: Layout, memory: MemoryModel, time: TimeModel | None, capacity: float | None
) -> Iterator[str]:
    if time is None:
        return
    now = time.estimate(layout)
    size, unit = size_unit(memory.peak(layout))
    rows = []
    for text, changed in single_changes(layout, memory):
        report = time.estimate(changed)
        peak = memory.peak(changed)
        if report.step < 0.995 * now.step and (capacity is None or peak <= capacity):
            rows.append((report.step / now.step - 1, text, peak))
    for faster, text, peak in sorted(rows):
        yield f"{text}: {_percent(faster)} step time, {peak / size:.1f} {unit}"
    causes = now.causes()
    del causes["compute"]
    cause = max(causes, key=causes.__getitem__)
    yield f"largest cost besides computing: {cause}, {100 * causes[cause] / now.step:.0f}% of a step"


def _convergence_suspects(config: RunConfig) -> Iterator[str]:
    optim, train, data = config.optim, config.train, config.data
    if optim.lr > _SAFE_LR:
        yield f"optim.lr {optim.lr:g}: above {_SAFE_LR:g} few models stay stable; try a third of it"
    if optim.warmup_steps < min(100, train.steps // 20):
        yield f"optim.warmup_steps {optim.warmup_steps}: a longer warm-up lets Adam's second moment settle"
    if not optim.clip_norm:
        yield "optim.clip_norm 0: clipping at 1.0 stops single batches from undoing many steps"
    if optim.kind == "adamw" and optim.beta2 > _SAFE_BETA2:
        yield f"optim.beta2 {optim.beta2:g} remembers {1 / (1 - optim.beta2):.0f} steps; 0.95 forgets in 20"
    if train.global_batch_size * data.seq_len < _LEAST_BATCH_TOKENS:
        tokens = train.global_batch_size * data.seq_len
        yield f"a batch of {tokens} tokens is noisy: raise train.global_batch_size or lower optim.lr"
    if optim.weight_decay == 0:
        yield "optim.weight_decay 0: 0.1 is usual and keeps weights from growing"
    yield "compare the first steps with one process on the same data: 'python scripts/parity.py' does it"
    yield "look at the data: 'ms-zero data lint' finds empty, repeated and broken documents"


def _nan_suspects(config: RunConfig) -> Iterator[str]:
    precision, optim = config.precision, config.optim
    if precision.compute == "fp16" and precision.loss_scale == "static":
        yield "precision.loss_scale static: dynamic halves the scale when a gradient overflows"
    if precision.compute == "fp16":
        yield "precision.policy fp16 overflows above 65504: bf16 has the range of fp32"
    if precision.reduce != "fp32":
        yield f"precision.reduce {precision.reduce}: sums of many ranks lose digits; fp32 does not"
    if precision.master == "param":
        yield "precision.master param: updates smaller than a bf16 step are lost; fp32 keeps them"
    if not optim.clip_norm:
        yield "optim.clip_norm 0: clip at 1.0"
    if optim.kind == "adamw" and optim.eps < _SAFE_EPS:
        yield f"optim.eps {optim.eps:g}: too small to matter where the second moment is zero; use 1e-8"
    if optim.lr > _SAFE_LR or optim.warmup_steps < _LEAST_WARMUP:
        yield f"optim.lr {optim.lr:g} after {optim.warmup_steps} steps of warm-up: lower one, raise the other"
    yield "the log names the first tensor that is not finite; a skipped step is counted there"
    yield "train.debug_collectives true: tells ranks apart that disagree"


def _percent(change: float) -> str:
    return f"{100 * change:+.0f}%"


_SAFE_LR = 1e-3
_SAFE_BETA2 = 0.98
_SAFE_EPS = 1e-10
_LEAST_WARMUP = 10
_LEAST_BATCH_TOKENS = 2**16
