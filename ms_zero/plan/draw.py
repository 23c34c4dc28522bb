"""Draws a pipeline's timeline: as text, as a Chrome trace, as a figure (matplotlib, if it is installed)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from ms_zero.errors import UserError
from ms_zero.pipeline.schedule import Action, Timeline, held_after

COLOURS = {"F": "#4878a8", "B": "#d98344", "W": "#6a9a58"}
"""Fill of each kind of action."""

_LEAST_WIDTH = 40
_SUFFIXES = (".png", ".svg", ".pdf")


def text_timeline(timeline: Timeline, width: int = 120) -> Iterator[str]:
    """Rows of a timeline, one a rank, wrapped at ``width`` characters; a dot is idle time.

    A column is as much time as the shortest action takes. ``F0`` is the forward of microbatch 0, with its
    virtual stage in front where a rank has several.
    """
    unit = _unit(timeline)
    cell = 1 + max(len(_label(timeline, action)) for order in timeline.schedule.orders for action in order)
    rows = [_row(timeline, rank, unit, cell) for rank in range(timeline.schedule.num_ranks)]
    names = [f"rank {rank} " for rank in range(len(rows))]
    margin = max(map(len, names))
    step = max(cell, (max(width, _LEAST_WIDTH) - margin) // cell * cell)
    for start in range(0, max(map(len, rows)), step):
        if start:
            yield ""
        for name, row in zip(names, rows, strict=True):
            yield f"{name:{margin}s}{row[start : start + step]}".rstrip()


def text_memory(timeline: Timeline, width: int = 120) -> Iterator[str]:
    """Microbatches (per virtual stage) that each rank holds after each of its actions, and the most."""
    for rank, order in enumerate(timeline.schedule.orders):
        counts = held_after(order, "W")
        shown = " ".join(map(str, counts))
        room = max(width, _LEAST_WIDTH) - 24
        if len(shown) > room:
            shown = f"{shown[:room].rsplit(' ', 1)[0]} ..."
        yield f"rank {rank} holds at most {max(counts)}: {shown}"


def chrome_trace(timeline: Timeline, microseconds: float = 1000.0) -> dict[str, Any]:
    """The timeline for chrome://tracing or Perfetto, with a counter of held microbatches.

    Args:
        timeline: a simulated schedule.
        microseconds: length of a unit of its times.

    """
    events: list[dict[str, Any]] = []
    for rank, order in enumerate(timeline.schedule.orders):
        events.append(
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
        )
        held = held_after(order, "W")
        spans = zip(order, timeline.starts[rank], timeline.ends[rank], held, strict=True)
        for action, start, end, count in spans:
            begin, finish = float(start * microseconds), float(end * microseconds)
            events.append(
                {
                    "ph": "X",
                    "name": str(action),
                    "cat": action.kind,
                    "pid": 0,
                    "tid": rank,
                    "ts": begin,
                    "dur": finish - begin,
                    "args": {"stage": action.stage, "microbatch": action.microbatch},
                }
            )
            events.append(
                {"ph": "C", "name": f"held by rank {rank}", "pid": 0, "ts": finish, "args": {"held": count}}
            )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(timeline: Timeline, path: Path, microseconds: float = 1000.0) -> None:
    """Write a Chrome trace as JSON; raises UserError when the file cannot be written."""
    try:
        path.write_text(json.dumps(chrome_trace(timeline, microseconds)), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the trace: {error.strerror}") from None


def write_figure(timeline: Timeline, path: Path) -> None:
    """Draw a timeline with matplotlib; raises UserError without it, or for an unknown kind of file."""
    if path.suffix not in _SUFFIXES:
        raise UserError(f"{path}: expected a name that ends in {', '.join(_SUFFIXES)}")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError:
        raise UserError(
            f"{path}: drawing needs matplotlib, which is not installed; run 'pip install matplotlib', or use "
            "the text timeline or --trace"
        ) from None
    matplotlib.use("Agg")
    ranks = timeline.schedule.num_ranks
    figure = Figure(figsize=(12, 1 + 0.4 * ranks), layout="constrained")
    axes = figure.add_subplot()
    for rank, order in enumerate(timeline.schedule.orders):
        for action, start, end in zip(order, timeline.starts[rank], timeline.ends[rank], strict=True):
            axes.barh(rank, float(end - start), left=float(start), height=0.9, color=COLOURS[action.kind])
    axes.set(xlabel="time", ylabel="rank", title=timeline.schedule.name, yticks=range(ranks))
    axes.invert_yaxis()
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"{path}: cannot write the figure: {error.strerror}") from None


def _row(timeline: Timeline, rank: int, unit: Any, cell: int) -> str:
    parts, column = [], 0
    spans = zip(
        timeline.schedule.orders[rank], timeline.starts[rank], timeline.ends[rank], strict=True
    )
    for action, start, end in spans:
        begin = max(column, round(start / unit))
        finish = max(begin + 1, round(end / unit))
        parts.append(("." + " " * (cell - 1)) * (begin - column))
        room = (finish - begin) * cell - 1
        parts.append(f"{_label(timeline, action):-<{room}s} ")
        column = finish
    return "".join(parts)


def _label(timeline: Timeline, action: Action) -> str:
    several = timeline.schedule.num_stages > timeline.schedule.num_ranks
    return str(action) if several else f"{action.kind}{action.microbatch}"


def _unit(timeline: Timeline) -> Any:
    """The shortest action that takes any time; 1 if none does."""
    spans = (
        end - start
        for starts, ends in zip(timeline.starts, timeline.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
        if end > start
    )
    return min(spans, default=Fraction(1))
