"""A job for msrun: its command line, its environment and where its files are."""

import os
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import ms_zero
from ms_zero.cli import launch_state
from ms_zero.cli.affinity import LOCAL_WORKERS_VARIABLE
from ms_zero.cli.launch_preflight import Cluster, python_command

MSRUN = (sys.executable, "-m", "mindspore.parallel.cluster.run")
# Variables of an enclosing job or shell that would contradict what msrun sets.
_FOREIGN = (
    "MS_ROLE", "MS_NODE_ID", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT", "MS_TOPO_TIMEOUT",
    "RANK_ID", "RANK_SIZE", "DEVICE_ID", "MS_SIMULATION_LEVEL",
    "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """What to run where. ``command`` is the worker's command line after msrun's ``python``.

    ``cluster_timeout_s`` bounds how long workers wait for each other at the start; they are killed
    ``startup_slack_s`` later if they have not given up by then.
    """

    command: Sequence[str]
    cluster: Cluster
    log_dir: Path
    cluster_timeout_s: int = 300
    startup_slack_s: float = 30.0
    spawner: Sequence[str] = MSRUN

    @property
    def state_dir(self) -> Path:
        """Where the workers of this node report."""
        return self.log_dir / f"state-node{self.cluster.node_rank}"

    @property
    def msrun_log(self) -> Path:
        """What msrun itself prints."""
        rank = self.cluster.node_rank
        return self.log_dir / ("msrun.log" if self.cluster.has_scheduler else f"msrun_node{rank}.log")

    def worker_log(self, rank: int) -> Path:
        """What worker ``rank`` prints."""
        return self.log_dir / f"worker_{rank}.log"


def msrun_arguments(job: Job) -> list[str]:
    """The complete command line of msrun for this node."""
    cluster = job.cluster
    return [
        *job.spawner,
        f"--worker_num={cluster.workers}",
        f"--local_worker_num={cluster.local_workers}",
        f"--node_rank={cluster.node_rank}",
        f"--master_addr={cluster.master}",
        f"--master_port={cluster.port}",
        f"--cluster_time_out={job.cluster_timeout_s}",
        f"--log_dir={job.log_dir}",
        "--join=True",
        f"--tail_worker_log={cluster.workers}",  # no such rank: msrun tails nothing, the launcher follows
        python_command(),
        *job.command,
    ]


def job_environment(
    base: Mapping[str, str], *, cores: int, local_workers: int, state_dir: Path, launch_id: str
) -> dict[str, str]:
    """The environment of msrun and the workers; what the user has set for MindSpore or OpenMP is kept.

    Workers share the cores and wait without spinning. Op time-outs are long, because a peer may compile or
    save for minutes; a dead worker is noticed by its launcher and, on other nodes, by the scheduler.
    """
    environment = {key: value for key, value in base.items() if key not in _FOREIGN}
    defaults = {
        "GLOG_v": "3",
        "OMP_NUM_THREADS": str(max(1, cores // local_workers)),
        "OMP_WAIT_POLICY": "passive",
        "MS_RETRY_INTERVAL_LOWER": "0",
        "MS_RETRY_INTERVAL_UPPER": "1",
        "MS_NODE_TIMEOUT": "10",  # how soon the scheduler notices that a worker of another node is gone
        "MS_CPU_COMM_OP_TIMEOUT": "600",
    }
    environment = {**defaults, **environment}
    environment["PYTHONUNBUFFERED"] = "1"
    search = [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
    environment["PATH"] = os.pathsep.join(search)
    source = str(Path(ms_zero.__file__).resolve().parent.parent)
    if source not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        paths = [source, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    environment[LOCAL_WORKERS_VARIABLE] = str(local_workers)
    environment[launch_state.STATE_DIR_VARIABLE] = str(state_dir.resolve())
    environment[launch_state.LAUNCH_ID_VARIABLE] = launch_id
    return environment


def usable_cores() -> int:
    """Cores that this process may use: its affinity, bounded by the control group's quota."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
