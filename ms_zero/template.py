"""Our end of a template process: a module that is started once and forks a process for every job.

What takes long to import is imported once that way. A job goes in as a line of JSON, a report comes back as
one. The template is a process group of its own, and ends when this process does.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class NoReport(RuntimeError):
    """The template ended, or took too long."""


def ask(
    module: str, environment: Mapping[str, str], job: Mapping[str, Any], limit_s: float
) -> dict[str, Any]:
    """Give one job to the template of a module and wait for its report.

    Args:
        module: run as ``python -m module``, by the first job and again after one that failed.
        environment: added to that of this process.
        job: as JSON can hold it.
        limit_s: seconds to wait.

    Raises:
        NoReport: none came; the template is stopped.
    """
    template = _template(os.getpid(), module, tuple(environment.items()))
    try:
        return template.run(job, limit_s)
    except BaseException:
        template.close()
        raise


class _Template:
    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._module, self._environment = module, environment
        self._process: subprocess.Popen[str] | None = None

    def run(self, job: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send one job and wait for its report."""
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        process = self._process
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise NoReport("the template process ended: can it import mindspore?") from None
        line = _read_line(process.stdout.fileno(), time.monotonic() + limit_s)
        if not line:
            raise NoReport(f"the template process gave no report within {limit_s:.0f} s: it died or hung")
        return json.loads(line)

    def close(self) -> None:
        """End the process, and what it forked with it."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._process = None

    def _start(self) -> subprocess.Popen[str]:
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        return subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **self._environment, "PYTHONPATH": path},
            text=True,
            start_new_session=True,
        )


@functools.cache
def _template(pid: int, module: str, environment: tuple[tuple[str, str], ...]) -> _Template:
    """One template per process (`pid`: a forked copy of the caller must not use its parent's)."""
    template = _Template(module, dict(environment))
    atexit.register(template.close)
    return template


def _read_line(fd: int, deadline: float) -> str:
    """A line; "" when it does not come."""
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
