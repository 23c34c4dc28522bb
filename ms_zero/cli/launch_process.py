"""Processes of this machine as ``/proc`` shows them: identity, exit status, search by environment.

A process is identified by its pid and its start time, so that a reused pid is never mistaken for the process
that had it before.
"""

import ctypes
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class ProcessStat:
    """One line of ``/proc/PID/stat``; ``wait_status`` is meaningful only for a zombie."""

    pid: int
    state: str
    parent: int
    start_ticks: int
    wait_status: int

    @property
    def alive(self) -> bool:
        """Whether the process still runs: a zombie does not."""
        return self.state not in "ZXx"


def read_stat(pid: int) -> ProcessStat | None:
    """Read the state of process ``pid``; None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command name stands in parentheses and may hold spaces and parentheses itself.
    fields = text[text.rindex(")") + 2 :].split()
    return ProcessStat(pid, fields[0], int(fields[1]), int(fields[19]), int(fields[49]))


def all_pids() -> list[int]:
    """Every process id that is visible now, ascending."""
    return sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def children_of(parent: int) -> list[ProcessStat]:
    """The direct children of process ``parent``, zombies included, in the order of their start."""
    stats = [stat for pid in all_pids() if (stat := read_stat(pid)) and stat.parent == parent]
    return sorted(stats, key=lambda stat: (stat.start_ticks, stat.pid))


def read_environment(pid: int) -> dict[str, str]:
    """The environment that process ``pid`` was started with; empty when it cannot be read (a zombie)."""
    try:
        raw = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return {}
    entries = (item.decode("utf-8", "replace").partition("=") for item in raw.split(b"\0") if item)
    return {key: value for key, _, value in entries}


def tagged(name: str, value: str) -> list[int]:
    """Live processes whose environment at their start held ``name=value``: a job with all descendants."""
    needle = f"{name}={value}".encode()
    found = []
    for pid in all_pids():
        stat = read_stat(pid)
        if stat is None or not stat.alive or pid == os.getpid():
            continue
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if needle in entries:
            found.append(pid)
    return found


def kill_tagged(name: str, value: str, timeout_s: float) -> tuple[set[int], list[int]]:
    """SIGKILL every process tagged ``name=value`` until none is left.

    Returns all pids that were killed, and those that were still alive after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    killed: set[int] = set()
    while pids := tagged(name, value):
        if time.monotonic() > deadline:
            return killed, pids
        for pid in pids:
            send_signal(pid, signal.SIGKILL)
        killed.update(pids)
        time.sleep(0.02)
    return killed, []


def send_signal(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def reap_children(pids: Iterable[int]) -> None:
    """Collect those of ``pids`` that are dead children of this process, so that no zombie stays."""
    for pid in pids:
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue


def adopt_orphans() -> None:
    """Make this process the parent of its descendants whose own parent dies, so that it can reap them."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def signal_at_parent_death(number: int) -> None:
    """Let the kernel send ``number`` to the calling process when the process that started it dies."""
    _prctl(_PR_SET_PDEATHSIG, int(number))


def _prctl(option: int, argument: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(argument), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {argument}) failed")


def describe_wait_status(status: int) -> str:
    """Put a wait status in words, for example ``killed by SIGKILL`` or ``exited with status 3``."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number == signal.SIGKILL:
            return "killed by SIGKILL (by hand, or by the kernel when memory ran out)"
        try:
            return f"killed by {signal.Signals(number).name}"
        except ValueError:
            return f"killed by signal {number}"
    return f"exited with status {os.WEXITSTATUS(status)}"
