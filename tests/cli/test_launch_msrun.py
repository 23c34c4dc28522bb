"""The launcher with the real msrun, the real cluster and real collectives, on the CPU."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent

DRIVER = """
import sys
from pathlib import Path
from ms_zero.cli.launch_console import Console
from ms_zero.cli.launch_job import Job
from ms_zero.cli.launch_preflight import check_cluster
from ms_zero.cli.launch_supervisor import run_job

log_dir, worker, run = sys.argv[1:]
cluster = check_cluster(workers=2, nodes=1, node_rank=None, master=None, port=None)
job = Job((worker, run), cluster, Path(log_dir), cluster_timeout_s=60)
sys.exit(run_job(job, Console(sys.stdout), Console(sys.stderr)))
"""


@pytest.fixture
def launcher(tmp_path):
    """Two workers that reduce for ever, as soon as both have made some steps."""
    run = REPOSITORY / "configs" / "runs" / "quickstart.yaml"
    process = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), str(HERE / "collective_worker.py"), str(run)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    logs = [tmp_path / f"worker_{rank}.log" for rank in range(2)]
    deadline = time.monotonic() + 120
    while not all(log.exists() and "step 3 " in log.read_text() for log in logs):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate(timeout=60)
        time.sleep(0.1)
    yield process
    process.kill()
    process.communicate()


def pids(log_dir):
    state = log_dir / "state-node0"
    return [json.loads((state / f"worker-{rank}.json").read_text())["pid"] for rank in range(2)]


def test_killed_worker_ends_the_job_within_20_s_and_is_named(launcher, tmp_path):
    victim, peer = pids(tmp_path)
    os.kill(victim, signal.SIGKILL)
    _, errors = launcher.communicate(timeout=20)
    assert launcher.returncode == 1
    assert f"worker 0 (pid {victim}) failed first: killed by SIGKILL" in errors
    # Whichever steps are in the tail: the worker went on until the signal.
    assert re.search(r"^  \| step \d+ of rank 0", errors, re.MULTILINE), errors
    assert not Path(f"/proc/{peer}").exists()


def test_sigterm_ends_every_worker_after_the_same_step(launcher, tmp_path):
    workers = pids(tmp_path)
    launcher.send_signal(signal.SIGTERM)
    shown, errors = launcher.communicate(timeout=60)
    assert (launcher.returncode, errors) == (0, "")
    assert shown.endswith("saved\n")
    logs = [(tmp_path / f"worker_{rank}.log").read_text() for rank in range(2)]
    assert logs[0].count("step ") == logs[1].count("step ")
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
