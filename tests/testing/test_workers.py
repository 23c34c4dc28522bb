"""run_workers: results, the first failure with its rank and traceback, and nothing left behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ms_zero.testing import WorkerError, run_workers


def worker_echo(comm, *args):
    return {"rank": comm.rank, "of": comm.world_size, "args": args, "pid": os.getpid()}


def worker_cwd(comm):
    return os.getcwd()  # noqa: PTH109


def worker_raise_on_one(comm):
    if comm.rank == 1:
        print("last words")
        raise ValueError("broken: é")
    comm.barrier()  # blocks for ever: rank 1 never comes


def worker_die(comm, how):
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL) if how == "kill" else os._exit(3)
    comm.barrier()


def worker_exit(comm):
    raise SystemExit("left early")


def worker_hang(comm):
    if comm.rank == 1:
        time.sleep(1000)
    return comm.rank


def worker_bad_result(comm):
    return {1, 2}


def living_children():
    """Processes under this one that are neither the template nor zombies."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "_template" not in " ".join(child.cmdline()) or child.ppid() != os.getpid():
                found.append(child)
        except (psutil.ZombieProcess, psutil.NoSuchProcess):
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_left_behind():
    before = set(living_children())
    yield
    assert not [c for c in living_children() if c not in before]


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_in_rank_order(world_size):
    results = run_workers(world_size, worker_echo, 1, "é", [None, {"x": 1.5}])
    assert [r["rank"] for r in results] == list(range(world_size))
    assert all(r["of"] == world_size and r["args"] == [1, "é", [None, {"x": 1.5}]] for r in results)
    assert len({r["pid"] for r in results} | {os.getpid()}) == world_size + 1


def test_function_by_name():
    assert run_workers(2, "operator:is_not", None) == [True, True]  # comm is not None
    with pytest.raises(WorkerError, match="No module named 'no_such_module'"):
        run_workers(1, "no_such_module:fn")


def test_workers_run_in_the_callers_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_workers(1, worker_cwd) == [str(tmp_path)]


def test_local_functions_are_refused():
    with pytest.raises(ValueError, match="module-level function"):
        run_workers(1, lambda comm: 1)


def test_a_failure_names_the_rank_and_shows_traceback_and_output():
    with pytest.raises(WorkerError) as caught:
        run_workers(3, worker_raise_on_one)
    message = str(caught.value)
    assert message.startswith("rank 1 failed:\nTraceback")
    assert 'raise ValueError("broken: é")' in message and "ValueError: broken: é" in message
    assert message.endswith("output of rank 1:\nlast words")


@pytest.mark.parametrize(("how", "reason"), [("kill", "killed by SIGKILL"), ("exit", "exited with status 3")])
def test_a_worker_that_dies_is_named(how, reason):
    with pytest.raises(WorkerError, match=f"rank 0 failed:\n{reason}"):
        run_workers(2, worker_die, how)


def test_system_exit_is_a_failure():
    with pytest.raises(WorkerError, match="SystemExit: left early"):
        run_workers(1, worker_exit)


def test_a_hung_worker_ends_at_the_time_limit():
    with pytest.raises(WorkerError, match="no result from rank 1 within 6 s"):
        run_workers(2, worker_hang, timeout_s=6)  # rank 0 must be through by then on a busy machine


def test_a_result_that_is_not_json_is_a_failure():
    with pytest.raises(WorkerError, match="set is not JSON serializable"):
        run_workers(1, worker_bad_result)


def test_jobs_work_after_failures():
    assert len(run_workers(2, worker_echo)) == 2


SCRIPT = """
import sys, time
sys.path.insert(0, {tests!r})
import test_workers
from ms_zero.testing import run_workers
print("started", flush=True)
run_workers(2, test_workers.worker_hang, timeout_s=100)
"""


def test_workers_die_with_the_caller():
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    caller = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert caller.stdout.readline() == b"started\n"
        family = _wait_for_family(psutil.Process(caller.pid), 3)  # the template and two workers
    finally:
        caller.kill()
        caller.wait()
        caller.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []


def _wait_for_family(process, size):
    for _ in range(300):
        family = process.children(recursive=True)
        if len(family) >= size:
            return family
        time.sleep(0.1)
    raise AssertionError("the workers never started")
