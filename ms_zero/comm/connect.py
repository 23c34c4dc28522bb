"""How a process gets its communicator. The only part of the package that reads the environment."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import mindspore
from mindspore import communication

from ms_zero import _compat
from ms_zero.comm.backend import Backend, SingleBackend
from ms_zero.comm.communicator import Communicator
from ms_zero.comm.hccl import HCCLBackend
from ms_zero.comm.mccl import MCCLBackend
from ms_zero.comm.nccl import NCCLBackend
from ms_zero.errors import UserError

_BACKENDS: dict[str, Callable[[], Backend]] = {"CPU": MCCLBackend, "Ascend": HCCLBackend, "GPU": NCCLBackend}

#: What msrun tells its workers.
_MSRUN_VARIABLES = ("MS_ROLE", "MS_WORKER_NUM", "MS_SCHED_HOST", "MS_SCHED_PORT")


def local(target: str = "CPU") -> Communicator:
    """A communicator for a job of one process on a device target; see :func:`connect` about CPU.

    Call it before the first operation, too.
    """
    _check_target(target)
    _prepare_device(target)
    return Communicator(SingleBackend(), 0, 1)


def is_worker() -> bool:
    """Whether msrun or ``ms-zero launch`` started this process."""
    return all(name in os.environ for name in _MSRUN_VARIABLES)


def _check_target(target: str) -> None:
    if target not in _BACKENDS:
        raise UserError(f"device target {target!r} is unknown; expected one of {', '.join(_BACKENDS)}")


def _prepare_device(target: str) -> None:
    if target == "CPU":
        _compat.launch_blocking()
        if len(os.sched_getaffinity(0)) == 1:
            _compat.run_without_pool()
        return
    try:
        mindspore.set_device(target)
    except RuntimeError as error:
        raise UserError(
            f"hardware.target={target}: MindSpore finds no such device here; "
            f"`ms-zero doctor --target {target}` tells what is missing"
        ) from error


def connect(target: str) -> Communicator:
    """Join the job that ``ms-zero launch`` or msrun started this worker for. Call it once, first of all.

    `target` is "CPU" (mccl), "Ascend" (hccl) or "GPU" (nccl). On CPU, operations become blocking, see
    `ms_zero._compat.launch_blocking`, unless one has run before: training is right then too, but much slower.
    In the scheduler process this call does not return.
    Raises UserError for an unknown target, outside msrun, or when the workers cannot be joined.
    """
    _check_target(target)
    missing = [name for name in _MSRUN_VARIABLES if name not in os.environ]
    if missing:
        raise UserError(
            f"this process is not a worker of a distributed job ({', '.join(missing)} not set); "
            "start it with `ms-zero launch RUN.yaml --workers N` or msrun"
        )
    _prepare_device(target)
    communication.init()
    rank, world_size = communication.get_rank(), communication.get_group_size()
    if target == "CPU":
        _compat.fix_world_group_cache(rank, world_size)
    return Communicator(_BACKENDS[target](), rank, world_size)


def own_address() -> str:
    """The address under which the other workers of the job reach this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MS_SCHED_HOST", "127.0.0.1"), 9))  # chooses a route, sends nothing
        return probe.getsockname()[0]


def connect_store(rank: int, world_size: int, port: int, timeout_s: float = 60.0) -> Communicator:
    """Join the CPU workers of this machine without a scheduler (tests). Rank 0 serves on `port`."""
    _prepare_device("CPU")
    if world_size == 1:
        return local()
    _compat.init_with_store(rank, world_size, port, timeout_s)
    comm = Communicator(MCCLBackend(), rank, world_size)
    comm.barrier()
    return comm
