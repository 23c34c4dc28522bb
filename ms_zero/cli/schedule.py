"""``ms-zero schedule``: a pipeline schedule as a timeline, with its bubble and what it holds."""

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

from ms_zero.errors import UserError
from ms_zero.pipeline.schedule import (
    Schedule,
    Timeline,
    bubble_time,
    build,
    check,
    read_csv,
    simulate,
    write_csv,
)
from ms_zero.plan.draw import text_memory, text_timeline, write_figure, write_trace

# A drawing with more actions than this helps nobody.
_MOST_ACTIONS = 200_000


def schedule(
    *,
    name: str,
    pp: int,
    microbatches: int,
    virtual: int,
    csv: str | None,
    times: tuple[str, str, str],
    transfer: str,
    width: int,
    write: str | None,
    trace: str | None,
    figure: str | None,
) -> int:
    """Print a schedule, published or from a file, and write it in other forms; returns the exit status."""
    made = read_csv(Path(csv)) if csv else _build(name, pp, microbatches, virtual)
    forward, backward, weight = (_time(text) for text in times)
    if not forward + backward + weight:
        raise UserError(f"--times {' '.join(times)}: expected at least one above 0")
    wait = _time(transfer)
    split = made.splits_backward()
    shares = Fraction(made.num_ranks, made.num_stages)
    durations = {"F": forward, "B": backward if split else backward + weight, "W": weight}
    timeline = simulate(made, lambda action: durations[action.kind] * shares, lambda message: wait)
    formula = None
    if not csv and not wait and weight <= min(forward, backward):
        phases = {"forward": forward, "backward": backward, "weight": weight}
        formula = bubble_time(name, pp, microbatches, virtual, **phases)
    print("\n".join(_lines(made, timeline, formula, width)))
    if write:
        _write_csv(made, Path(write))
    if trace:
        write_trace(timeline, Path(trace))
    if figure:
        write_figure(timeline, Path(figure))
    return 0


def _build(name: str, pp: int, microbatches: int, virtual: int) -> Schedule:
    actions = 3 * pp * microbatches * virtual
    if actions > _MOST_ACTIONS:
        raise UserError(f"{actions} actions are too many to draw; use fewer stages or microbatches")
    made = build(name, pp, microbatches, virtual)
    check(made)
    return made


def _lines(made: Schedule, timeline: Timeline, formula: Fraction | None, width: int) -> Iterator[str]:
    yield (
        f"{made.name}: {made.num_ranks} ranks, {made.num_stages} stages, {made.num_microbatches} "
        "microbatches; no deadlock, every microbatch forward and backward once"
    )
    yield ""
    yield from text_timeline(timeline, width)
    yield ""
    ideal = max(map(timeline.busy, range(made.num_ranks)))
    idle = timeline.makespan - ideal
    yield f"time {_number(timeline.makespan)}, of which {_number(ideal)} computing and {_number(idle)} bubble"
    yield (
        f"bubble {100 * float(idle / ideal):.2f}% of the computing time, "
        f"{100 * float(idle / timeline.makespan):.2f}% of all time"
        + (f"; the formula says {_number(formula)}" if formula is not None else "")
    )
    yield from text_memory(timeline, width)


def _time(text: str) -> Fraction:
    try:
        value = Fraction(text)
    except (ValueError, ZeroDivisionError):
        raise UserError(f"{text!r} is not a time; expected a number such as 1, 0.5 or 2/3") from None
    if not 0 <= value <= 10**6:
        raise UserError(f"{text!r}: a time is at least 0 and at most 1000000")
    return value


def _number(value: Fraction) -> str:
    return str(value) if value.denominator == 1 else f"{float(value):.3f}"


def _write_csv(made: Schedule, path: Path) -> None:
    try:
        write_csv(made, path)
    except OSError as error:
        raise UserError(f"{path}: cannot write the schedule: {error.strerror}") from None
