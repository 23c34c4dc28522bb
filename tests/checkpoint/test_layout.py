"""Shard geometry: flat ranges as boxes, coverage, and copying between layouts."""

from itertools import pairwise
from math import prod

import numpy as np
import pytest

from ms_zero.checkpoint.layout import Shard, check_coverage, intersections, pieces
from ms_zero.errors import UserError


def covered_by(shard):
    """Global flat indices of a shard in its own order, by brute force."""
    index = np.arange(prod(shard.global_shape)).reshape(shard.global_shape)
    box = index[tuple(slice(at, at + n) for at, n in zip(shard.offset, shard.shape))]
    return box.reshape(-1)[shard.flat_start : shard.flat_stop]


def random_shard(rng, global_shape):
    offset = [int(rng.integers(0, n + 1)) for n in global_shape]
    shape = [int(rng.integers(0, n - at + 1)) for n, at in zip(global_shape, offset)]
    start, stop = sorted(int(n) for n in rng.integers(0, prod(shape) + 1, 2))
    return Shard("t", global_shape, "float32", offset, shape, start, stop)


def test_pieces_are_few_boxes_in_element_order():
    rng = np.random.default_rng(0)
    for _ in range(300):
        global_shape = tuple(int(n) for n in rng.integers(1, 6, rng.integers(0, 5)))
        shard = random_shard(rng, global_shape)
        index = np.arange(prod(global_shape)).reshape(global_shape)
        found = pieces(shard)
        order = [
            index[tuple(slice(at, at + n) for at, n in zip(piece.offset, piece.shape))].reshape(-1)
            for piece in found
        ]
        assert np.array_equal(np.concatenate([*order, np.zeros(0, int)]), covered_by(shard))
        assert len(found) <= max(1, 2 * len(global_shape) - 1)
        assert [piece.start for piece in found] == [sum(map(len, order[:i])) for i in range(len(found))]


def test_intersections_copy_exactly_the_common_elements():
    rng = np.random.default_rng(1)
    for _ in range(300):
        global_shape = tuple(int(n) for n in rng.integers(1, 6, rng.integers(0, 5)))
        target, source = random_shard(rng, global_shape), random_shard(rng, global_shape)
        held, values = np.full(target.size, -1), covered_by(source)
        copied = sum(box.copy(held, values) for box in intersections(target, source))
        wanted = covered_by(target)
        common = np.isin(wanted, values)
        assert copied == common.sum()
        assert np.array_equal(held, np.where(common, wanted, -1))


@pytest.mark.parametrize(
    ("offset", "shape", "start", "stop", "message"),
    [
        ((0, 3), (4, 3), 0, 12, "outside the tensor"),
        ((-1, 0), (4, 3), 0, 12, "outside the tensor"),
        ((0,), (4,), 0, 4, "outside the tensor"),
        ((0, 0), (4, 5), 0, 21, "outside its box"),
        ((0, 0), (4, 5), 7, 3, "outside its box"),
    ],
)
def test_impossible_shards_are_refused(offset, shape, start, stop, message):
    with pytest.raises(UserError, match=f"^w: .*{message}"):
        Shard("w", (4, 5), "float32", offset, shape, start, stop)


def test_shapes_of_numpy_integers_become_plain():
    shard = Shard.whole("w", np.array([4, 5]), "float32")
    assert all(type(n) is int for n in (*shard.shape, *shard.global_shape, shard.flat_stop))
    assert shard.array_shape == (4, 5)
    assert Shard.flat("w", (4, 5), "float32", 3, 9).array_shape == (6,)
    assert Shard.whole("s", (), "float32").array_shape == ()


def check(*shards):
    check_coverage(shards, [f"rank {i}" for i in range(len(shards))])


def test_every_single_change_to_a_tiling_is_noticed():
    """Move either end of any shard of a random tiling by one element: a hole or an overlap."""
    rng = np.random.default_rng(2)
    for _ in range(30):
        total = 5 * 4 * 3
        cuts = [0, *sorted({int(n) for n in rng.integers(1, total, 6)}), total]
        tiling = [Shard.flat("w", (5, 4, 3), "float32", a, b) for a, b in pairwise(cuts)]
        check(*tiling)
        for i, (a, b) in enumerate(pairwise(cuts)):
            for start, stop in ((a + 1, b), (a, b - 1), (a - 1, b), (a, b + 1)):
                if 0 <= start <= stop <= total:
                    changed = Shard.flat("w", (5, 4, 3), "float32", start, stop)
                    with pytest.raises(UserError, match=r"held by no rank|both hold the element"):
                        check(*tiling[:i], changed, *tiling[i + 1 :])


def test_overlap_names_both_ranks_and_the_element():
    left = Shard("w", (4, 6), "float32", (0, 0), (4, 4), 0, 16)
    right = Shard("w", (4, 6), "float32", (2, 3), (2, 3), 0, 6)
    with pytest.raises(UserError, match=r"^w: rank 0 and rank 1 both hold the element at \(2, 3\)"):
        check(left, right)


def test_overlap_that_leaves_the_sum_right_is_still_refused():
    once = Shard.flat("w", (4,), "float32", 0, 2)
    with pytest.raises(UserError, match="both hold"):
        check(once, once)
    with pytest.raises(UserError, match="both hold"):
        check(Shard.whole("s", (), "float32"), Shard.whole("s", (), "float32"))


def test_ranks_that_describe_different_tensors_are_refused():
    with pytest.raises(UserError, match=r"w: rank 0 calls it float32\[4\], rank 1 float32\[5\]"):
        check(Shard.flat("w", (4,), "float32", 0, 4), Shard.flat("w", (5,), "float32", 4, 5))
    with pytest.raises(UserError, match="bfloat16"):
        check(Shard.flat("w", (4,), "float32", 0, 2), Shard.flat("w", (4,), "bfloat16", 2, 4))


def test_column_cuts_of_many_ranks_are_checked_by_neighbours():
    """A thousand column shards: comparing all pairs would be half a million boxes."""
    shards = [Shard("w", (3, 1000), "float32", (0, i), (3, 1), 0, 3) for i in range(1000)]
    check(*shards)
    with pytest.raises(UserError, match="3 of 3000 elements"):
        check(*shards[:500], *shards[501:])


def test_empty_tensors_and_empty_shards_are_covered():
    check(Shard.whole("e", (0, 3), "float32"))
    check(Shard.whole("w", (2,), "float32"), Shard.flat("w", (2,), "float32", 1, 1))
