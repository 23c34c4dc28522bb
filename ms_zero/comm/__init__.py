"""Communication between workers: groups, collectives, gradients, traffic counters."""

from ms_zero.comm.communicator import Communicator
from ms_zero.comm.connect import connect, connect_store, local
from ms_zero.comm.counters import Counters
from ms_zero.comm.group import Group
from ms_zero.comm.handle import Handle
from ms_zero.comm.process_mesh import ProcessMesh

__all__ = [
    "Communicator",
    "Counters",
    "Group",
    "Handle",
    "ProcessMesh",
    "connect",
    "connect_store",
    "local",
]
