"""One self-contained page about a plan: memory bars, pipeline timeline, memory against throughput.

Inline style and SVG, no scripts, nothing from the network; readable on a phone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from ms_zero.errors import UserError
from ms_zero.pipeline.schedule import Timeline, build
from ms_zero.plan.draw import COLOURS
from ms_zero.plan.explain import count_text, describe, layout_rows
from ms_zero.plan.layout import Layout
from ms_zero.plan.parameters import count_parameters
from ms_zero.plan.pipeline import timeline_of
from ms_zero.plan.planner import Plan
from ms_zero.plan.report import PARTS
from ms_zero.plan.search import Candidate, trade_offs

_PALETTE = (
    "#4878a8", "#d98344", "#6a9a58", "#b05c5c", "#8b74ad", "#8a6d5c",
    "#c98bb0", "#7f7f7f", "#b8a23c", "#4fa3ad", "#a9bcd4",
)  # fmt: skip
_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;margin:0 auto;max-width:60rem;padding:1rem;color:#222;background:#fff}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;width:100%}
td,th{padding:.3rem .5rem;border-bottom:1px solid #ddd;text-align:left}
.scroll{overflow-x:auto}svg{max-width:100%;height:auto}svg text{font-size:13px}
.key span{display:inline-block;margin-right:1rem}
.key i{display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem}
@media(max-width:40rem){svg text{font-size:24px}}
"""
_SHOWN = 6
# Rounds of p microbatches in the drawing: ramp-up, steady state and end.
_DRAWN_ROUNDS = 2


def write_page(plan: Plan, path: Path) -> None:
    """Write the page; raises UserError when the file cannot be written."""
    try:
        path.write_text(page(plan), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot write the page: {error.strerror}") from None


def page(plan: Plan) -> str:
    """The page as HTML."""
    title = f"{plan.shape.name} on {plan.space.devices} x {plan.device.name}"
    body = [f"<h1>{escape(title)}</h1>", _summary(plan)]
    if plan.choice is None:
        body += ["<h2>Nothing fits</h2>", _list(plan.remedies)]
    else:
        shown = plan.alternatives(_SHOWN)
        body += ["<h2>Layouts</h2>", _table(plan, shown)]
        body += ["<h2>Memory of the fullest device</h2>", _memory_bars(plan, shown)]
        body += ["<h2>Memory against throughput</h2>", _pareto(plan)]
        body += ["<h2>A step by cause</h2>", _causes(plan.choice)]
        if plan.choice.layout.pp > 1:
            body += ["<h2>Pipeline</h2>", _pipeline(plan, plan.choice)]
        if plan.simple:
            simple = [f"{each.name}: {each.outcome}" for each in plan.simple]
            body += ["<h2>Why not simpler</h2>", _list(simple)]
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _summary(plan: Plan) -> str:
    batch = plan.space.global_batch_size
    text = (
        f"{count_text(count_parameters(plan.shape))} parameters, {plan.shape.num_layers} layers; "
        f"{batch} samples of {plan.space.seq_len} tokens a step; {plan.request.dtype}."
    )
    if plan.choice is not None:
        text += f" Recommended: {describe(plan.choice.layout)}."
        if plan.request.tokens:
            days = plan.choice.time.days(plan.request.tokens)
            text += f" {count_text(plan.request.tokens)} tokens take {days:.1f} days."
    return f"<p>{escape(text)}</p>"


def _table(plan: Plan, shown: Sequence[Candidate]) -> str:
    titles, *cells = layout_rows(plan, shown)
    rows = ["".join(f"<th>{escape(cell)}</th>" for cell in titles)]
    rows += ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in cells]
    return f'<div class="scroll"><table>{"".join(f"<tr>{row}</tr>" for row in rows)}</table></div>'


def _memory_bars(plan: Plan, shown: Sequence[Candidate]) -> str:
    capacity = plan.capacity.device
    height, shapes = 26 * len(shown) + 24, []
    for row, each in enumerate(shown):
        left, parts = 30.0, plan.memory.report(each.layout).worst.parts
        shapes.append(f'<text x="4" y="{26 * row + 18}">{row + 1}</text>')
        for colour, name in zip(_PALETTE, PARTS, strict=True):
            size = 640 * parts.get(name, 0.0) / capacity
            if size > 0.05:
                tip = f"{name} {parts[name] / 1e9:.2f} GB"
                shapes.append(_box(left, 26 * row + 4, size, 20, colour, tip))
                left += size
    shapes.append(f'<line x1="670" y1="0" x2="670" y2="{height - 20}" stroke="#222"/>')
    shapes.append(f'<text x="670" y="{height - 6}" text-anchor="end">{capacity / 1e9:.1f} GB usable</text>')
    first = plan.memory.report(shown[0].layout).worst.parts
    named = [
        (f"{name} {first[name] / 1e9:.2f} GB" if name in first else name, colour)
        for colour, name in zip(_PALETTE, PARTS, strict=True)
    ]
    return _svg(720, height, shapes) + "<p>Sizes are those of layout 1.</p>" + _key(named)


def _pareto(plan: Plan) -> str:
    """Variants of the best layouts by memory and speed; along the front, what nothing smaller outruns."""
    points = sorted(
        trade_offs(plan.found, plan.time, plan.memory, plan.space, plan.capacity),
        key=lambda point: (point[0], -point[1]),
    )
    front = _front(points)
    right, top = plan.capacity.device, max(speed for _, speed, _ in points)
    bottom = max(0.0, 0.9 * min(speed for _, speed, _ in front))

    def place(memory: float, speed: float) -> tuple[float, float]:
        return 50 + 650 * memory / right, 250 - 220 * (speed - bottom) / (top - bottom)

    shapes = [
        '<line x1="50" y1="250" x2="700" y2="250" stroke="#222"/>',
        '<line x1="50" y1="10" x2="50" y2="250" stroke="#222"/>',
        f'<text x="700" y="274" text-anchor="end">memory, 0 to {right / 1e9:.0f} GB</text>',
        f'<text x="56" y="22">tokens/s/device, {bottom:.0f} to {top:.0f}</text>',
    ]
    places = (place(memory, speed) for memory, speed, _ in points if speed >= bottom)
    for x, y in dict.fromkeys((2 * round(x / 2), 2 * round(y / 2)) for x, y in places):
        shapes.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{COLOURS["F"]}" opacity=".4"/>')
    for memory, speed, layout in front:
        x, y = place(memory, speed)
        tip = f"{describe(layout)}: {speed:.0f} tokens/s/device, {memory / 1e9:.1f} GB"
        shapes.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{COLOURS["B"]}">'
            f"<title>{escape(tip)}</title></circle>"
        )
    named = (("nothing is both smaller and faster", COLOURS["B"]), ("others", COLOURS["F"]))
    rows = [
        f"{memory / 1e9:.1f} GB, {speed:.0f} tokens/s/device: {describe(layout)}"
        for memory, speed, layout in _thinned(front)
    ]
    return _svg(720, 282, shapes) + _key(named) + _list(rows)


def _front(points: Sequence[tuple[float, float, Layout]]) -> list[tuple[float, float, Layout]]:
    """Of points sorted by memory those that are faster than all before."""
    found: list[tuple[float, float, Layout]] = []
    for point in points:
        if not found or point[1] > found[-1][1]:
            found.append(point)
    return found


def _thinned(front: Sequence[tuple[float, float, Layout]]) -> list[tuple[float, float, Layout]]:
    """At most _SHOWN of them, the last one included."""
    step = -(-len(front) // _SHOWN)
    return list(front[::-1][::step][::-1])


def _causes(choice: Candidate) -> str:
    left, shapes, named = 10.0, [], []
    for colour, (cause, seconds) in zip(_PALETTE, choice.time.causes().items(), strict=False):
        size = 700 * seconds / choice.time.step
        if size > 0.5:
            shapes.append(_box(left, 4, size, 24, colour, f"{cause} {seconds:.3f} s"))
            left += size
            named.append((f"{cause} {100 * seconds / choice.time.step:.1f}%", colour))
    return _svg(720, 32, shapes) + _key(named)


def _pipeline(plan: Plan, choice: Candidate) -> str:
    layout = choice.layout
    count = min(layout.microbatches, _DRAWN_ROUNDS * layout.pp)
    schedule = build(layout.schedule, layout.pp, count, layout.virtual_stages)
    chunks, transfer = plan.time.chunk_seconds(layout), plan.time.transfer_seconds(layout)
    timeline = timeline_of(schedule, chunks, transfer)
    text = f"{layout.schedule} with the first {count} of {layout.microbatches} microbatches."
    kinds = (("forward", COLOURS["F"]), ("backward", COLOURS["B"]), ("weight gradients", COLOURS["W"]))
    return f"<p>{escape(text)}</p>" + _timeline(timeline) + _key(kinds)


def _timeline(timeline: Timeline) -> str:
    ranks, scale = timeline.schedule.num_ranks, 700 / timeline.makespan
    row = 16 if ranks <= 16 else 8
    shapes = []
    for rank, order in enumerate(timeline.schedule.orders):
        for action, start, end in zip(order, timeline.starts[rank], timeline.ends[rank], strict=True):
            width = max(0.4, scale * (end - start) - 0.3)
            shapes.append(
                _box(10 + scale * start, row * rank + 2, width, row - 2, COLOURS[action.kind], str(action))
            )
    return _svg(720, row * ranks + 4, shapes)


def _box(x: float, y: float, width: float, height: float, colour: str, tip: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{height}" fill="{colour}">'
        f"<title>{escape(tip)}</title></rect>"
    )


def _svg(width: int, height: int, shapes: Sequence[str]) -> str:
    frame = f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img">'
    return f"{frame}{''.join(shapes)}</svg>"


def _key(entries: Iterator[tuple[str, str]] | Sequence[tuple[str, str]]) -> str:
    spans = (f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in entries)
    return f'<p class="key">{"".join(spans)}</p>'


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
