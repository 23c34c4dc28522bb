"""What a measured run says about the planner's estimates.

A run writes `logs/metrics-00000.jsonl`: its effective config, then one record a step with the memory of the
rank and its tokens per second. The memory model splits its estimate into what is known exactly (weights,
gradients, optimizer state), what a step allocates (activations, logits, temporaries: off by a factor) and the
runtime's reserve (off by an amount). One run gives one equation: what it used beyond the estimate counts as
the factor, up to 1.5, so that larger layouts are corrected more, and the rest as reserve; what it used less
is first taken off the reserve. Runs that differ give both by least squares. On a CPU, where memory is that of
the whole process, one run gives the reserve alone.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ms_zero.config import RunConfig, load_config
from ms_zero.errors import UserError
from ms_zero.plan.memory import Calibration, MemoryModel
from ms_zero.plan.report import StageMemory
from ms_zero.plan.run import layout_of, memory_model_of

_STATES = ("weights", "gradients", "master", "moments")
_WARM_UP = 0.5  # share of the records, from the first, that rates are not taken from
_MAX_SCALE = 1.5  # a larger factor from a single run is more likely the runtime's own memory
_SPREAD = 0.2  # two runs whose allocations differ by less say nothing about a factor


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run as its log tells it.

    Args:
        label: the file.
        config: the effective config.
        world_size: its workers.
        memory_bytes: the most that the rank held; None when the log has none.
        tokens_per_second_per_device: median over the second half of the steps; None likewise.
        steps: number of step records.

    """

    label: str
    config: RunConfig
    world_size: int
    memory_bytes: float | None
    tokens_per_second_per_device: float | None
    steps: int


def read_run(path: str | Path) -> MeasuredRun:
    """Read the log of a run; raises UserError when it is not one or has no step."""
    events = list(_events(Path(path)))
    starts = [event for event in events if event.get("event") == "run"]
    if not starts:
        raise UserError(f"{path}: no event 'run' with the config; expected logs/metrics-00000.jsonl of a run")
    start = starts[-1]
    if not isinstance(start.get("config"), str) or not isinstance(start.get("world_size"), int):
        raise UserError(f"{path}: the event 'run' needs config (text) and world_size (a number)")
    steps = [event for event in events[events.index(start) :] if event.get("event") == "step"]
    if not steps:
        raise UserError(f"{path}: the run has no step yet")
    rates = _numbers(steps[int(len(steps) * _WARM_UP) :], "tokens_per_second_per_device")
    return MeasuredRun(
        label=str(path),
        config=_config(start["config"], start["world_size"], str(path)),
        world_size=start["world_size"],
        memory_bytes=max(_numbers(steps, "memory_bytes"), default=None),
        tokens_per_second_per_device=median(rates) if rates else None,
        steps=len(steps),
    )


def calibrate(runs: Sequence[MeasuredRun], target: str | None = None) -> Calibration:
    """Correct the memory model by one or more runs.

    Args:
        runs: what was measured.
        target: device target that is planned for; None: that of the runs.

    Raises:
        UserError: no run tells its memory, or they ran on another kind of device.

    """
    used = [run for run in runs if run.memory_bytes is not None]
    if not used:
        raise UserError("no run tells its memory; memory_bytes is missing in the step records")
    target = target or used[0].config.hardware.target
    for run in used:
        if run.config.hardware.target != target:
            found = run.config.hardware.target
            raise UserError(f"{run.label}: measured on {found}, which says nothing about {target}; run there")
    points = [_point(run) for run in used]
    source = ", ".join(run.label for run in used)
    dynamic = [point.dynamic for point in points]
    if max(dynamic) > min(dynamic) * (1 + _SPREAD):
        scale, reserve = _fit(points)
    else:
        worst = max(points, key=lambda point: point.measured - point.predicted)
        scale, reserve = _single(worst, 1.0 if target == "CPU" else _MAX_SCALE)
    return Calibration(dynamic_scale=scale, reserve=reserve, source=source)


@dataclass(frozen=True)
class _Point:
    """A run's memory: measured, and the three parts of the estimate."""

    measured: float
    states: float
    dynamic: float
    reserve: float
    margin: float

    @property
    def predicted(self) -> float:
        return self.states + self.dynamic * (1 + self.margin) + self.reserve


def _point(run: MeasuredRun) -> _Point:
    model = memory_model_of(run.config, run.label)
    worst = _worst(model, run.config)
    states = sum(worst.parts.get(name, 0.0) for name in _STATES)
    dynamic = sum(worst.parts.values()) - states - worst.parts.get("reserve", 0.0)
    return _Point(run.memory_bytes, states, dynamic, model.reserve, model.margin)


def _worst(model: MemoryModel, config: RunConfig) -> StageMemory:
    return model.report(layout_of(config)).worst


def _single(point: _Point, max_scale: float) -> tuple[float, float]:
    """Scale and reserve that make one estimate equal to its measurement."""
    beyond = point.measured - point.predicted
    allocated = point.dynamic * (1 + point.margin)
    if beyond >= 0:
        scale = min(max_scale, 1 + beyond / allocated)
        return scale, point.measured - point.states - scale * allocated
    reserve = max(0.0, point.reserve + beyond)
    left = point.measured - point.states - reserve
    return max(0.0, left / allocated) if reserve == 0 else 1.0, reserve


def _fit(points: Sequence[_Point]) -> tuple[float, float]:
    """Scale and reserve by least squares; neither is negative."""
    allocated = [point.dynamic * (1 + point.margin) for point in points]
    rest = [point.measured - point.states for point in points]
    mean, mean_rest = sum(allocated) / len(points), sum(rest) / len(points)
    spread = sum((each - mean) ** 2 for each in allocated)
    together = sum((x - mean) * (y - mean_rest) for x, y in zip(allocated, rest, strict=True))
    scale = max(0.0, together / spread)
    reserve = mean_rest - scale * mean
    if reserve < 0:
        return max(0.0, mean_rest / mean), 0.0
    return scale, reserve


def _events(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a JSON-lines file; half a line at the end is what a killed writer leaves."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot read this log: {' '.join(str(error).split())}") from None
    for number, line in enumerate(lines, 1):
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            if number == len(lines):
                return
            raise UserError(f"{path}:{number}: not a JSON object; expected the log of a run") from None
        if not isinstance(event, dict):
            raise UserError(f"{path}:{number}: not a JSON object; expected the log of a run")
        yield event


def _numbers(events: Sequence[dict[str, Any]], name: str) -> list[float]:
    values = [event.get(name) for event in events]
    return [
        float(value)
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    ]


def _config(text: str, world_size: int, label: str) -> RunConfig:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(text, encoding="utf-8")
        try:
            return load_config(path, world_size=world_size, to_run=False).config
        except UserError as error:
            text = str(error).splitlines()[0]
            raise UserError(f"{label}: the config of this run is not that of this version: {text}") from None
