"""A worker that trains nothing: `stand_in.py ACTION ACTION ...` gives one action per rank.

Actions: ok, loop, unready, hang, error, user-error, die-early, absent, quiet-exit, kill-self, kill-scheduler,
orphan, noisy, silent.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from ms_zero.cli.launch_process import children_of, read_environment, signal_at_parent_death
from ms_zero.cli.launch_state import WorkerReport, place_from_environment, read_outcome


def scheduler(place):
    """Ends when every worker has; stays for ever when one has died, as the real one does for long."""
    while True:
        if (place.state_dir / "silent").exists():
            sys.exit("Timed out node list is: [const vector]{0}, worker 0 is the first one timed out")
        outcomes = [read_outcome(place.state_dir, rank) for rank in range(place.world_size)]
        if all(outcome is not None and outcome.status == "ok" for outcome in outcomes):
            return
        time.sleep(0.05)


def steps(count=None, stop=()):
    step = 0
    while (count is None or step < count) and not stop:
        step += 1
        print(f"step {step} loss 1.0", flush=True)
        time.sleep(0.05)


def work(action, report, place):
    """Do what the action says; most end here."""
    if action == "ok":
        steps(3)
    elif action == "loop":
        stop = []
        signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
        Path(place.state_dir / f"ready-{place.rank}").touch()
        steps(stop=stop)
        print("saved", flush=True)
    elif action == "unready":  # no handler yet, as before the training begins
        Path(place.state_dir / f"ready-{place.rank}").touch()
        time.sleep(1000)
    elif action == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(place.state_dir / f"ready-{place.rank}").touch()
        time.sleep(1000)
    elif action in ("error", "user-error"):
        steps(2)
        print("[WARNING] DEVICE(1,7f,python): chatter\nTraceback: the reason is here", flush=True)
        report.outcome(action.replace("-", "_"), "ValueError: bad luck")
        sys.exit(1)
    elif action == "quiet-exit":
        os._exit(0)
    elif action == "kill-self":
        steps(2)
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "kill-scheduler":
        steps(2)
        os.kill(scheduler_pid(), signal.SIGKILL)
        time.sleep(1000)
    elif action == "silent":  # the scheduler hears nothing any more
        Path(place.state_dir / "silent").touch()
        time.sleep(1000)
    elif action == "orphan":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        sys.exit(3)
    elif action == "noisy":
        print("[WARNING] DEVICE(1,7f,python): chatter\nstep 1 loss 2.0\nvalidation loss 3.0", flush=True)


def scheduler_pid():
    pids = [child.pid for child in children_of(os.getppid())]
    return next(pid for pid in pids if read_environment(pid).get("MS_ROLE") == "MS_SCHED")


def main():
    place = place_from_environment(os.environ)
    if place.role == "scheduler":
        scheduler(place)
        return
    action = sys.argv[1 + place.rank]
    if action == "die-early":
        time.sleep(0.1)
        sys.exit(7)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ignored so far, see launch_guard
    signal_at_parent_death(signal.SIGTERM)
    report = WorkerReport(place)
    report.phase("started")
    if action != "absent":
        report.phase("connected")
    else:
        time.sleep(1000)
    work(action, report, place)
    report.outcome("ok")


if __name__ == "__main__":
    main()
