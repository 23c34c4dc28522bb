"""``ms-zero launch``: checks everything that can be checked first, then runs the job."""

import sys
from collections.abc import Sequence
from pathlib import Path

from ms_zero.cli import launch_preflight
from ms_zero.cli.launch_console import Console
from ms_zero.cli.launch_job import Job
from ms_zero.cli.launch_supervisor import run_job
from ms_zero.errors import UserError


def launch(
    *,
    run: str,
    overrides: Sequence[str],
    workers: int,
    nodes: int,
    node_rank: int | None,
    master: str | None,
    port: int | None,
    cluster_timeout: int,
) -> int:
    """Check the run file, the arguments and this machine, then run the workers of this node to their end.

    Raises UserError before anything is started; otherwise returns the exit status of ``run_job``.
    """
    if cluster_timeout < 1:
        raise UserError(f"--cluster-timeout {cluster_timeout}: at least 1 second is needed")
    cluster = launch_preflight.check_cluster(
        workers=workers, nodes=nodes, node_rank=node_rank, master=master, port=port
    )
    from ms_zero.config import load_config

    loaded = load_config(run, overrides, workers)
    output_dir = Path(loaded.config.train.output_dir)
    job = Job(
        command=("-m", "ms_zero", "train", run, *overrides),
        cluster=cluster,
        log_dir=output_dir / "logs",
        cluster_timeout_s=cluster_timeout,
    )
    launch_preflight.check_memory(cluster.local_workers)
    launch_preflight.check_mindspore()
    launch_preflight.check_output_dir(output_dir)
    launch_preflight.check_not_running(job.state_dir)
    console, errors = Console(sys.stdout), Console(sys.stderr)
    launch_preflight.warn_of_tensor_groups(loaded.config.parallel.tp, cluster, errors)
    hardware = loaded.config.hardware
    launch_preflight.check_kernels(hardware.target, hardware.kernels, console)
    from ms_zero.data.run import load_data

    load_data(loaded.config)  # data that cannot be used is refused here, in one line, not by every worker
    place = f" (node {cluster.node_rank} of {nodes})" if nodes > 1 else ""
    count = "1 worker" if cluster.local_workers == 1 else f"{cluster.local_workers} workers"
    console.line(f"ms-zero: starting {count}{place}, logs in {job.log_dir}")
    return run_job(job, console, errors)
