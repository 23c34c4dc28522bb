"""Run a function on several communicating worker processes of this machine, without a scheduler.

Importing MindSpore takes seconds, so one template process imports it once per test session and forks the
workers of every job. The template never runs an operation itself, which keeps the fork safe. It dies with the
process that started it (its standard input closes), and workers die with the template.

This module itself does not import mindspore: only the template and the workers do.
"""

from __future__ import annotations

import atexit
import functools
import inspect
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ms_zero

#: What the parent waits beyond the job's time limit for the template's report.
_REPORT_GRACE_S = 20.0

_WORKER_ENV = {
    "GLOG_v": "3",
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
    "MS_RETRY_INTERVAL_LOWER": "0",
    "MS_RETRY_INTERVAL_UPPER": "1",
}


class WorkerError(RuntimeError):
    """A worker failed. The message holds its rank, its traceback and the end of its output."""


def run_workers(
    world_size: int, fn: Callable[..., Any] | str, *args: Any, timeout_s: float = 60.0
) -> list[Any]:
    """Call ``fn(comm, *args)`` on `world_size` workers and return their results in rank order.

    `fn` is a module-level function, or "module:name". Arguments and results travel as JSON. `comm` is the
    worker's :class:`ms_zero.comm.Communicator` (CPU). The first failure, or `timeout_s`, kills all
    workers and raises WorkerError.
    """
    job = {
        "world_size": world_size,
        "function": _describe(fn),
        "args": args,
        "timeout_s": timeout_s,
        "cwd": str(Path.cwd()),
        "sys_path": sys.path,
    }
    template = _template(os.getpid())
    try:
        report = template.run(job, timeout_s + _REPORT_GRACE_S)
    except BaseException:
        template.close()
        raise
    if "failure" in report:
        raise WorkerError(report["failure"])
    return report["results"]


def _describe(fn: Callable[..., Any] | str) -> dict[str, str]:
    if isinstance(fn, str):
        module, name = fn.split(":")
        return {"module": module, "name": name}
    if fn.__qualname__ != fn.__name__:
        raise ValueError(f"{fn.__qualname__}: expected a module-level function, workers import it by name")
    if fn.__module__.startswith("ms_zero."):
        return {"module": fn.__module__, "name": fn.__name__}
    return {"file": str(Path(inspect.getfile(fn)).resolve()), "name": fn.__name__}


class _Template:
    """The parent's end of the template process; started on first use, restarted after :meth:`close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: dict[str, Any], limit_s: float) -> dict[str, Any]:
        """Send one job and wait for its report."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        process = self._process
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        line = _read_line(process.stdout.fileno(), time.monotonic() + limit_s)
        if not line:
            raise WorkerError("the worker template gave no report: it died or hung")
        return json.loads(line)

    def close(self) -> None:
        """End the template (its workers end with it)."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process = None

    @staticmethod
    def _start() -> subprocess.Popen[str]:
        root = str(Path(ms_zero.__file__).parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [sys.executable, "-m", "ms_zero.testing._template"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **_WORKER_ENV, "PYTHONPATH": path},
            text=True,
            start_new_session=True,
        )


@functools.cache
def _template(pid: int) -> _Template:
    """One template per process (`pid`: a forked copy of the caller must not use its parent's)."""
    template = _Template()
    atexit.register(template.close)
    return template


def _read_line(fd: int, deadline: float) -> str:
    data = b""
    while not data.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([fd], [], [], left)[0]:
            return ""
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return ""
        data += chunk
    return data.decode()
