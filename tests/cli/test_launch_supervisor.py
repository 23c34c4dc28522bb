"""The launcher with stand-in workers: who failed first, exit statuses, signals, nothing left behind."""

import importlib.util
import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ms_zero.cli.launch_console import Console
from ms_zero.cli.launch_process import all_pids, read_environment, read_stat
from ms_zero.cli.launch_supervisor import run_job

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent


def load_drive():
    spec = importlib.util.spec_from_file_location("drive", HERE / "drive.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


drive = load_drive()


def processes_of(log_dir):
    """Live processes whose environment names this job's state directory."""
    state_dir = str((log_dir / "state-node0").resolve())
    found = []
    for pid in all_pids():
        stat = read_stat(pid)
        if stat and stat.alive and read_environment(pid).get("MS_ZERO_STATE_DIR") == state_dir:
            found.append(pid)
    return found


def run(tmp_path, *actions, **options):
    """Exit status, what the launcher showed, and its own messages."""
    log_dir = tmp_path / "a dir with spaces" / "logs"
    shown, errors = io.StringIO(), io.StringIO()
    status = run_job(drive.make_job(log_dir, actions, **options), Console(shown), Console(errors))
    assert processes_of(log_dir) == []
    return status, shown.getvalue(), errors.getvalue()


def test_workers_that_end_well_give_status_0_and_only_the_last_one_is_shown(tmp_path):
    status, shown, errors = run(tmp_path, "ok", "noisy")
    assert (status, errors) == (0, "")
    assert shown == "step 1 loss 2.0\nvalidation loss 3.0\n"


@pytest.mark.parametrize(
    ("actions", "who", "what", "log_line"),
    [
        (("loop", "kill-self", "hang"), "worker 1", "killed by SIGKILL", "  | step 2 loss 1.0"),
        (("error", "hang"), "worker 0", "ValueError: bad luck", "  | Traceback: the reason is here"),
        (("loop", "die-early"), "worker 1", "exited with status 7 before it could register", None),
        (("loop", "quiet-exit"), "worker 1", "exited with status 0 without a report", None),
        (("orphan", "hang"), "worker 0", "exited with status 3 without a report", None),
        (("kill-scheduler", "loop"), "the scheduler", "killed by SIGKILL", None),
        (("silent", "loop"), "worker 0", "no sign of life", "worker_0.log says nothing about it"),
    ],
)
def test_first_failure_is_named_with_the_tail_of_its_log(tmp_path, actions, who, what, log_line):
    status, _, errors = run(tmp_path, *actions)
    lines = errors.splitlines()
    assert status == 1
    assert lines[0].startswith(f"ms-zero: error: {who} (pid ") and "failed first" in lines[0]
    assert what in lines[0]
    assert log_line is None or any(line.endswith(log_line) for line in lines)
    assert "chatter" not in errors


def test_user_error_is_one_line_and_status_2(tmp_path):
    status, _, errors = run(tmp_path, "user-error", "user-error")
    assert (status, errors) == (2, "ms-zero: error: ValueError: bad luck\n")


def test_worker_that_never_joins_is_named_after_the_timeout(tmp_path):
    status, _, errors = run(tmp_path, "loop", "absent", cluster_timeout_s=4, startup_slack_s=0.0)
    assert status == 1
    assert "worker 1 failed first: did not join the cluster of 2 workers at 127.0.0.1:" in errors


def test_msrun_that_cannot_start_is_named_with_its_output(tmp_path):
    spawner = (sys.executable, "-c", "raise SystemExit('no such thing')")
    status, _, errors = run(tmp_path, "ok", spawner=spawner)
    assert status == 1
    assert "failed first: exited with status 1 before the workers had ended" in errors
    assert "  | no such thing" in errors


def test_logs_of_an_earlier_launch_are_kept(tmp_path):
    run(tmp_path, "noisy")
    run(tmp_path, "ok")
    logs = sorted(path.name for path in (tmp_path / "a dir with spaces" / "logs").glob("worker_0*.log"))
    assert len(logs) == 2 and logs[1] == "worker_0.log"


class Launcher:
    """The launcher in a process of its own, once all its workers have said that they are ready."""

    def __init__(self, tmp_path, *actions, wait=True):
        self.log_dir = tmp_path / "logs"
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "drive.py"), str(self.log_dir), "fake", *actions],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        )
        ready = [self.log_dir / "state-node0" / f"ready-{rank}" for rank in range(len(actions))]
        wait_until(lambda: not wait or all(path.exists() for path in ready))

    def end(self):
        """Exit status and output."""
        output, _ = self.process.communicate(timeout=20)
        return self.process.returncode, output


def wait_until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_stops_the_workers_gracefully(tmp_path, number):
    launcher = Launcher(tmp_path, "loop", "loop")
    launcher.process.send_signal(number)
    status, output = launcher.end()
    assert status == 0
    assert "ms-zero: stopping" in output and "saved" in output
    assert "saved" in (launcher.log_dir / "worker_0.log").read_text()
    assert processes_of(launcher.log_dir) == []


def test_second_signal_kills(tmp_path):
    launcher = Launcher(tmp_path, "hang", "hang")
    launcher.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    assert launcher.process.poll() is None
    launcher.process.send_signal(signal.SIGTERM)
    status, output = launcher.end()
    assert status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM before the workers could finish a step and save" in output
    assert processes_of(launcher.log_dir) == []


def test_stop_before_the_training_begins_is_not_blamed_on_a_worker(tmp_path):
    launcher = Launcher(tmp_path, "unready", "unready")
    launcher.process.send_signal(signal.SIGTERM)
    status, output = launcher.end()
    assert status == 128 + signal.SIGTERM
    assert "failed" not in output


def test_stop_before_the_workers_exist_is_not_forgotten(tmp_path):
    launcher = Launcher(tmp_path, "loop", "absent", wait=False)
    wait_until(lambda: (launcher.log_dir / "state-node0" / "launcher.json").exists())
    wait_until(lambda: catches(launcher.process.pid, signal.SIGTERM))
    launcher.process.send_signal(signal.SIGTERM)
    status, output = launcher.end()
    assert status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM before" in output
    assert processes_of(launcher.log_dir) == []


def catches(pid, number):
    """Whether the process has a handler for a signal."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next(line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_sigterm_for_every_process_at_once_lets_the_workers_save(tmp_path):
    """As batch systems end a job: the scheduler and msrun must not go first."""
    launcher = Launcher(tmp_path, "loop", "loop")
    for pid in [*processes_of(launcher.log_dir), launcher.process.pid]:
        os.kill(pid, signal.SIGTERM)
    status, output = launcher.end()
    assert (status, "failed" in output) == (0, False)
    assert "saved" in (launcher.log_dir / "worker_0.log").read_text()
    assert processes_of(launcher.log_dir) == []


def test_failure_after_a_request_to_stop_stays_a_failure(tmp_path):
    launcher = Launcher(tmp_path, "hang", "hang")
    victim = next(pid for pid in processes_of(launcher.log_dir) if worker_rank(pid) == "1")
    launcher.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    os.kill(victim, signal.SIGKILL)
    status, output = launcher.end()
    assert status == 1
    assert f"worker 1 (pid {victim}) failed first: killed by SIGKILL" in output


def worker_rank(pid):
    environment = read_environment(pid)
    return environment.get("MS_NODE_ID") if environment.get("MS_ROLE") == "MS_WORKER" else None


def test_killed_launcher_leaves_nothing_behind_and_the_workers_save(tmp_path):
    launcher = Launcher(tmp_path, "loop", "loop")
    launcher.process.kill()
    launcher.end()
    wait_until(lambda: processes_of(launcher.log_dir) == [])
    assert "saved" in (launcher.log_dir / "worker_1.log").read_text()


def test_second_launch_in_the_same_directory_is_refused_while_the_first_runs(tmp_path):
    from ms_zero.cli.launch_preflight import check_not_running
    from ms_zero.errors import UserError

    launcher = Launcher(tmp_path, "loop")
    with pytest.raises(UserError, match=f"another launch \\(pid {launcher.process.pid}\\) is running"):
        check_not_running(launcher.log_dir / "state-node0")
    launcher.process.terminate()
    launcher.end()
    check_not_running(launcher.log_dir / "state-node0")
