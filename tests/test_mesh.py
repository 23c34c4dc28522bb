from itertools import combinations, product

import pytest

from ms_zero.errors import UserError
from ms_zero.mesh import AXES, EXPERT_AXES, Mesh

EXPERT_VIEW = ("pp", "dp_replicate", "edp", "ep", "tp")

MESHES = [
    Mesh(),
    Mesh(tp=2),
    Mesh(pp=2, dp_replicate=3, dp_shard=2, cp=2, tp=3, ep=4),
    Mesh(dp_shard=3, cp=2, tp=2, ep=3),
    Mesh(dp_shard=2, cp=4, ep=2),
    Mesh(pp=3, dp_shard=4, cp=3, ep=12),
]


def axis_subsets(view):
    return [axes for count in range(len(view) + 1) for axes in combinations(view, count)]


def test_rank_order_is_the_published_one():
    mesh = Mesh(pp=4, dp_shard=2, tp=2)
    assert list(mesh.groups(("dp_shard",)))[:4] == [(0, 2), (1, 3), (4, 6), (5, 7)]
    assert list(mesh.groups(("pp",))) == [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15)]
    assert list(mesh.groups(("tp",))) == [(rank, rank + 1) for rank in range(0, 16, 2)]


def test_expert_groups_are_runs_of_the_dp_shard_cp_fold():
    mesh = Mesh(dp_replicate=2, dp_shard=4, cp=2, ep=4)
    assert list(mesh.groups(("ep",))) == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15)]
    assert mesh.members(1, ("edp",)) == (1, 5)
    assert mesh.members(1, ("dp_replicate", "edp")) == (1, 5, 9, 13)


def test_expert_groups_skip_tensor_parallel_neighbours():
    assert list(Mesh(dp_shard=3, cp=2, tp=2, ep=3).groups(("ep",))) == [
        (0, 2, 4),
        (1, 3, 5),
        (6, 8, 10),
        (7, 9, 11),
    ]


@pytest.mark.parametrize("mesh", MESHES, ids=Mesh.describe)
def test_coordinates_count_up_with_the_last_axis_fastest(mesh):
    everything = product(*(range(mesh.degree(axis)) for axis in AXES))
    for rank, values in enumerate(everything):
        coords = dict(zip(AXES, values, strict=True))
        assert mesh.coords(rank) == coords
        assert list(mesh.coords(rank)) == list(AXES)
        assert mesh.rank_of(**coords) == rank
    assert rank == mesh.world_size - 1


@pytest.mark.parametrize("view", [AXES, EXPERT_VIEW], ids=["axes", "expert"])
@pytest.mark.parametrize("mesh", MESHES, ids=Mesh.describe)
def test_groups_equal_brute_force_for_every_axis_subset(mesh, view):
    coordinates = list(product(*(range(mesh.degree(axis)) for axis in view)))
    for axes in axis_subsets(view):
        fixed = [index for index, axis in enumerate(view) if axis not in axes]
        expected = {}
        for rank, values in enumerate(coordinates):
            expected.setdefault(tuple(values[index] for index in fixed), []).append(rank)
        groups = list(mesh.groups(axes))
        assert groups == [tuple(ranks) for ranks in expected.values()]
        for group in groups:
            for index, rank in enumerate(group):
                assert mesh.members(rank, axes) == group
                assert mesh.index_in(rank, axes) == index


@pytest.mark.parametrize("mesh", MESHES, ids=Mesh.describe)
def test_every_axis_subset_partitions_the_world(mesh):
    for axes in axis_subsets(AXES) + axis_subsets(EXPERT_VIEW):
        ranks = [rank for group in mesh.groups(axes) for rank in group]
        assert sorted(ranks) == list(range(mesh.world_size))


def test_order_of_the_axes_asked_for_does_not_matter():
    mesh = MESHES[2]
    assert mesh.members(17, ("tp", "pp")) == mesh.members(17, ("pp", "tp"))
    assert mesh.index_in(17, ["tp", "pp"]) == mesh.index_in(17, ("pp", "tp"))


def test_dp_rank_counts_replicas_slowest_and_ignores_model_parallel_axes():
    mesh = MESHES[2]
    for rank in range(mesh.world_size):
        coords = mesh.coords(rank)
        assert mesh.dp_rank(rank) == coords["dp_replicate"] * mesh.dp_shard + coords["dp_shard"]
    assert {mesh.dp_rank(rank) for rank in range(mesh.world_size)} == set(range(mesh.dp))


def test_expert_degrees():
    mesh = Mesh(dp_replicate=5, dp_shard=4, cp=3, ep=6)
    assert (mesh.ep, mesh.edp, mesh.degree("ep"), mesh.degree("edp")) == (6, 2, 6, 2)
    assert (mesh.world_size, mesh.dp) == (60, 20)


def test_a_large_world_answers_without_enumerating_it(monkeypatch):
    mesh = Mesh(pp=25, dp_replicate=10, dp_shard=50, tp=8, ep=10)
    assert mesh.world_size == 100_000
    steps = 0

    def counting_product(*ranges):
        nonlocal steps
        for item in product(*ranges):
            steps += 1
            yield item

    monkeypatch.setattr("ms_zero.mesh.product", counting_product)
    rank = 98_765
    for axes in (("tp",), ("pp",), ("dp_replicate", "dp_shard"), ("ep",), ("edp",)):
        assert mesh.members(rank, axes)[mesh.index_in(rank, axes)] == rank
    assert steps == 8 + 25 + 500 + 10 + 5
    first = next(mesh.groups(("tp",)))
    assert first == tuple(range(8)) and steps == 548 + 1 + 8


def test_beyond_any_real_world():
    mesh = Mesh(pp=10**6, dp_shard=10**6, tp=8)
    rank = mesh.rank_of(pp=999_999, dp_shard=999_999, tp=7)
    assert rank == mesh.world_size - 1
    assert mesh.members(rank, ("tp",)) == tuple(range(rank - 7, rank + 1))


@pytest.mark.parametrize("degree", [0, -1, 1.0, "2", True, None])
@pytest.mark.parametrize("axis", [*AXES, "ep"])
def test_degrees_must_be_positive_integers(axis, degree):
    with pytest.raises(UserError, match=rf"{axis}={degree!r}: expected an integer of at least 1"):
        Mesh(**{axis: degree})


def test_ep_must_divide_its_fold():
    with pytest.raises(UserError, match=r"ep=4 does not divide dp_shard x cp = 3 x 2 = 6"):
        Mesh(dp_shard=3, cp=2, tp=4, ep=4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mesh: mesh.coords(16), r"rank 16 is outside the mesh \(16 ranks: pp 4 x dp_shard 2 x tp 2\)"),
        (lambda mesh: mesh.members(-1, ("tp",)), "rank -1"),
        (lambda mesh: mesh.index_in(16, ("tp",)), "rank 16"),
        (lambda mesh: mesh.members(0, ("dp",)), "unknown mesh axis 'dp': expected one of pp"),
        (lambda mesh: mesh.members(0, "tp"), "expected a tuple"),
        (lambda mesh: mesh.members(0, ("tp", "tp")), "twice"),
        (lambda mesh: mesh.members(0, ("ep", "cp")), "cp cannot be combined with ep"),
        (lambda mesh: list(mesh.groups(("edp", "dp_shard"))), "dp_shard cannot be combined"),
        (lambda mesh: mesh.degree("world"), "unknown mesh axis 'world'"),
        (lambda mesh: mesh.rank_of(pp=4, dp_shard=0, tp=0), "pp=4 is outside 0 to 3"),
        (lambda mesh: mesh.rank_of(pp=0, tp=0), "dp_shard is missing"),
        (lambda mesh: mesh.rank_of(pp=0, dp_shard=0, tp=0, cp=1), "cp=1 is outside 0 to 0"),
        (lambda mesh: mesh.rank_of(ep=0), "unknown mesh axis 'ep'"),
    ],
)
def test_wrong_questions_are_refused(call, message):
    with pytest.raises(UserError, match=message):
        call(Mesh(pp=4, dp_shard=2, tp=2))


def test_describe_names_what_is_parallel():
    assert Mesh().describe() == "1 rank"
    assert Mesh(pp=4, dp_shard=2, tp=2, ep=2).describe() == (
        "16 ranks: pp 4 x dp_shard 2 x tp 2 (ep 2 in dp_shard x cp)"
    )


def test_the_expert_axes_cover_the_fold():
    mesh = MESHES[2]
    for rank in range(mesh.world_size):
        assert mesh.members(rank, EXPERT_AXES) == mesh.members(rank, ("dp_shard", "cp"))
