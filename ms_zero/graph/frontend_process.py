"""The template process of :mod:`ms_zero.graph.frontend`: reads jobs, forks a process for each, reports.

Run as ``python -m ms_zero.graph.frontend_process``: a job per line on standard input, a report per line on
standard output. The template itself never runs an operation, which keeps the fork safe.
"""

import json
import os
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from ms_zero import _compat_frontend
from ms_zero.errors import UserError
from ms_zero.graph.places import load_function


def main() -> None:
    """Serve jobs until standard input ends."""
    owner = os.getppid()
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what builders print is no report
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(_serve(job, owner)), file=reports, flush=True)


def _serve(job: dict[str, Any], owner: int) -> dict[str, Any]:
    reason = _compat_frontend.unavailable_reason()
    report = Path(job["folder"], "report")
    messages = Path(job["folder"], "messages")
    messages.touch()
    if reason is not None:
        return {"kind": "unavailable", "failure": reason}
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            _redirect(messages)
            report.write_text(json.dumps(_work(job)))
            status = 0
        finally:
            sys.stderr.flush()
            os._exit(status)
    return _wait(pid, report, time.monotonic() + job["timeout_s"], owner)


def _wait(pid: int, report: Path, deadline: float, owner: int) -> dict[str, Any]:
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if os.getppid() != owner:  # it was ended; nobody reads the report
            os.kill(pid, 9)
            os._exit(1)
        if time.monotonic() > deadline:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            return {"kind": "error", "failure": "the front end took too long and was stopped"}
        time.sleep(0.01)
    if report.exists():
        return json.loads(report.read_text())
    return {"kind": "error", "failure": f"the process of the front end died with status {status}"}


def _redirect(messages: Path) -> None:
    """Send what this process and MindSpore's C++ code write to a file."""
    target = os.open(messages, os.O_WRONLY | os.O_APPEND)
    os.dup2(target, 1)
    os.dup2(target, 2)


def _work(job: dict[str, Any]) -> dict[str, Any]:
    start = time.monotonic()
    sys.path[:] = job["sys_path"]
    os.chdir(job["cwd"])
    warnings.simplefilter("always")  # deprecations are shown for tests
    folder = Path(job["folder"])
    try:
        _compat_frontend.enable(job["rank"], job["size"], job["local_size"])
        cell, inputs, *notes = load_function(job["builder"])(**job["arguments"])
        text = _compat_frontend.compile_front_end(cell, tuple(inputs), folder / "dumps")
    except UserError as error:
        return {"kind": "user", "failure": str(error)}
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "")
        return {
            "kind": "error",
            "failure": traceback.format_exc(),
            "reason": f"{type(error).__name__}: {reason}",
        }
    (folder / "graph.ir").write_text(text)
    return {"seconds": time.monotonic() - start, "notes": notes[0] if notes else None}


if __name__ == "__main__":
    main()
