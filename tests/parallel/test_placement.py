"""Boxes against numpy's slicing, and what follows from placements."""

import itertools

import numpy as np
import pytest

from ms_zero.comm import Group
from ms_zero.models.init import Normal, initial_values
from ms_zero.parallel import Box, Placement, Placements, Replicas, split_evenly


@pytest.mark.parametrize(("size", "parts"), [(7, 3), (8, 4), (3, 3), (257, 2), (100, 7)])
def test_parts_tile_and_differ_by_at_most_one(size, parts):
    ranges = [split_evenly(size, parts, index) for index in range(parts)]
    assert ranges[0][0] == 0 and ranges[-1][1] == size
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    lengths = {stop - start for start, stop in ranges}
    assert max(lengths) - min(lengths) <= 1


BOXES = [
    Box.whole((5,)),
    Box.whole((4, 6)),
    Box.whole((4, 6)).cut(0, 1, 3),
    Box.whole((4, 6)).cut(1, 2, 5),
    Box.whole((4, 6)).cut(0, 1, 4).cut(1, 0, 1),
    Box.whole((3, 4, 5)).cut(1, 1, 3),
    Box.whole((3, 4, 5)).cut(2, 1, 3).cut(0, 2, 3),
    Box.whole((2, 3, 4)).cut(1, 0, 2).cut(1, 1, 2),
    Box.whole(()),
]


@pytest.mark.parametrize("box", BOXES, ids=str)
def test_runs_are_the_elements_of_the_part_in_order(box):
    whole = np.arange(int(np.prod(box.global_shape)))
    expected = box.take(whole.reshape(box.global_shape)).reshape(-1)
    for start, stop in itertools.combinations(range(expected.size + 1), 2):
        runs = list(box.runs(start, stop))
        found = np.concatenate([whole[first : first + count] for first, count in runs])
        np.testing.assert_array_equal(found, expected[start:stop])
    assert list(box.runs(0, 0)) == []


def test_a_part_that_is_consecutive_is_one_run():
    assert list(Box.whole((4, 6)).cut(0, 1, 3).runs(2, 11)) == [(8, 9)]
    assert list(Box.whole((4, 6)).cut(1, 0, 3).runs(1, 5)) == [(1, 2), (6, 2)]


def test_a_box_stays_within_the_tensor():
    for offset, shape in (((3, 0), (2, 6)), ((-1, 0), (2, 6)), ((0,), (2, 6))):
        with pytest.raises(AssertionError):
            Box((4, 6), offset, shape)


def test_local_initial_values_are_those_of_the_whole():
    box = Box.whole((6, 8)).cut(1, 3, 7)

    def values(name, start, stop):
        return initial_values(Normal(0.1), name, (6, 8), 7, start, stop)

    local = Placements({"w": Placement(box)}).local_values(values)
    whole = values("w", 0, 48).reshape(6, 8)
    np.testing.assert_array_equal(local("w", 0, 24), whole[:, 3:7].reshape(-1))
    np.testing.assert_array_equal(local("w", 5, 13), whole[:, 3:7].reshape(-1)[5:13])
    np.testing.assert_array_equal(local("other", 2, 9), values("other", 2, 9))


def test_the_first_of_all_replicas_counts():
    first, second = Group("a", (0, 1), 0), Group("b", (0, 2), 1)
    whole = Box.whole((2,))
    assert Placement(whole).is_first
    assert Placement(whole, (Replicas(first, is_partial=True),)).is_first
    both = Replicas(first, is_partial=True), Replicas(second, is_partial=False)
    assert not Placement(whole, both).is_first
    placements = Placements({"norm": Placement(whole, (Replicas(second, is_partial=False),))})
    assert placements.replicas("norm")[0].group is second and placements.replicas("other") == ()
    assert placements.box("other", (3, 4)) == Box.whole((3, 4))
    with pytest.raises(AssertionError):
        placements.box("norm", (3,))
