"""Communication between workers: groups, collectives, gradients, traffic counters."""

from ms_zero.comm.communicator import Communicator
from ms_zero.comm.connect import connect_store, local
from ms_zero.comm.counters import Counters
from ms_zero.comm.group import Group
from ms_zero.comm.handle import Handle

__all__ = ["Communicator", "Counters", "Group", "Handle", "connect_store", "local"]
