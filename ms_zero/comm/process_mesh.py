"""The mesh as one process sees it: its rank, its communicator and the groups it belongs to."""

from __future__ import annotations

from ms_zero.comm.communicator import Communicator
from ms_zero.comm.group import Group
from ms_zero.errors import UserError
from ms_zero.mesh import AXES, Mesh

#: Sets of axes that get a group, in creation order.
SPANS: tuple[tuple[str, ...], ...] = (
    *((axis,) for axis in AXES),
    ("dp_replicate", "dp_shard"),
    ("dp_shard", "cp"),
    ("dp_replicate", "dp_shard", "cp"),
    ("edp",),
    ("ep",),
    ("dp_replicate", "edp"),
)


class ProcessMesh:
    """Creates this process' groups: all at once, in the order of `SPANS`, by their members only.

    Every process of the job must create its ProcessMesh at the same point. Spans with the same members share
    one framework group but keep their own names in the traffic counters.
    """

    def __init__(self, mesh: Mesh, comm: Communicator) -> None:
        """Raises UserError when the mesh does not have as many ranks as the job has workers."""
        if mesh.world_size != comm.world_size:
            raise UserError(
                f"the mesh has {mesh.describe()}, but the job has {comm.world_size} worker(s): "
                "change the parallel degrees or the number of workers"
            )
        self.mesh = mesh
        self.comm = comm
        self.rank = comm.rank
        self._groups = {
            axes: comm.new_group(mesh.members(comm.rank, axes), "+".join(axes)) for axes in SPANS
        }
        self._groups[AXES] = comm.world

    def group(self, *axes: str) -> Group:
        """The group of this process that spans `axes`, for instance ``group("tp")``; all five: the world.

        Raises UserError for a combination outside `SPANS`.
        """
        wanted = frozenset(axes)
        for span, group in self._groups.items():
            if wanted == frozenset(span):
                return group
        known = ", ".join("+".join(span) for span in self._groups)
        raise UserError(f"no group spans {'+'.join(axes)}; expected one of {known}")
