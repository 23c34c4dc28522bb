"""Runs a job: starts msrun, follows the log of the last local worker, watches the workers, cleans up.

msrun starts one scheduler and the workers, each worker in a session of its own. The launcher puts a tag into
their environment, so that it finds every process of the job again, whoever its parent is.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from ms_zero.cli import launch_state
from ms_zero.cli.launch_console import Console, LogFollower, tail
from ms_zero.cli.launch_job import Job, job_environment, msrun_arguments, usable_cores
from ms_zero.cli.launch_process import (
    adopt_orphans,
    describe_wait_status,
    kill_tagged,
    read_stat,
    reap_children,
    send_signal,
)
from ms_zero.cli.launch_remote import SchedulerProbe
from ms_zero.cli.launch_watch import Failure, Watch

_POLL_S = 0.1
_KILL_TIMEOUT_S = 10.0
_TEARDOWN_S = 60.0
_TAIL_LINES = 30


def run_job(job: Job, console: Console, errors: Console) -> int:
    """Run ``job`` to its end and return the exit status; no process of it is left.

    The last local worker's log goes to ``console``, the launcher's own verdict to ``errors``.

    0: every worker ended well. 1: something failed; the first failure has been named. 2: it failed for a
    reason that the user can fix. 128 + signal: stopped on request before the training could save.
    """
    prepare_directories(job)
    adopt_orphans()
    with _stop_requests() as requests:
        supervisor = _Supervisor(job, console, requests)
        try:
            failure = supervisor.follow()
        finally:
            left = supervisor.clean_up()
    if left:
        errors.line(f"ms-zero: warning: these processes could not be killed: {left}")
    return 0 if failure is None else _conclude(job, failure, requests, errors)


def prepare_directories(job: Job) -> None:
    """Make the directories; an earlier launch's logs stay, under the time of their last line."""
    job.log_dir.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(job.state_dir, ignore_errors=True)
    job.state_dir.mkdir()
    logs = [*map(job.worker_log, job.cluster.local_ranks), job.msrun_log]
    logs += [job.log_dir / "scheduler.log"] if job.cluster.has_scheduler else []
    for path in logs:
        if path.exists():
            stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))
            path.rename(path.with_name(f"{path.stem}.{stamp}.log"))
    stat = read_stat(os.getpid())
    assert stat is not None
    record = {"pid": os.getpid(), "start_ticks": stat.start_ticks, "host": socket.gethostname()}
    launch_state.write_json(job.state_dir / "launcher.json", record)


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collect SIGTERM, SIGINT and SIGHUP (unless nohup ignores it) instead of dying of them."""
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, note) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class _Supervisor:
    """One launch, from the start of msrun to the end of its last process."""

    def __init__(self, job: Job, console: Console, requests: Sequence[int]) -> None:
        self._job = job
        self._console = console
        self._requests = requests
        self._launch_id = secrets.token_hex(8)
        self._follower = LogFollower(job.worker_log(job.cluster.local_ranks[-1]))
        self._probe = SchedulerProbe(job.cluster.master, job.cluster.port)
        self._started_at = time.monotonic()
        self._process = self._spawn()
        self._watch = Watch(
            ranks=job.cluster.local_ranks,
            has_scheduler=job.cluster.has_scheduler,
            spawner_pid=self._process.pid,
            state_dir=job.state_dir,
            log_dir=job.log_dir,
        )

    def _spawn(self) -> subprocess.Popen[bytes]:
        environment = job_environment(
            os.environ,
            cores=usable_cores(),
            local_workers=self._job.cluster.local_workers,
            state_dir=self._job.state_dir,
            launch_id=self._launch_id,
        )
        guard = [sys.executable, "-m", "ms_zero.cli.launch_guard", str(os.getpid())]
        with self._job.msrun_log.open("wb") as log:
            return subprocess.Popen(
                [*guard, *msrun_arguments(self._job)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def follow(self) -> Failure | None:
        """Watch the job until it has ended: None when every worker ended well, else the first failure."""
        stop_forwarded = False
        while True:
            ended = self._process.poll() is not None
            failure = self._watch.look()  # after the look at msrun, so that its workers' last words count
            self._console.relay(self._follower.new_lines())
            if failure is not None:
                return failure
            if self._watch.finished:
                self._await_teardown()
                return None
            if ended:
                return self._msrun_failure()
            if len(self._requests) > 1:
                return self._failure("the job", "killed at the second signal", terminated=True)
            if self._requests and not stop_forwarded:
                if self._watch.unconnected():
                    return self._failure("the job", "stopped before the training began", terminated=True)
                stop_forwarded = True
                self._forward_stop()
            failure = self._check_startup() if self._watch.unconnected() else self._check_scheduler()
            if failure is not None:
                return failure
            time.sleep(_POLL_S)

    def clean_up(self) -> list[int]:
        """Kill and collect whatever is left of the job; returns the processes that withstood."""
        name = launch_state.LAUNCH_ID_VARIABLE
        killed, left = kill_tagged(name, self._launch_id, _KILL_TIMEOUT_S)
        if not left:
            self._process.wait()
        reap_children(killed | self._watch.known_pids())
        (self._job.state_dir / "launcher.json").unlink(missing_ok=True)
        self._console.relay(self._follower.remainder())
        self._console.finish()
        return left

    def _forward_stop(self) -> None:
        self._console.line(
            "ms-zero: stopping: the workers finish the step and save; a second signal kills them"
        )
        for pid in self._watch.worker_pids():
            send_signal(pid, signal.SIGTERM)

    def _check_startup(self) -> Failure | None:
        """Show how many workers have come together; a failure when that takes too long."""
        cluster, limit_s = self._job.cluster, self._job.cluster_timeout_s
        elapsed_s = time.monotonic() - self._started_at
        if elapsed_s <= limit_s + self._job.startup_slack_s:
            self._console.status(
                f"starting: {self._watch.started} of {cluster.local_workers} workers up, "
                f"{self._watch.connected} have joined the cluster, {elapsed_s:.0f} s"
            )
            return None
        missing = self._watch.unconnected()
        what = (
            f"did not join the cluster of {cluster.workers} workers at {cluster.master}:{cluster.port} "
            f"within {limit_s} s: is every node up and the port reachable? (--cluster-timeout sets the limit)"
        )
        who = ("workers " if len(missing) > 1 else "worker ") + ", ".join(map(str, missing))
        return Failure(who, what, self._job.worker_log(missing[0]), time.monotonic())

    def _check_scheduler(self) -> Failure | None:
        """On the other nodes: a failure when the scheduler on node 0 is gone."""
        cluster = self._job.cluster
        if cluster.has_scheduler:
            return None
        self._probe.start()
        if not self._probe.gone():
            return None
        what = f"at {cluster.master}:{cluster.port} is gone: the job has ended on node 0"
        log = self._job.worker_log(cluster.local_ranks[-1])
        return Failure("the scheduler", what, log, time.monotonic(), elsewhere=True)

    def _await_teardown(self) -> None:
        """Let msrun and the scheduler end by themselves after the work is done; what lingers is killed."""
        end = time.monotonic() + _TEARDOWN_S
        while self._process.poll() is None and time.monotonic() < end:
            self._console.relay(self._follower.new_lines())
            time.sleep(_POLL_S)
        if self._process.returncode is None:
            self._console.line("ms-zero: warning: all is done but msrun does not end: killing it")
        elif self._process.returncode != 0:
            status = self._process.returncode
            self._console.line(f"ms-zero: warning: all is done but msrun ended with status {status}")

    def _msrun_failure(self) -> Failure:
        status = self._process.returncode
        how = describe_wait_status(-status if status < 0 else status << 8)
        return self._failure(f"msrun (pid {self._process.pid})", f"{how} before the workers had ended")

    def _failure(self, who: str, what: str, *, terminated: bool = False) -> Failure:
        return Failure(who, what, self._job.msrun_log, time.monotonic(), terminated=terminated)


def _conclude(job: Job, failure: Failure, requests: Sequence[int], errors: Console) -> int:
    """Say what failed first and turn it into the exit status."""
    if requests and failure.terminated:
        name = signal.Signals(requests[0]).name
        errors.line(f"ms-zero: stopped by {name} before the workers could finish a step and save")
        return 128 + requests[0]
    if failure.user_error:
        for line in failure.what.splitlines():
            errors.line(f"ms-zero: error: {line}")
        return 2
    if failure.elsewhere:
        errors.line(f"ms-zero: error: {failure.who} {failure.what}; its launcher names the cause")
    else:
        here = " on this node" if job.cluster.nodes > 1 else ""
        errors.line(f"ms-zero: error: {failure.who} failed first{here}: {failure.what}")
    lines = tail(failure.log, _TAIL_LINES)
    if lines:
        errors.line(f"ms-zero: last lines of {failure.log}:")
        for line in lines:
            errors.line(f"  | {line}")
    else:
        errors.line(f"ms-zero: {failure.log} says nothing about it")
    errors.line(f"ms-zero: every process of the job has been stopped; logs: {job.log_dir}")
    if job.cluster.nodes > 1 and not failure.elsewhere:
        errors.line("ms-zero: the cause may lie on another node: compare the messages of all launchers")
    return 1
