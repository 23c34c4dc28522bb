"""The process that imports MindSpore once and forks workers (see `ms_zero.testing.workers`).

Reads one job per line on standard input and writes one report per line on standard output.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from ms_zero.comm import connect_store

_PR_SET_PDEATHSIG = 1
_LOG_TAIL_BYTES = 4000


@dataclass
class _Worker:
    rank: int
    pid: int
    fd: int
    log: IO[bytes]
    data: bytearray = field(default_factory=bytearray)
    closed: bool = False

    def message(self) -> dict[str, Any] | None:
        """What the worker reported, once complete."""
        return json.loads(self.data) if self.data.endswith(b"\n") else None


def main() -> None:
    """Serve jobs until standard input closes."""
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not mix with the reports
    for line in iter(sys.stdin.readline, ""):
        reports.write(json.dumps(_run_job(json.loads(line))) + "\n")
        reports.flush()


def _run_job(job: dict[str, Any]) -> dict[str, Any]:
    port = _free_port()
    workers: list[_Worker] = []
    try:
        for rank in range(job["world_size"]):
            workers.append(_fork_worker(rank, port, job, workers))
        return _collect(workers, time.monotonic() + job["timeout_s"], job["timeout_s"])
    finally:
        for worker in workers:
            _end(worker)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _fork_worker(rank: int, port: int, job: dict[str, Any], earlier: list[_Worker]) -> _Worker:
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _end
    read_fd, write_fd = os.pipe()
    template_pid = os.getpid()
    pid = os.fork()
    if pid:
        os.close(write_fd)
        return _Worker(rank, pid, read_fd, log)
    try:
        _die_with(template_pid)
        for fd in (read_fd, *(worker.fd for worker in earlier)):
            os.close(fd)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (log.fileno(), 1), (log.fileno(), 2)):
            os.dup2(source, target)
        faulthandler.enable()
        _report(write_fd, _work(rank, port, job))
        signal.pause()  # peers may still need this process; the template ends it
    finally:
        os._exit(1)


def _die_with(template_pid: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != template_pid:
        os._exit(1)


def _work(rank: int, port: int, job: dict[str, Any]) -> dict[str, Any]:
    try:
        os.chdir(job["cwd"])
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})  # pool threads of several workers would fight
        sys.path[:] = job["sys_path"]
        fn = _load(**job["function"])
        result = fn(connect_store(rank, job["world_size"], port, job["timeout_s"]), *job["args"])
        json.dumps(result)
        return {"result": result}
    except BaseException:
        return {"error": traceback.format_exc(), "time": time.monotonic()}


def _load(name: str, module: str | None = None, file: str | None = None) -> Callable[..., Any]:
    if module is not None:
        return getattr(importlib.import_module(module), name)
    spec = importlib.util.spec_from_file_location("_worker_" + Path(file).stem, file)
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return getattr(loaded, name)


def _report(fd: int, message: dict[str, Any]) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    data = (json.dumps(message) + "\n").encode()
    while data:
        data = data[os.write(fd, data) :]


def _collect(workers: list[_Worker], deadline: float, timeout_s: float) -> dict[str, Any]:
    """Wait for all results, the first failure, the deadline or the end of the parent."""
    while True:
        waiting = [w for w in workers if w.message() is None]
        if not waiting:
            messages = [w.message() for w in workers]
            failed = [w for w in workers if "error" in w.message()]
            return _failure(failed) if failed else {"results": [m["result"] for m in messages]}
        left = deadline - time.monotonic()
        ready = select.select([sys.stdin, *(w.fd for w in waiting)], [], [], max(left, 0))[0]
        if sys.stdin in ready:  # the parent waits for a report: the only news is that it is gone
            return {}
        for worker in waiting:
            if worker.fd in ready:
                chunk = os.read(worker.fd, 1 << 16)
                worker.data += chunk
                worker.closed = not chunk
        failed = [w for w in workers if w.closed or "error" in (w.message() or {})]
        if failed:
            return _failure(failed)
        if left <= 0:
            return _timeout(workers, timeout_s)


def _failure(failed: list[_Worker]) -> dict[str, Any]:
    """The earliest error; a worker that died without a word comes first, it caused what others report."""
    first = min(failed, key=lambda w: 0.0 if w.closed else w.message()["time"])
    text = _death(first) if first.closed else first.message()["error"]
    return {"failure": f"rank {first.rank} failed:\n{text}{_log_tail(first)}"}


def _death(worker: _Worker) -> str:
    _, status = os.waitpid(worker.pid, 0)
    worker.pid = 0
    code = os.waitstatus_to_exitcode(status)
    return f"killed by {signal.Signals(-code).name}\n" if code < 0 else f"exited with status {code}\n"


def _timeout(workers: list[_Worker], timeout_s: float) -> dict[str, Any]:
    stuck = [w for w in workers if w.message() is None]
    ranks = ", ".join(str(w.rank) for w in stuck)
    return {"failure": f"no result from rank {ranks} within {timeout_s:g} s{''.join(map(_log_tail, stuck))}"}


def _log_tail(worker: _Worker) -> str:
    size = worker.log.seek(0, os.SEEK_END)
    worker.log.seek(max(0, size - _LOG_TAIL_BYTES))
    text = worker.log.read().decode(errors="replace")
    lines = [line for line in text.splitlines() if not line.startswith("[INFO]")]
    return f"\noutput of rank {worker.rank}:\n" + "\n".join(lines) if lines else ""


def _end(worker: _Worker) -> None:
    if worker.pid:
        os.kill(worker.pid, signal.SIGKILL)
        os.waitpid(worker.pid, 0)
    os.close(worker.fd)
    worker.log.close()


if __name__ == "__main__":
    main()
