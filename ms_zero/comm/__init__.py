"""Communication between workers: groups, collectives, gradients, traffic counters."""

from ms_zero.comm.communicator import Communicator
from ms_zero.comm.connect import connect, connect_store, is_worker, local, own_address
from ms_zero.comm.counters import Counters
from ms_zero.comm.debug import CollectiveError, checked
from ms_zero.comm.group import Group
from ms_zero.comm.handle import Handle
from ms_zero.comm.process_mesh import ProcessMesh

__all__ = [
    "CollectiveError",
    "Communicator",
    "Counters",
    "Group",
    "Handle",
    "ProcessMesh",
    "checked",
    "connect",
    "connect_store",
    "is_worker",
    "local",
    "own_address",
]
