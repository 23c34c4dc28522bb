"""Watches the processes of one launch on this machine and tells which of them failed first.

Two sources: what workers report (``launch_state``), and ``/proc``. A worker that is gone without a report was
killed; while it is still a zombie its exit status can be read. Failures that one look finds together are
ordered by time. Of a vanished process only the last look that saw it alive is known, and that time is used: a
death can be the cause of a peer's report within the same tenth of a second, but hardly its consequence.
"""

import os
import re
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ms_zero.cli import launch_state
from ms_zero.cli.launch_console import tail
from ms_zero.cli.launch_process import (
    ProcessStat,
    children_of,
    describe_wait_status,
    read_environment,
    read_stat,
)

_ZOMBIE_PATIENCE_S = 0.25
_SILENT_WORKER = re.compile(r"worker (\d+) is the first one timed out")  # as MindSpore's scheduler says it


@dataclass(frozen=True)
class Failure:
    """The first thing that went wrong: ``who`` did ``what``; ``log`` holds the details.

    ``time`` is monotonic. ``user_error``: the message says all, no log is needed. ``terminated``: the process
    may have died of a SIGTERM, which is no failure when the user asked for a stop. ``elsewhere``: the cause
    is on another node.
    """

    who: str
    what: str
    log: Path
    time: float
    user_error: bool = False
    terminated: bool = False
    elsewhere: bool = False


@dataclass
class _Worker:
    rank: int
    log: Path
    pid: int | None = None
    start_ticks: int = 0
    phase: str = "absent"
    seen_alive: float = 0.0
    done: bool = False

    @property
    def who(self) -> str:
        return f"worker {self.rank}" + (f" (pid {self.pid})" if self.pid else "")


class Watch:
    """Follows the workers ``ranks``, and the scheduler if it is here, that ``spawner_pid`` (msrun) starts."""

    def __init__(
        self, *, ranks: Sequence[int], has_scheduler: bool, spawner_pid: int, state_dir: Path, log_dir: Path
    ) -> None:
        self._has_scheduler = has_scheduler
        self._spawner_pid = spawner_pid
        self._state_dir = state_dir
        self._log_dir = log_dir
        self._workers = {rank: _Worker(rank, log_dir / f"worker_{rank}.log") for rank in ranks}
        self._scheduler: ProcessStat | None = None
        self._identified: set[int] = set()
        self._zombies: dict[int, float] = {}

    @property
    def finished(self) -> bool:
        """Whether every worker has ended well."""
        return all(worker.done for worker in self._workers.values())

    @property
    def connected(self) -> int:
        """How many workers have joined the cluster (or have ended)."""
        return sum(worker.done or worker.phase == "connected" for worker in self._workers.values())

    @property
    def started(self) -> int:
        """How many workers have registered."""
        return sum(worker.done or worker.phase != "absent" for worker in self._workers.values())

    def worker_pids(self) -> list[int]:
        """The worker processes that run now."""
        return [w.pid for w in self._workers.values() if w.pid is not None and not w.done and self._stat(w)]

    def known_pids(self) -> set[int]:
        """Every process of the job that was seen, dead or alive."""
        return self._identified | {worker.pid for worker in self._workers.values() if worker.pid is not None}

    def unconnected(self) -> list[int]:
        """Ranks that have not joined the cluster."""
        return [w.rank for w in self._workers.values() if not w.done and w.phase != "connected"]

    def look(self) -> Failure | None:
        """Look at every process once; returns the earliest failure, if there is one."""
        now = time.monotonic()
        failures: list[Failure | None] = []
        if not self._all_found:
            failures += self._find_children(now)
        failures += [self._look_at(worker, now) for worker in self._workers.values() if not worker.done]
        failures.append(self._look_at_scheduler(now))
        return min((f for f in failures if f is not None), key=lambda failure: failure.time, default=None)

    @property
    def _all_found(self) -> bool:
        workers_found = all(worker.pid is not None for worker in self._workers.values())
        return workers_found and (self._scheduler is not None or not self._has_scheduler)

    def _find_children(self, now: float) -> list[Failure]:
        """Find the processes that have not registered yet, by the environment that msrun gave them.

        A child that is dead before its environment was read can only be told from msrun's own short-lived
        helpers by staying a zombie: msrun collects those at once.
        """
        failures = []
        for child in children_of(self._spawner_pid):
            if child.pid in self._identified:
                continue
            place = launch_state.place_from_environment(read_environment(child.pid))
            if place.role == "scheduler":
                self._scheduler = child
                self._identified.add(child.pid)
            elif place.role == "worker" and place.rank in self._workers:
                self._adopt(self._workers[place.rank], child, now)
            elif not child.alive and child.wait_status != 0:
                first_seen = self._zombies.setdefault(child.pid, now)
                if now - first_seen > _ZOMBIE_PATIENCE_S:
                    failures.append(self._unknown_death(child, first_seen))
        return failures

    def _adopt(self, worker: _Worker, child: ProcessStat, now: float) -> None:
        self._identified.add(child.pid)
        if worker.pid is None:
            worker.pid, worker.start_ticks, worker.seen_alive = child.pid, child.start_ticks, now

    def _unknown_death(self, child: ProcessStat, at: float) -> Failure:
        missing = [worker for worker in self._workers.values() if worker.pid is None]
        log = missing[0].log if len(missing) == 1 else self._log_dir / "msrun.log"
        who = f"worker {missing[0].rank}" if len(missing) == 1 else "a process that msrun started"
        what = f"{describe_wait_status(child.wait_status)} before it could register"
        return Failure(f"{who} (pid {child.pid})", what, log, at)

    def _look_at_scheduler(self, now: float) -> Failure | None:
        if self._scheduler is None or self.finished:
            return None
        stat = read_stat(self._scheduler.pid)
        if stat is not None and stat.start_ticks == self._scheduler.start_ticks and stat.alive:
            return None
        if stat is None or stat.start_ticks != self._scheduler.start_ticks:
            what = "was killed or crashed: it vanished without a word"
        elif stat.wait_status == 0:
            return None
        elif (silent := self._silent_worker()) is not None:
            return self._silence(silent, now)
        else:
            what = describe_wait_status(stat.wait_status)
        who = f"the scheduler (pid {self._scheduler.pid})"
        return Failure(who, what, self._log_dir / "scheduler.log", now)

    def _silent_worker(self) -> int | None:
        """The rank that the scheduler gave up on before it ended."""
        found = (_SILENT_WORKER.search(line) for line in tail(self._log_dir / "scheduler.log", 100))
        return next((int(match[1]) for match in found if match), None)

    def _silence(self, rank: int, now: float) -> Failure:
        what = "gave the scheduler no sign of life for too long: it is stopped, swapped out or unreachable"
        worker = self._workers.get(rank)
        if worker is None:
            return Failure(f"worker {rank} on another node", what, self._log_dir / "scheduler.log", now)
        return Failure(worker.who, what, worker.log, now)

    def _look_at(self, worker: _Worker, now: float) -> Failure | None:
        registration = launch_state.read_registration(self._state_dir, worker.rank)
        if registration is not None:
            worker.pid, worker.start_ticks = registration.pid, registration.start_ticks
            worker.phase = registration.phase
        stat = self._stat(worker)
        outcome = launch_state.read_outcome(self._state_dir, worker.rank)  # after the look at the process
        if outcome is not None:
            worker.done = outcome.status == "ok"
            if worker.done:
                return None
            what = f"stopped with an error: {outcome.message}"
            if outcome.status == "user_error":
                what = outcome.message
            return Failure(worker.who, what, worker.log, outcome.time, outcome.status == "user_error")
        if stat is not None and stat.alive:
            worker.seen_alive = now
            return None
        if worker.pid is None:
            return None
        return self._death(worker, stat)

    def _death(self, worker: _Worker, stat: ProcessStat | None) -> Failure | None:
        """Judge a worker that is gone and has not said why."""
        terminated = stat is None or stat.wait_status == signal.SIGTERM
        if stat is None:
            what = "was killed or crashed: it vanished without a word"
        elif stat.wait_status == 0 and worker.phase == "absent":
            worker.done = True  # a command that does not report; its exit status is all there is
            return None
        else:
            what = describe_wait_status(stat.wait_status)
            if worker.phase == "absent":
                what += " before it could register"
            elif os.WIFEXITED(stat.wait_status):
                what += " without a report"
        return Failure(worker.who, what, worker.log, worker.seen_alive, terminated=terminated)

    def _stat(self, worker: _Worker) -> ProcessStat | None:
        if worker.pid is None:
            return None
        stat = read_stat(worker.pid)
        return stat if stat is not None and stat.start_ticks == worker.start_ticks else None
