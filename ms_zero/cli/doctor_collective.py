"""Two real workers that communicate: the launcher's own way through msrun, with a time limit.

``python -m ms_zero.cli.doctor_collective TARGET SECONDS`` is what msrun starts.
"""

import io
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from ms_zero.cli.doctor_check import Check, ok, problem
from ms_zero.cli.launch_console import Console
from ms_zero.cli.launch_job import Job
from ms_zero.cli.launch_preflight import check_cluster
from ms_zero.cli.launch_state import Place, WorkerReport
from ms_zero.cli.launch_supervisor import run_job
from ms_zero.cli.train import run_in_place

WORKERS = 2
_STARTUP_SLACK_S = 10.0
_PREFIX = "ms-zero: error: "


def check_collective(target: str, timeout_s: int) -> Check:
    """Start workers on ``target`` that run every collective on known numbers.

    Starting may take ``timeout_s``, and running as long again. The logs are kept when something fails.
    """
    cluster = check_cluster(workers=WORKERS, nodes=1, node_rank=None, master=None, port=None)
    folder = Path(tempfile.mkdtemp(prefix="ms-zero-doctor-"))
    command = ("-m", "ms_zero.cli.doctor_collective", target, str(timeout_s))
    job = Job(command, cluster, folder, timeout_s, _STARTUP_SLACK_S)
    shown, errors = io.StringIO(), io.StringIO()
    started_at = time.monotonic()
    status = run_job(job, Console(shown), Console(errors))
    took = time.monotonic() - started_at
    if status >= 128:  # stopped by a signal, which also is meant for the doctor
        shutil.rmtree(folder)
        raise KeyboardInterrupt
    if status != 0:
        return _failure(errors.getvalue(), took, folder)
    shutil.rmtree(folder)
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("correct: ")]
    assert lines, "a worker ended well without a result"
    return ok("collective", f"{WORKERS} workers on {target} in {took:.0f} s; {lines[-1]}")


def _failure(errors: str, took: float, folder: Path) -> Check:
    reasons = [line.removeprefix(_PREFIX) for line in errors.splitlines() if line.startswith(_PREFIX)]
    reason = reasons[0] if reasons else "the workers failed"
    if "SIGALRM" in reason:
        reason = f"the workers did not finish in time ({reason})"
    fix = f"read the logs in {folder}; if the machine is busy, raise --timeout"
    return problem("collective", f"{reason} (after {took:.0f} s)", fix)


def _main(target: str, timeout_s: int) -> int:
    """Be a worker, or the scheduler; the kernel ends a worker that hangs."""

    def work(place: Place, report: WorkerReport) -> int:
        from ms_zero import comm
        from ms_zero.testing import selfcheck

        communicator = comm.connect(target)
        report.phase("connected")
        signal.alarm(timeout_s)
        print(f"correct: {', '.join(selfcheck.check_collectives(communicator))}", flush=True)
        return 0

    return run_in_place(work)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1], int(sys.argv[2])))
