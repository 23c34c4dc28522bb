"""``ms-zero train``: one process, one worker of a job, or the job's scheduler."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from ms_zero.cli.affinity import bind_to_share
from ms_zero.cli.launch_console import Console
from ms_zero.cli.launch_preflight import check_kernels, check_output_dir
from ms_zero.cli.launch_process import signal_at_parent_death
from ms_zero.cli.launch_state import Place, WorkerReport, place_from_environment
from ms_zero.errors import UserError


def train(run: str, overrides: Sequence[str]) -> int:
    """Train as the environment says; returns the exit status."""
    return run_in_place(lambda place, report: _train(run, overrides, place, report))


def run_in_place(work: Callable[[Place, WorkerReport], int]) -> int:
    """Do ``work`` as a single process or a worker, or serve as the job's scheduler; returns the exit status.

    A worker whose launcher listens reports how it ended: after the traceback is in the log, with the time at
    which the error was raised, so that the first of several failures can be told.
    """
    place = place_from_environment(os.environ)
    if place.role == "scheduler":
        return _schedule()
    report = WorkerReport(place)
    if place.state_dir is not None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # ignored so far, see launch_guard
        signal_at_parent_death(signal.SIGTERM)  # a graceful stop, should the launcher be killed
    report.phase("started")
    try:
        status = work(place, report)
    except UserError as error:
        report.outcome("user_error", str(error))
        raise
    except MemoryError as error:
        advice = "take a smaller model or micro-batch, or a machine with more"
        lack = UserError(f"out of memory: {str(error) or 'an allocation failed'}; {advice}")
        report.outcome("user_error", str(lack))
        raise lack from error
    except BaseException as error:
        raised_at = time.monotonic()
        if place.role == "single":
            raise
        traceback.print_exc()
        sys.stderr.flush()
        report.outcome("error", _one_line(error), raised_at)
        return 1
    report.outcome("ok" if status == 0 else "error", f"ended with status {status}")
    return status


def _train(run: str, overrides: Sequence[str], place: Place, report: WorkerReport) -> int:
    from ms_zero.config import load_config

    loaded = load_config(run, overrides, place.world_size)
    check_output_dir(Path(loaded.config.train.output_dir))

    if place.role == "single":  # a launcher has looked at these already
        from ms_zero.data.run import load_data

        load_data(loaded.config)
        hardware = loaded.config.hardware
        check_kernels(hardware.target, hardware.kernels, Console(sys.stdout))
    target = loaded.config.hardware.target
    if target == "CPU":
        bind_to_share(os.environ)

    from ms_zero import comm, runner  # the first import of mindspore: after all that is quick to refuse

    communicator = comm.local(target) if place.role == "single" else comm.connect(target)
    report.phase("connected")
    return runner.run(loaded, communicator)


def _schedule() -> int:
    """Serve as the job's scheduler: init() returns, or ends the process, when all workers have left."""
    import mindspore.communication

    mindspore.communication.init("mccl")
    return 0


def _one_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
