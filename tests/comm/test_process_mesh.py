import numpy as np
import pytest
from mindspore import Tensor

from ms_zero.comm import Communicator, ProcessMesh, local
from ms_zero.comm.backend import SingleBackend
from ms_zero.comm.process_mesh import SPANS
from ms_zero.errors import UserError
from ms_zero.mesh import AXES, Mesh
from ms_zero.testing import run_workers


class NamingBackend(SingleBackend):
    """Records which groups are created."""

    def __init__(self):
        self.created = []

    def world_handle(self):
        return "world"

    def create_group(self, ranks):
        self.created.append(tuple(ranks))
        return "g" + "_".join(map(str, ranks))


def process_mesh(mesh, rank):
    backend = NamingBackend()
    return ProcessMesh(mesh, Communicator(backend, rank, mesh.world_size)), backend


MESH = Mesh(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2, ep=2)


@pytest.mark.parametrize("rank", [0, 13, 31])
def test_groups_are_the_mesh_groups_of_this_rank(rank):
    pmesh, _ = process_mesh(MESH, rank)
    for axes in SPANS:
        group = pmesh.group(*axes)
        assert group.ranks == MESH.members(rank, axes)
        assert group.ranks[group.index] == rank
        assert group.name == "+".join(axes)
    assert pmesh.group(*AXES) == pmesh.comm.world
    assert pmesh.group("cp", "dp_shard", "dp_replicate") is pmesh.group("dp_replicate", "dp_shard", "cp")


def test_every_member_creates_the_group_and_nobody_else_in_one_order():
    created = {rank: process_mesh(MESH, rank)[1].created for rank in range(MESH.world_size)}
    for rank, groups in created.items():
        assert all(rank in group for group in groups)
        for group in groups:
            assert all(group in created[member] for member in group)
    for first in range(MESH.world_size):  # two ranks that share groups create them in the same order
        for second in range(first):
            shared = [g for g in created[first] if second in g]
            assert shared == [g for g in created[second] if first in g]


def test_spans_with_the_same_members_share_one_framework_group():
    pmesh, backend = process_mesh(Mesh(dp_shard=4), 1)
    assert backend.created == [], "dp_shard spans the world, all other groups have one member"
    assert pmesh.group("dp_shard").handle == pmesh.comm.world.handle == "world"
    assert pmesh.group("dp_shard").name == "dp_shard"
    assert pmesh.group("tp").size == 1


def test_an_unknown_span_names_the_known_ones():
    pmesh, _ = process_mesh(Mesh(dp_shard=2, tp=2), 0)
    with pytest.raises(UserError, match=r"no group spans tp\+pp; expected one of pp, dp_replicate"):
        pmesh.group("tp", "pp")


def test_a_mesh_of_another_size_is_refused():
    with pytest.raises(UserError, match=r"2 ranks: tp 2, but the job has 1 worker"):
        ProcessMesh(Mesh(tp=2), local())


def worker(comm):
    """Rows and columns of a 2 x 2 mesh and the whole, in turn."""
    pmesh = ProcessMesh(Mesh(dp_shard=2, tp=2), comm)
    x = Tensor(np.array([10.0**comm.rank], np.float32))
    spans = (("tp",), ("dp_shard",), ("dp_replicate", "dp_shard", "cp"), AXES)
    sums = [float(comm.all_reduce(x, pmesh.group(*axes)).asnumpy()[0]) for axes in spans]
    return [*sums, comm.counters.total_bytes(group="tp")]


def test_collectives_run_on_mesh_groups():
    assert run_workers(4, worker) == [
        [11, 101, 101, 1111, 4],
        [11, 1010, 1010, 1111, 4],
        [1100, 101, 101, 1111, 4],
        [1100, 1010, 1010, 1111, 4],
    ]
