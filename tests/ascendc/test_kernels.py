"""The AscendC kernels on emulated cores: the bits of the reference, no broken rule, no byte too many."""

import numpy as np
import pytest
from cases import (
    REFERENCE,
    STATS_TILE,
    AdamCase,
    StatsCase,
    adam_cases,
    expected_partials,
    expected_total,
    stats_cases,
)

GRADS = ("float32", "float16", "bfloat16")
LOWS = ("float16", "bfloat16", None)
SIZES = (1, 7, 17, 257, 4863, 4864, 4865, 5121, 16385, 60003)


@pytest.mark.parametrize("grad", GRADS)
@pytest.mark.parametrize("low", LOWS)
def test_adam_is_the_reference_bit_for_bit(checker, grad, low):
    for case in adam_cases([grad], [low], SIZES, (1, 8, 48)):
        assert checker.adam(case).errors == (), case


@pytest.mark.parametrize("low", ["float16", "bfloat16"])
def test_ties_round_to_even(checker, low):
    outcome = checker.adam(AdamCase("float32", low, 9000, 2, kind="ties"))
    assert outcome.errors == ()


@pytest.mark.parametrize(
    ("grad", "low", "expected"),
    [
        ("float16", "float16", 28),
        ("bfloat16", "bfloat16", 28),
        ("float32", "bfloat16", 30),
        ("float16", None, 26),
    ],
)
def test_bytes_a_parameter_are_the_floor(checker, grad, low, expected):
    assert checker.adam(AdamCase(grad, low, 100_003, 40)).bytes_per_param == expected


def test_transfers_hide_behind_each_other(checker):
    for grad, low in (("float16", "float16"), ("float32", "bfloat16"), ("bfloat16", None)):
        assert checker.adam(AdamCase(grad, low, 24 * 5120, 1), max_overlap=1.2).errors == ()


def test_events_and_buffers_stay_within_the_limits(checker):
    run = checker.adam(AdamCase("bfloat16", "float16", 50_000, 1)).run
    assert run.event_peak <= 8
    assert run.buffer_peak <= 64
    assert run.ub_peak <= 188_160


@pytest.mark.parametrize("dtype", GRADS)
def test_partial_sums_are_the_tree(checker, dtype):
    for case in stats_cases([dtype], SIZES, (1, 8, 40, 48)):
        assert checker.stats(case).errors == (), case


def test_total_is_added_in_ascending_order(checker):
    rows = (
        np.random.default_rng(1).standard_normal((64, 8)).astype(np.float32)
        * 10.0 ** np.arange(-32, 32)[:, None]
    )
    assert checker.total(rows.astype(np.float32)).errors == ()


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_one_bad_element_shows_in_the_total(checker, value):
    x = np.ones(3 * STATS_TILE, np.float32)
    x[2 * STATS_TILE + 5] = value
    assert not np.isfinite(expected_total(expected_partials(x, STATS_TILE, 3))[0])
    assert checker.stats(StatsCase("float32", 3 * STATS_TILE, 3, kind="special")).errors == ()


def test_the_tree_is_close_to_the_exact_sum():
    x = np.random.default_rng(2).standard_normal(300_000).astype(np.float32)
    total = expected_total(expected_partials(x, 5 * STATS_TILE, 8))[0]
    exact = REFERENCE.sum_of_squares(x)
    assert abs(total / exact - 1) < 1e-6
