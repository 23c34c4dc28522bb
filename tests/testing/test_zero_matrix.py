"""The ZeRO matrix: that it holds what it claims, and that its quick part passes."""

import math
from itertools import pairwise, product
from pathlib import Path

import pytest

from ms_zero.testing.covering import allowed_pairs, covering_rows, pairs_of
from ms_zero.testing.parity import Plan, bitwise_difference, bitwise_groups, run_cases, scale_histories
from ms_zero.testing.zero_matrix import (
    AXES,
    PRODUCT,
    allows,
    group_of,
    partner_of,
    product_rows,
    with_partners,
    zero_cases,
)

NOWHERE = Path("unused")


def test_the_product_is_full():
    points = {tuple(row[axis] for axis in PRODUCT) for row in product_rows()}
    assert points == set(product(*PRODUCT.values())) and len(points) == 96


def test_stages_are_compared_with_both_ways_to_reduce():
    for world, precision in product((2, 3, 4), PRODUCT["precision"]):
        point = {"world": world, "precision": precision, "accumulation": 3}
        rows = [row for row in product_rows() if point.items() <= row.items()]
        groups = {}
        for row in rows:
            groups.setdefault(group_of(row), set()).add(row["stage"])
        assert list(groups.values()) == [{0, 1, 2, 3}] * 2


def test_every_pair_that_may_occur_does():
    rows = covering_rows(AXES, allows)
    wanted = set(allowed_pairs(AXES, allows))
    assert set().union(*map(pairs_of, rows)) == wanted
    assert all(map(allows, rows))
    # What the rules leave out is only what has no effect, or no meaning.
    left_out = {
        frozenset(((first, left), (second, right)))
        for number, first in enumerate(AXES)
        for second in list(AXES)[number + 1 :]
        for left, right in product(AXES[first], AXES[second])
    } - wanted
    for pair in left_out:
        row = dict(pair)
        stage_3 = {"reshard": False, "prefetch": 2, "wrap": "size", "weights": "host"}
        outside = row.get("stage") in (0, 1, 2) and row.items() & stage_3.items()
        inside = row.get("bucket_mb") == 0.01 and (row.get("stage") == 3 or row.items() & stage_3.items())
        uneven = row.get("replicas") == 2 and row.get("world") in (1, 3)
        assert outside or inside or uneven, row


def test_each_row_has_a_partner_of_another_layout_with_the_same_bits():
    rows = covering_rows(AXES, allows)
    for row in rows:
        partner = partner_of(row)
        assert partner != row and group_of(partner) == group_of(row)
    groups = [group_of(row) for row in with_partners(rows)]
    assert all(groups.count(group) >= 2 for group in groups)


def test_the_matrix_has_its_size_and_every_case_is_a_valid_configuration():
    cases = zero_cases(quick=False, scratch=NOWHERE)
    assert len(cases) >= 150
    trained = {(case.base, case.problem, case.layout, case.world_size, case.frozen) for case in cases}
    assert len(trained) == len(cases)
    names = [case.name for case in cases]
    assert sum("overflows" in name for name in names) >= 8
    for case in cases[::7]:
        config = case.config()
        assert config.parallel.dp_replicate * config.parallel.dp_shard == case.world_size
    assert {case.world_size for case in cases} == {1, 2, 3, 4}


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    cases = zero_cases(quick=True, scratch=tmp_path_factory.mktemp("states"))
    return list(run_cases(cases, Plan(steps=12, gradient_step=1)))


def test_the_quick_part_agrees_with_plain_training(quick):
    assert [str(result.divergence) for result in quick if result.divergence] == []
    assert {result.precision for result in quick} == {"fp32", "bf16", "fp16"}


def test_layouts_of_the_quick_part_agree_in_every_bit(quick):
    groups = bitwise_groups(quick)
    assert len(groups) >= 5 and sum(map(len, groups.values())) == len(quick)
    assert list(filter(None, map(bitwise_difference, groups.values()))) == []


def test_loss_scales_recover_from_overflow_alike(quick):
    assert [len(each) for each in scale_histories(quick).values() if len(each) > 1] == []
    overflowing = [result for result in quick if "overflows" in result.case.name]
    assert len(overflowing) >= 2 and all(3 <= result.skipped < 9 for result in overflowing)
    scales = overflowing[0].scales
    changes = [math.copysign(1, after - before) for before, after in pairwise(scales) if after != before]
    assert changes[0] == -1 and (1, -1) in pairwise(changes)  # falls, grows, and overflows again
