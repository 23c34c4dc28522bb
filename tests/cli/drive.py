"""`drive.py LOG_DIR SPAWNER ACTION ...`: a launcher process of its own, for tests that send it signals."""

import sys
from pathlib import Path

from ms_zero.cli.launch_console import Console
from ms_zero.cli.launch_job import MSRUN, Job
from ms_zero.cli.launch_preflight import check_cluster
from ms_zero.cli.launch_supervisor import run_job

HERE = Path(__file__).resolve().parent
FAKE_MSRUN = (sys.executable, str(HERE / "fake_msrun.py"))


def make_job(log_dir, actions, spawner=FAKE_MSRUN, **options):
    """A job of stand-ins, one action per worker."""
    cluster = check_cluster(workers=len(actions), nodes=1, node_rank=None, master=None, port=None)
    return Job((str(HERE / "stand_in.py"), *actions), cluster, Path(log_dir), spawner=spawner, **options)


if __name__ == "__main__":
    log_dir, spawner, *actions = sys.argv[1:]
    job = make_job(log_dir, actions, MSRUN if spawner == "msrun" else FAKE_MSRUN)
    sys.exit(run_job(job, Console(sys.stdout), Console(sys.stderr)))
