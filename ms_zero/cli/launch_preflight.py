"""Checks before anything is started: arguments, master address, port, directories, the Python to run."""

import errno
import importlib.util
import os
import queue
import socket
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from ms_zero.cli.launch_console import Console
from ms_zero.cli.launch_process import read_stat
from ms_zero.cli.launch_state import read_json
from ms_zero.errors import UserError

DEFAULT_PORT = 8118
_RESOLVE_TIMEOUT_S = 10.0
_WORKER_BYTES = 256 * 2**20  # what a worker takes before it has a model: mindspore and its threads


@dataclass(frozen=True)
class Cluster:
    """The whole job and this machine's part of it; ``master`` is an IP address."""

    workers: int
    nodes: int
    node_rank: int
    master: str
    port: int

    @property
    def local_workers(self) -> int:
        """Workers on this machine."""
        return self.workers // self.nodes

    @property
    def local_ranks(self) -> range:
        """Global ranks of the workers on this machine."""
        return range(self.node_rank * self.local_workers, (self.node_rank + 1) * self.local_workers)

    @property
    def has_scheduler(self) -> bool:
        """Whether the scheduler runs on this machine."""
        return self.node_rank == 0


def check_cluster(
    *, workers: int, nodes: int, node_rank: int | None, master: str | None, port: int | None
) -> Cluster:
    """Check the launch arguments against each other and against this machine; raises UserError.

    On one node the master defaults to the loopback address and the port to one that is free.
    """
    _check_counts(workers, nodes, node_rank, master)
    rank = 0 if node_rank is None else node_rank
    address = resolve(master or "127.0.0.1")
    if port is not None and not 1024 <= port <= 65535:
        raise UserError(f"--port {port} is out of range: choose one between 1024 and 65535")
    if rank == 0:
        port = _check_master_port(master, address, port, nodes)
    elif _is_own_address(address):
        raise UserError(
            f"--master {master} is an address of this machine, but --node-rank is {rank}: the master must be "
            "the machine with --node-rank 0"
        )
    return Cluster(workers, nodes, rank, address, port or DEFAULT_PORT)


def _check_counts(workers: int, nodes: int, node_rank: int | None, master: str | None) -> None:
    if workers < 1:
        raise UserError(f"--workers {workers}: at least 1 worker is needed")
    if nodes < 1:
        raise UserError(f"--nodes {nodes}: at least 1 node is needed")
    if workers % nodes:
        raise UserError(
            f"--workers {workers} is the total over all nodes and must be divisible by --nodes {nodes}: "
            "every node runs the same number"
        )
    if node_rank is not None and not 0 <= node_rank < nodes:
        raise UserError(f"--node-rank {node_rank} is out of range: with --nodes {nodes} use 0 to {nodes - 1}")
    if nodes > 1 and node_rank is None:
        raise UserError(f"--nodes {nodes} needs --node-rank: 0 on the master, 1 to {nodes - 1} on the others")
    if nodes > 1 and master is None:
        raise UserError(f"--nodes {nodes} needs --master: the address of the node with --node-rank 0")


def resolve(host: str, timeout_s: float = _RESOLVE_TIMEOUT_S) -> str:
    """Resolve a host name to an IP address; raises UserError when that fails or takes over ``timeout_s``."""
    answers: queue.Queue[str | OSError] = queue.Queue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            answers.put(error if isinstance(error, OSError) else OSError(str(error)))

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=timeout_s)
    except queue.Empty:
        raise UserError(
            f"--master {host} did not resolve within {timeout_s:g} s: check the name, or give an IP address"
        ) from None
    if isinstance(answer, OSError):
        reason = answer.strerror or str(answer)
        raise UserError(f"--master {host} does not resolve ({reason}): check the name, or give an IP address")
    return answer


def _check_master_port(master: str | None, address: str, port: int | None, nodes: int) -> int:
    """Bind the port once: proves that the address is local and the port free. 0 lets the system choose."""
    wanted = port if port is not None else (0 if nodes == 1 else DEFAULT_PORT)
    try:
        return _bind_once(address, wanted)
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            raise UserError(
                f"--master {master} ({address}) is not an address of this machine, which has --node-rank 0: "
                "start node 0 on the master, or correct --master"
            ) from None
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {wanted} on {address} is in use: choose another with --port") from None
        raise UserError(f"cannot listen on {address} port {wanted}: {error.strerror}") from None


def _bind_once(address: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((address, port))
        return int(probe.getsockname()[1])


def _is_own_address(address: str) -> bool:
    try:
        _bind_once(address, 0)
    except OSError:
        return False
    return True


def check_memory(local_workers: int) -> None:
    """Refuse more workers on this machine than could even start: it would be brought down."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fit = total // _WORKER_BYTES
    if local_workers > fit:
        raise UserError(
            f"--workers: {local_workers} here need more than the {total / 2**30:.0f} GiB of memory: "
            f"start at most {fit} here, or spread them over --nodes"
        )


def warn_of_tensor_groups(tp: int, cluster: Cluster, console: Console) -> None:
    """Say when tensor-parallel ranks, which are consecutive, are not all on one node."""
    if cluster.nodes > 1 and cluster.local_workers % tp:
        console.line(
            f"ms-zero: warning: parallel.tp {tp} does not divide the {cluster.local_workers} workers of a "
            f"node: some groups reach over two nodes and exchange activations in every layer over the network"
        )


def check_kernels(target: str, kernels: str, console: Console) -> None:
    """Build the CPU library now if the run needs it and it is not there, so that no worker has to.

    Raises UserError when it is needed and cannot be built.
    """
    if target == "CPU" and kernels == "native":
        from ms_zero import native

        native.ensure_built(announce=lambda message: console.line(f"ms-zero: {message}"))


def check_output_dir(output_dir: Path) -> None:
    """Create the output directory and write into it once; raises UserError when that fails."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise UserError(
            f"train.output_dir: cannot write to {output_dir} ({error.strerror}): choose another directory"
        ) from None


def check_not_running(state_dir: Path) -> None:
    """Refuse when another launcher of this machine works in the same directory."""
    record = read_json(state_dir / "launcher.json")
    if record is None or record["host"] != socket.gethostname() or record["pid"] == os.getpid():
        return
    stat = read_stat(record["pid"])
    if stat is not None and stat.alive and stat.start_ticks == record["start_ticks"]:
        raise UserError(
            f"another launch (pid {record['pid']}) is running in {state_dir.parent.parent}: wait for it, "
            "stop it, or choose another train.output_dir"
        )


def check_mindspore() -> None:
    """Refuse early when mindspore is not installed for this Python (it is not imported here)."""
    if importlib.util.find_spec("mindspore") is None:
        raise UserError(
            f"mindspore is not installed for {sys.executable}: run 'pip install mindspore==2.10.0'"
        )


def python_command() -> str:
    """Name under which msrun finds this very interpreter once its directory leads PATH.

    msrun runs nothing but ``python`` or ``python3`` as looked up in PATH.
    """
    directory = Path(sys.executable).parent
    for name in ("python", "python3"):
        candidate = directory / name
        if candidate.exists() and candidate.resolve() == Path(sys.executable).resolve():
            return name
    raise UserError(
        f"{directory} has no 'python' that is {sys.executable}: run ms-zero from a virtual environment"
    )
