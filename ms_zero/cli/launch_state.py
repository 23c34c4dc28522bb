"""What a worker tells its launcher: small JSON files in a directory that only this launch uses.

A worker writes ``worker-RANK.json`` (who it is and how far it has come) as soon as it starts, and
``outcome-RANK.json`` when it ends by itself. A worker that vanishes without an outcome was killed.
Every file is replaced atomically. Times are ``time.monotonic()``: one clock for all processes of a machine.
"""

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ms_zero.cli.launch_process import read_stat

STATE_DIR_VARIABLE = "MS_ZERO_STATE_DIR"
LAUNCH_ID_VARIABLE = "MS_ZERO_LAUNCH_ID"

Phase = Literal["started", "connected"]
Status = Literal["ok", "error", "user_error"]


@dataclass(frozen=True)
class Place:
    """Where a process stands in a job: role, rank, number of workers and its launcher's directory."""

    role: Literal["single", "worker", "scheduler"]
    rank: int | None
    world_size: int
    state_dir: Path | None


@dataclass(frozen=True)
class Registration:
    """A worker that has started."""

    rank: int
    pid: int
    start_ticks: int
    phase: Phase


@dataclass(frozen=True)
class Outcome:
    """How a worker ended: ``message`` is one line per violation; ``time`` is monotonic, in seconds."""

    rank: int
    status: Status
    message: str
    time: float


def place_from_environment(environment: Mapping[str, str]) -> Place:
    """Tell from msrun's variables what this process is; without them it is a job of one process.

    msrun sets MS_ROLE and MS_WORKER_NUM for all, and MS_NODE_ID (the global rank) for workers whose rank is
    fixed in advance. RANK_ID is no help: the scheduler has it too, always 0.
    """
    role = environment.get("MS_ROLE")
    state_dir = environment.get(STATE_DIR_VARIABLE)
    directory = Path(state_dir) if state_dir else None
    if role not in ("MS_WORKER", "MS_SCHED"):
        return Place("single", 0, 1, None)
    world_size = int(environment["MS_WORKER_NUM"])
    if role == "MS_SCHED":
        return Place("scheduler", None, world_size, directory)
    node_id = environment.get("MS_NODE_ID")
    return Place("worker", int(node_id) if node_id is not None else None, world_size, directory)


class WorkerReport:
    """The worker's side: does nothing where no launcher listens (a single process, or plain msrun)."""

    def __init__(self, place: Place) -> None:
        self._rank = place.rank
        self._directory = place.state_dir if place.rank is not None else None

    def phase(self, phase: Phase) -> None:
        """Register this process, or say that it has come further."""
        stat = read_stat(os.getpid())
        if self._directory is None or self._rank is None or stat is None:
            return
        record = Registration(self._rank, os.getpid(), stat.start_ticks, phase)
        write_json(self._directory / f"worker-{self._rank}.json", asdict(record))

    def outcome(self, status: Status, message: str = "", at: float | None = None) -> None:
        """Record how this process ended; ``at`` is the monotonic time of the event, now by default."""
        if self._directory is None or self._rank is None:
            return
        record = Outcome(self._rank, status, message, time.monotonic() if at is None else at)
        write_json(self._directory / f"outcome-{self._rank}.json", asdict(record))


def read_registration(directory: Path, rank: int) -> Registration | None:
    """What worker ``rank`` has registered, None before it has."""
    record = read_json(directory / f"worker-{rank}.json")
    return Registration(**record) if record is not None else None


def read_outcome(directory: Path, rank: int) -> Outcome | None:
    """How worker ``rank`` ended, None while it has not said so."""
    record = read_json(directory / f"outcome-{rank}.json")
    return Outcome(**record) if record is not None else None


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write ``record`` so that a reader sees either the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(record), encoding="utf-8")
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """Read a file that ``write_json`` wrote; None when there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
