"""Sharing out blocks to stages; without mindspore."""

import random
from itertools import combinations_with_replacement

import pytest

from ms_zero.errors import UserError
from ms_zero.pipeline.balance import balance, even_split, explicit, stage_of


def loads(costs, ranges, first, last):
    sums = [sum(costs[block] for block in blocks) for blocks in ranges]
    sums[0] += first
    sums[-1] += last
    return sums


def every_split(num_blocks, num_stages):
    for ends in combinations_with_replacement(range(num_blocks + 1), num_stages - 1):
        yield [range(a, b) for a, b in zip((0, *ends), (*ends, num_blocks), strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_balance_is_the_best_of_all_splits(seed):
    rng = random.Random(seed)
    num_blocks, num_stages = rng.randint(1, 8), rng.randint(1, 4)
    costs = [rng.randint(0, 8) for _ in range(num_blocks)]
    first, last = rng.randint(0, 12), rng.randint(0, 12)
    found = balance(costs, num_stages, first=first, last=last)
    assert [block for blocks in found for block in blocks] == list(range(num_blocks))
    everything = [loads(costs, ranges, first, last) for ranges in every_split(num_blocks, num_stages)]
    best = min((max(sums), sum(x * x for x in sums)) for sums in everything)
    sums = loads(costs, found, first, last)
    assert (max(sums), sum(x * x for x in sums)) == best


def test_equal_blocks_are_shared_out_evenly():
    assert [len(blocks) for blocks in balance([1] * 12, 4)] == [3, 3, 3, 3]
    assert [len(blocks) for blocks in balance([1] * 12, 4, first=2, last=2)] == [2, 4, 4, 2]
    assert sorted(len(blocks) for blocks in balance([1.0] * 2, 3)) == [0, 1, 1]


def test_a_list_of_blocks_has_to_add_up():
    assert explicit([2, 0, 3], 5, 3) == (range(2), range(2, 2), range(2, 5))
    assert [stage_of(block, explicit([2, 0, 3], 5, 3)) for block in range(5)] == [0, 0, 2, 2, 2]
    for counts in ([2, 2], [1, 1, 1], [6, 0, -1]):
        with pytest.raises(UserError, match="3 numbers of at least 0 that add up to the 5 blocks"):
            explicit(counts, 5, 3)
    for wrong in ([-1.0], [float("nan")]):
        with pytest.raises(UserError, match="costs of at least 0"):
            balance(wrong, 2)


def test_layers_are_split_evenly_and_the_ends_get_no_rest():
    assert even_split(6, 4) == (1, 2, 2, 1)
    assert even_split(8, 4) == (2, 2, 2, 2)
    with pytest.raises(UserError, match="4 chunks for 3 layers"):
        even_split(3, 4)
