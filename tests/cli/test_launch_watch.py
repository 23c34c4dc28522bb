"""Which of several failures counts as the first."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ms_zero.cli.launch_state import (
    Outcome,
    Place,
    WorkerReport,
    place_from_environment,
    read_outcome,
    read_registration,
    write_json,
)
from ms_zero.cli.launch_watch import Watch

REPOSITORY = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def workers(tmp_path):
    """Two live processes that are registered as workers 0 and 1."""
    code = (
        "import sys, time; from pathlib import Path; from ms_zero.cli.launch_state import *;"
        "place = Place('worker', int(sys.argv[1]), 2, Path(sys.argv[2]));"
        "WorkerReport(place).phase('connected'); time.sleep(100)"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(rank), str(tmp_path)], cwd=REPOSITORY)
        for rank in range(2)
    ]
    while not all((tmp_path / f"worker-{rank}.json").exists() for rank in range(2)):
        time.sleep(0.02)
    yield started
    for process in started:
        process.kill()
        process.wait()


def make_watch(directory):
    return Watch(ranks=range(2), has_scheduler=False, spawner_pid=0, state_dir=directory, log_dir=directory)


def report(directory, rank, status, message="", at=None):
    WorkerReport(Place("worker", rank, 2, directory)).outcome(status, message, at)


def await_death(process):
    """Until the process is a zombie; the parent, this test, does not collect it."""
    from ms_zero.cli.launch_process import read_stat

    while read_stat(process.pid).alive:
        time.sleep(0.01)


def test_earlier_of_two_reports_is_first(tmp_path, workers):
    watch = make_watch(tmp_path)
    assert watch.look() is None
    report(tmp_path, 0, "error", "later", at=20.0)
    report(tmp_path, 1, "error", "earlier", at=10.0)
    failure = watch.look()
    assert failure.who == f"worker 1 (pid {workers[1].pid})" and "earlier" in failure.what


def test_killed_worker_comes_before_the_report_of_a_peer_in_the_same_interval(tmp_path, workers):
    watch = make_watch(tmp_path)
    assert watch.look() is None
    workers[1].kill()
    await_death(workers[1])
    report(tmp_path, 0, "error", "connection to peer lost")
    failure = watch.look()
    assert failure.who == f"worker 1 (pid {workers[1].pid})" and "SIGKILL" in failure.what


def test_report_comes_before_a_worker_that_was_seen_alive_after_it(tmp_path, workers):
    watch = make_watch(tmp_path)
    at = time.monotonic()
    assert watch.look() is None
    report(tmp_path, 0, "error", "the cause", at=at)
    workers[1].kill()
    await_death(workers[1])
    assert "the cause" in watch.look().what


def test_death_by_sigterm_is_marked_and_collected_zombies_are_dead(tmp_path, workers):
    watch = make_watch(tmp_path)
    workers[0].send_signal(signal.SIGTERM)
    await_death(workers[0])
    failure = watch.look()
    assert failure.terminated and "SIGTERM" in failure.what
    workers[0].wait()
    failure = make_watch(tmp_path).look()
    assert failure.terminated and "vanished" in failure.what


def test_pid_of_another_process_does_not_pass_for_the_worker(tmp_path, workers):
    registered = read_registration(tmp_path, 0)
    write_json(tmp_path / "worker-0.json", {**vars(registered), "start_ticks": registered.start_ticks - 1})
    assert "vanished" in make_watch(tmp_path).look().what


def test_all_reports_good_is_the_end_whatever_the_processes_do(tmp_path, workers):
    watch = make_watch(tmp_path)
    report(tmp_path, 0, "ok")
    assert watch.look() is None and not watch.finished
    report(tmp_path, 1, "ok")
    assert watch.look() is None and watch.finished
    assert read_outcome(tmp_path, 1) == Outcome(1, "ok", "", read_outcome(tmp_path, 1).time)


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, ("single", 0, 1)),
        ({"RANK_ID": "3", "RANK_SIZE": "4"}, ("single", 0, 1)),
        ({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "MS_NODE_ID": "3", "RANK_ID": "3"}, ("worker", 3, 4)),
        ({"MS_ROLE": "MS_WORKER", "MS_WORKER_NUM": "4", "RANK_ID": "0"}, ("worker", None, 4)),
        ({"MS_ROLE": "MS_SCHED", "MS_WORKER_NUM": "4", "RANK_ID": "0"}, ("scheduler", None, 4)),
    ],
)
def test_place_in_the_job_is_read_from_the_variables_of_msrun(environment, place):
    found = place_from_environment(environment)
    assert (found.role, found.rank, found.world_size) == place
