"""Run a function on several communicating worker processes of this machine, without a scheduler.

Importing MindSpore takes seconds, so one template process imports it once per test session and forks the
workers of every job. The template never runs an operation itself, which keeps the fork safe. It dies with the
process that started it (its standard input closes), and workers die with the template.

This module itself does not import mindspore: only the template and the workers do.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ms_zero.template import NoReport, ask

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
    try:
        report = ask("ms_zero.testing._template", _WORKER_ENV, job, timeout_s + _REPORT_GRACE_S)
    except NoReport as error:
        raise WorkerError(str(error)) from None
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
