"""How a process gets its communicator."""

from __future__ import annotations

import os

import mindspore.communication

from ms_zero import _compat
from ms_zero.comm.backend import Backend, SingleBackend
from ms_zero.comm.communicator import Communicator
from ms_zero.comm.mccl import MCCLBackend
from ms_zero.errors import UserError


def local() -> Communicator:
    """A communicator for a job of one process; nothing is initialised."""
    return Communicator(SingleBackend(), 0, 1)


def connect_store(rank: int, world_size: int, port: int, timeout_s: float = 60.0) -> Communicator:
    """Join the CPU workers of this machine without a scheduler (tests). Rank 0 serves on `port`."""
    _compat.launch_blocking()
    if world_size == 1:
        return local()
    _compat.init_with_store(rank, world_size, port, timeout_s)
    comm = Communicator(MCCLBackend(), rank, world_size)
    comm.barrier()
    return comm
