"""Pipeline schedules as data: for each rank, the ordered list of what it computes.

An action is `F` (forward), `B` (backward) or `W` (gradients of the weights) of one stage for one microbatch.
`B` computes the gradients of inputs and weights together, unless the list also has the `W` of the same
stage and microbatch: then `B` computes those of the inputs alone. Messages are not written down, they follow
from the actions: see `steps`. Who can execute steps in order can execute every list that `check` accepts.

Stages are virtual: rank r of p holds stages r, r + p, r + 2p, ... when interleaved, otherwise stage r alone.
A list read from a file may place them in any other way, as long as a stage stays on one rank.
"""

import csv
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from ms_zero.errors import UserError

Kind = Literal["F", "B", "W"]

NAMES: Final = ("gpipe", "1f1b", "interleaved", "zb-h1")
"""Schedules that `build` knows."""


class Action(NamedTuple):
    """One computation: a kind, a virtual stage and a microbatch, all counted from 0."""

    kind: str
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


class Message(NamedTuple):
    """A tensor between ranks: activations for the `F`, or gradients for the `B`, of `stage` on `target`."""

    source: int
    target: int
    kind: str
    stage: int
    microbatch: int


class Step(NamedTuple):
    """An action, what must have been received before it, and what is sent after it.

    `receives` may also hold messages for later actions: those that their sender puts into the same channel
    before the one needed now.
    """

    receives: tuple[Message, ...]
    action: Action
    sends: tuple[Message, ...]


@dataclass(frozen=True)
class Schedule:
    """What every rank of a pipeline does.

    Attributes:
        name: Its name in messages and files.
        num_microbatches: Microbatches of an optimizer step.
        placement: Rank of each virtual stage.
        orders: The actions of each rank, in their order.

    """

    name: str
    num_microbatches: int
    placement: tuple[int, ...]
    orders: tuple[tuple[Action, ...], ...]

    @property
    def num_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """Virtual stages, over all ranks."""
        return len(self.placement)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Virtual stages of a rank, in model order."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == rank)

    def splits_backward(self) -> bool:
        """Say whether any gradient of weights is computed apart from that of the inputs."""
        return any(action.kind == "W" for order in self.orders for action in order)


# Published schedules


def build(name: str, num_ranks: int, num_microbatches: int, num_virtual: int = 1) -> Schedule:
    """Make a published schedule by name.

    Args:
        name: One of NAMES.
        num_ranks: Ranks of the pipeline (p).
        num_microbatches: Microbatches of an optimizer step (m); for `interleaved` a multiple of p.
        num_virtual: Virtual stages of each rank (v); more than 1 for `interleaved`, 1 for the others.

    Raises:
        UserError: For an unknown name, or numbers that the schedule is not defined for.

    """
    refusal = refuse(name, num_ranks, num_microbatches, num_virtual)
    if refusal:
        raise UserError(refusal)
    orders: list[Iterable[Action]] = []
    for rank in range(num_ranks):
        if name == "interleaved":
            orders.append(_interleaved(rank, num_ranks, num_microbatches, num_virtual))
            continue
        warmup = warmup_forwards(name, rank, num_ranks, num_microbatches)
        order = _one_forward_one_backward(rank, num_microbatches, warmup)
        # Later ranks wait longer for their first forward; they put off as many weight gradients to the end.
        orders.append(split_backward(order, delay=rank) if name == "zb-h1" else order)
    placement = tuple(stage % num_ranks for stage in range(num_ranks * num_virtual))
    return Schedule(name, num_microbatches, placement, tuple(map(tuple, orders)))


def refuse(name: str, num_ranks: int, num_microbatches: int, num_virtual: int = 1) -> str:
    """Say in one line why `build` would refuse these numbers; "" if it would not."""
    if name not in NAMES:
        return f"schedule {name!r} is not known; expected one of {', '.join(NAMES)}"
    numbers = {"stages": num_ranks, "microbatches": num_microbatches, "virtual stages": num_virtual}
    for what, number in numbers.items():
        if number < 1:
            return f"schedule {name}: {number} {what}; at least 1 is needed"
    if name != "interleaved":
        return (
            f"schedule {name} has 1 virtual stage a rank, not {num_virtual}; use interleaved for more"
            if num_virtual > 1
            else ""
        )
    if num_virtual < 2:
        return "schedule interleaved needs at least 2 virtual stages a rank; use 1f1b for 1"
    if num_microbatches % num_ranks:
        above = -(-num_microbatches // num_ranks) * num_ranks
        return (
            f"schedule interleaved works through microbatches in groups of the {num_ranks} ranks, and "
            f"{num_microbatches} microbatches are not a multiple of {num_ranks}; use {above}, or 1f1b"
        )
    return ""


def refuse_use(schedule: Schedule, num_ranks: int, num_microbatches: int) -> str:
    """Say in one line why a schedule is not for so many ranks and microbatches; "" if it is."""
    asked = {"stages": (schedule.num_ranks, num_ranks)}
    asked["microbatches"] = (schedule.num_microbatches, num_microbatches)
    for what, (has, wanted) in asked.items():
        if has != wanted:
            return f"schedule {schedule.name} is for {has} {what}, the run has {wanted}; make them equal"
    return ""


def warmup_forwards(
    name: str, rank: int, num_ranks: int, num_microbatches: int, num_virtual: int = 1
) -> int:
    """Count the forwards before the steady state, in which each forward is followed by a backward.

    gpipe m; 1f1b and zb-h1 min(p - r - 1, m); interleaved min(2(p - r - 1) + (v - 1)p, vm)
    (Narayanan et al., SC21, section 2.2).
    """
    if name == "gpipe":
        return num_microbatches
    if name == "interleaved":
        ahead = 2 * (num_ranks - rank - 1) + (num_virtual - 1) * num_ranks
        return min(ahead, num_virtual * num_microbatches)
    return min(num_ranks - rank - 1, num_microbatches)


def in_flight_bound(
    name: str, rank: int, num_ranks: int, num_microbatches: int, num_virtual: int = 1
) -> int:
    """Bound the microbatches that a rank has forwarded and not yet taken back, counted per virtual stage.

    gpipe m; 1f1b and zb-h1 min(p - r, m); interleaved min(2(p - r - 1) + (v - 1)p + 1, vm), each of these a
    v-th of the rank's layers. What zb-h1 keeps until the weight gradient adds up to min(p, m) on every rank.
    """
    most = num_virtual * num_microbatches
    return min(warmup_forwards(name, rank, num_ranks, num_microbatches, num_virtual) + 1, most)


def bubble_time(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    num_virtual: int = 1,
    *,
    forward: Any = Fraction(1),
    backward: Any = Fraction(1),
    weight: Any = Fraction(1),
) -> Any:
    """Idle time of a rank in an optimizer step: uniform stages, no communication time.

    gpipe, 1f1b: (p - 1)(F + B + W); interleaved: a v-th of that. zb-h1: (p - 1)(F + B - W), as long as no
    rank runs out of weight gradients to fill its waits with (m >= p and F >= W, B >= W; Qi et al., 2023);
    with fewer microbatches (p - 1)(F + B) - (m - 1) W.

    Args:
        name: One of NAMES.
        num_ranks: Ranks of the pipeline (p).
        num_microbatches: Microbatches of an optimizer step (m).
        num_virtual: Virtual stages of each rank (v).
        forward: Time of a forward of all layers of a rank (F).
        backward: Time of the gradients of the inputs (B).
        weight: Time of the gradients of the weights (W).

    """
    if name == "zb-h1":
        filled = min(num_ranks, num_microbatches) - 1
        return (num_ranks - 1) * (forward + backward) - filled * weight
    return (num_ranks - 1) * (forward + backward + weight) / num_virtual


def _one_forward_one_backward(stage: int, num_microbatches: int, warmup: int) -> Iterator[Action]:
    for microbatch in range(warmup):
        yield Action("F", stage, microbatch)
    for microbatch in range(num_microbatches):
        if warmup + microbatch < num_microbatches:
            yield Action("F", stage, warmup + microbatch)
        yield Action("B", stage, microbatch)


def _interleaved(rank: int, num_ranks: int, num_microbatches: int, num_virtual: int) -> Iterator[Action]:
    total = num_virtual * num_microbatches
    warmup = warmup_forwards("interleaved", rank, num_ranks, num_microbatches, num_virtual)

    def nth(kind: str, n: int) -> Action:
        group, within = divmod(n, num_ranks * num_virtual)
        chunk, microbatch = divmod(within, num_ranks)
        if kind == "B":
            chunk = num_virtual - 1 - chunk
        return Action(kind, chunk * num_ranks + rank, group * num_ranks + microbatch)

    yield from (nth("F", n) for n in range(warmup))
    for n in range(total):
        if warmup + n < total:
            yield nth("F", warmup + n)
        yield nth("B", n)


def split_backward(order: Iterable[Action], delay: int) -> Iterator[Action]:
    """Split the backwards of a rank: each `W` comes `delay` backwards after its `B`, the rest at the end."""
    waiting: deque[Action] = deque()
    for action in order:
        yield action
        if action.kind == "B":
            waiting.append(Action("W", action.stage, action.microbatch))
            if len(waiting) > delay:
                yield waiting.popleft()
    yield from waiting


# What follows from the actions


def dependencies(action: Action, num_stages: int) -> tuple[Action, ...]:
    """List the actions that must be complete before this one."""
    kind, stage, microbatch = action
    if kind == "F":
        return (Action("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (Action("B", stage, microbatch),)
    own = Action("F", stage, microbatch)
    return (own,) if stage == num_stages - 1 else (own, Action("B", stage + 1, microbatch))


def steps(schedule: Schedule) -> tuple[tuple[Step, ...], ...]:
    """Derive what each rank receives, computes and sends, in order.

    Between two ranks there is one channel in each direction, first in, first out and without tags. A rank
    receives in the order in which the other one sends, ahead of need where the two differ. Sends do not wait
    for their receiver.
    """
    channels: dict[tuple[int, int], deque[Message]] = {}
    for action in chain.from_iterable(schedule.orders):
        message = outgoing(schedule, action)
        if message:
            channels.setdefault((message.source, message.target), deque()).append(message)
    return tuple(tuple(_steps_of(schedule, order, channels)) for order in schedule.orders)


def incoming(schedule: Schedule, action: Action) -> Message | None:
    """Return the message that an action needs; None if it needs none, or both stages are on its rank."""
    producer = action.stage + {"F": -1, "B": 1}.get(action.kind, 0)
    if producer == action.stage or not 0 <= producer < schedule.num_stages:
        return None
    source, target = schedule.placement[producer], schedule.placement[action.stage]
    return None if source == target else Message(source, target, *action)


def outgoing(schedule: Schedule, action: Action) -> Message | None:
    """Return the message that an action makes; None if nobody needs one, or only its own rank."""
    consumer = action.stage + {"F": 1, "B": -1}.get(action.kind, 0)
    if consumer == action.stage or not 0 <= consumer < schedule.num_stages:
        return None
    return incoming(schedule, Action(action.kind, consumer, action.microbatch))


def _steps_of(
    schedule: Schedule, order: Sequence[Action], channels: dict[tuple[int, int], deque[Message]]
) -> Iterator[Step]:
    received: set[Message] = set()
    for action in order:
        needed, made = incoming(schedule, action), outgoing(schedule, action)
        receives = []
        while needed and needed not in received:
            receives.append(channels[needed.source, needed.target].popleft())
            received.add(receives[-1])
        yield Step(tuple(receives), action, (made,) if made else ())


def peak_in_flight(schedule: Schedule, until: Kind = "B") -> tuple[int, ...]:
    """Count, for each rank, the most microbatches (per virtual stage) between their forward and an end.

    Args:
        schedule: A valid schedule.
        until: "B": the gradients of the inputs; "W": the gradients of the weights, where they are apart.

    """
    return tuple(max(held_after(order, until), default=0) for order in schedule.orders)


def held_after(order: Sequence[Action], until: Kind = "B") -> list[int]:
    """Count the microbatches (per virtual stage) that one rank holds after each of its actions."""
    apart = {action[1:] for action in order if action.kind == "W"} if until == "W" else set()
    held, counts = 0, []
    for action in order:
        if action.kind == "F":
            held += 1
        elif action.kind == "W":
            held -= action[1:] in apart
        else:
            held -= action[1:] not in apart
        counts.append(held)
    return counts


def held_by_stage(schedule: Schedule, rank: int, until: Kind = "B") -> tuple[int, ...]:
    """Count the microbatches of each virtual stage of a rank when the rank first holds most of them."""
    order = schedule.orders[rank]
    counts = held_after(order, until)
    fullest = counts.index(max(counts))
    found = []
    for stage in schedule.stages_of(rank):
        places = [place for place, action in enumerate(order) if action.stage == stage]
        held = held_after([order[place] for place in places], until)
        before = bisect_right(places, fullest)
        found.append(held[before - 1] if before else 0)
    return tuple(found)


# Validation


def check(schedule: Schedule, max_in_flight: Sequence[int] | None = None) -> None:
    """Prove that a schedule computes every gradient once, keeps its memory bound and cannot deadlock.

    Args:
        schedule: Any schedule, also one that was read from a file.
        max_in_flight: For each rank, the most microbatches (per virtual stage) it may hold; None: any number.

    Raises:
        UserError: Naming the rank and the first action that is wrong.

    """
    where = f"schedule {schedule.name}"
    _check_complete(where, schedule)
    for rank, order in enumerate(schedule.orders):
        _check_order(f"{where}, rank {rank}", order)
    _check_progress(where, schedule)
    _check_channels(where, schedule)
    if max_in_flight is not None:
        _check_in_flight(where, schedule, max_in_flight)


def _check_complete(where: str, schedule: Schedule) -> None:
    seen: set[Action] = set()
    for rank, order in enumerate(schedule.orders):
        if not order:
            raise UserError(f"{where}: rank {rank} has no actions; every rank needs at least one stage")
        for action in order:
            _check_action(f"{where}, rank {rank}: {action}", schedule, rank, action)
            if action in seen:
                raise UserError(f"{where}, rank {rank}: {action} appears twice; an action is done once")
            seen.add(action)
    for stage, rank in enumerate(schedule.placement):
        for microbatch in range(schedule.num_microbatches):
            for kind in "FB":
                if Action(kind, stage, microbatch) not in seen:
                    raise UserError(f"{where}, rank {rank}: {stage}{kind}{microbatch} is missing")


def _check_action(what: str, schedule: Schedule, rank: int, action: Action) -> None:
    if action.kind not in ("F", "B", "W"):
        raise UserError(f"{what} is of an unknown kind; expected F, B or W")
    if not 0 <= action.stage < schedule.num_stages:
        raise UserError(f"{what} names a stage beyond the last one, {schedule.num_stages - 1}")
    if not 0 <= action.microbatch < schedule.num_microbatches:
        raise UserError(f"{what} names a microbatch beyond the last one, {schedule.num_microbatches - 1}")
    owner = schedule.placement[action.stage]
    if owner != rank:
        raise UserError(f"{what} belongs to rank {owner}, which holds stage {action.stage}")


def _check_order(where: str, order: Sequence[Action]) -> None:
    done: set[Action] = set()
    for action in order:
        before = {"B": "F", "W": "B"}.get(action.kind)
        if before and Action(before, action.stage, action.microbatch) not in done:
            raise UserError(f"{where}: {action} comes before {action.stage}{before}{action.microbatch}")
        done.add(action)


def _check_progress(where: str, schedule: Schedule) -> None:
    """Run the lists: with sends that do not wait, a schedule that completes once completes always.

    Which rank goes first does not matter: an action that can run stays runnable until it has run.
    """
    position = _run(schedule, lambda action, ready: 0)
    stuck = [rank for rank, order in enumerate(schedule.orders) if position[rank] < len(order)]
    if stuck:
        heads = ", ".join(f"rank {rank} at {schedule.orders[rank][position[rank]]}" for rank in stuck[:4])
        more = f" and {len(stuck) - 4} more" if len(stuck) > 4 else ""
        raise UserError(f"{where} deadlocks: {heads}{more} wait for each other; reorder their actions")


def _check_channels(where: str, schedule: Schedule) -> None:
    sent: dict[tuple[int, int], list[Message]] = {}
    received: dict[tuple[int, int], list[Message]] = {}
    for step in chain.from_iterable(steps(schedule)):
        for table, messages in ((sent, step.sends), (received, step.receives)):
            for message in messages:
                table.setdefault((message.source, message.target), []).append(message)
    for (source, target), messages in sent.items():
        if received.get((source, target), []) != messages:
            raise UserError(f"{where}: rank {target} does not receive what rank {source} sends, in its order")


def _check_in_flight(where: str, schedule: Schedule, limits: Sequence[int]) -> None:
    if len(limits) != schedule.num_ranks:
        raise UserError(f"{where}: {len(limits)} memory bounds, {schedule.num_ranks} ranks; give one a rank")
    for rank, (peak, limit) in enumerate(zip(peak_in_flight(schedule, "W"), limits, strict=True)):
        if peak > limit:
            raise UserError(f"{where}: rank {rank} holds {peak} microbatches at once, more than its {limit}")


# Simulation


@dataclass(frozen=True)
class Timeline:
    """When every action of a schedule runs, in the unit of the durations it was simulated with.

    Attributes:
        schedule: What was simulated.
        starts: Start of each action, in the order of `schedule.orders`.
        ends: End of each action.

    """

    schedule: Schedule
    starts: tuple[tuple[Any, ...], ...]
    ends: tuple[tuple[Any, ...], ...]

    @property
    def makespan(self) -> Any:
        """End of the last action; the first one starts at 0."""
        return max(ends[-1] for ends in self.ends)

    def busy(self, rank: int) -> Any:
        """Time that a rank computes."""
        return sum(end - start for start, end in zip(self.starts[rank], self.ends[rank], strict=True))

    def bubble(self, rank: int) -> Any:
        """Time that a rank is idle until the last one is done."""
        return self.makespan - self.busy(rank)

    def bubble_over_ideal(self) -> Any:
        """Idle time over computing time, of the rank that computes most."""
        busiest = max(map(self.busy, range(self.schedule.num_ranks)))
        return (self.makespan - busiest) / busiest


def simulate(
    schedule: Schedule,
    duration: Callable[[Action], Any],
    transfer: Callable[[Message], Any] | None = None,
) -> Timeline:
    """Run a schedule event by event.

    A rank starts its next action when it is free and all messages for it have arrived. A message arrives its
    transfer time after the action that made it; sending costs the sender nothing and channels have no limit.

    Args:
        schedule: A schedule without deadlock.
        duration: Time of an action, in any unit and number type (Fractions stay exact).
        transfer: Time of a message; None: messages take no time.

    """
    starts: list[list[Any]] = [[] for _ in schedule.orders]
    ends: list[list[Any]] = [[] for _ in schedule.orders]

    def run(action: Action, ready: Any) -> Any:
        rank = schedule.placement[action.stage]
        start = max(ready, ends[rank][-1]) if ends[rank] else ready
        end = start + duration(action)
        starts[rank].append(start)
        ends[rank].append(end)
        return end

    _run(schedule, run, transfer)
    return Timeline(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)))


def _run(
    schedule: Schedule,
    run: Callable[[Action, Any], Any],
    transfer: Callable[[Message], Any] | None = None,
) -> list[int]:
    """Call `run(action, time at which all it needs is there)` for all that can run; count it by rank."""
    position = [0] * schedule.num_ranks
    done: dict[Action, Any] = {}
    waiting: dict[Action, list[int]] = {}
    runnable = deque(range(schedule.num_ranks))
    while runnable:
        rank = runnable.popleft()
        order = schedule.orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            needed = dependencies(action, schedule.num_stages)
            missing = next((other for other in needed if other not in done), None)
            if missing is not None:
                waiting.setdefault(missing, []).append(rank)
                break
            done[action] = run(action, _ready(schedule, action, needed, done, transfer))
            position[rank] += 1
            runnable.extend(waiting.pop(action, ()))
    return position


def _ready(
    schedule: Schedule,
    action: Action,
    needed: tuple[Action, ...],
    done: dict[Action, Any],
    transfer: Callable[[Message], Any] | None,
) -> Any:
    message = incoming(schedule, action) if transfer is not None else None
    latest: Any = 0
    for other in needed:
        arrival = done[other]
        if message is not None and other.stage != action.stage:
            arrival += transfer(message)
        latest = max(latest, arrival)
    return latest


# Files


def is_file(name: str) -> bool:
    """Whether the name of a schedule is the path of a file."""
    return name.endswith(".csv")


def write_csv(schedule: Schedule, path: Path) -> None:
    """Write one row a rank, one cell an action: `0F0,0F1,0B0`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([map(str, order) for order in schedule.orders])


def read_csv(path: Path) -> Schedule:
    """Read what `write_csv` writes, from any tool; empty cells are waits and are passed over.

    Raises:
        UserError: If the file cannot be read, or what it says is not a valid schedule; see `check`.

    """
    try:
        if path.exists() and not path.is_file():  # a pipe would block
            raise UserError(f"{path}: is not a regular file; expected a schedule in CSV")
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: cannot be read as a schedule: {error}") from error
    orders = tuple(tuple(_parse_row(path, number, row)) for number, row in enumerate(rows) if row)
    if not orders or not all(orders):
        raise UserError(f"{path}: no actions found; expected one row a rank with cells such as 0F0")
    owners = {action.stage: rank for rank, order in enumerate(orders) for action in order}
    absent = next((stage for stage in range(len(owners)) if stage not in owners), None)
    if absent is not None:
        raise UserError(f"{path}: stage {absent} has no actions, but stage {max(owners)} has")
    num_microbatches = 1 + max(action.microbatch for order in orders for action in order)
    placement = tuple(owners[stage] for stage in range(len(owners)))
    schedule = Schedule(path.name, num_microbatches, placement, orders)
    check(schedule)
    return schedule


def _parse_row(path: Path, row: int, cells: Sequence[str]) -> Iterator[Action]:
    for column, cell in enumerate(cells):
        text = cell.strip()
        if not text:
            continue
        kind = next((letter for letter in text if letter in "FBW"), "")
        stage, _, microbatch = text.partition(kind) if kind else ("", "", "")
        if not (_is_number(stage) and _is_number(microbatch)):
            raise UserError(
                f"{path}, row {row + 1}, column {column + 1}: {text!r} is not an action; expected stage, "
                "kind and microbatch such as 0F3, with F, B or W"
            )
        yield Action(kind, int(stage), int(microbatch))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 8
