import json
from random import Random

import numpy as np
import pytest

from ms_zero.data.loader import Loader
from ms_zero.data.mixture import MAX_PERIOD, MixtureLoader, mixing_pattern, whole_shares
from ms_zero.data.packing import Sample
from ms_zero.errors import UserError


class Marked:
    """Sample i holds the number of its part and i."""

    seq_len = 2

    def __init__(self, part, size):
        self.part, self.size = part, size

    def __len__(self):
        return self.size

    def sample(self, index):
        return Sample(np.array([self.part, index], np.int32), np.zeros(2, np.int32))


SIZES = (7, 40, 3)
WEIGHTS = (0.7, 0.2, 0.1)


def mixture(weights=WEIGHTS, seed=5, shuffle=True):
    parts = [
        Loader(Marked(number, size), seed=seed, fingerprint=str(number), shuffle=shuffle)
        for number, size in enumerate(SIZES[: len(weights)])
    ]
    return MixtureLoader(parts, weights, seq_len=2, seed=seed, fingerprint="f", corpus="mix")


def read(loader, consumed, count):
    return [tuple(row) for row in loader.batch(consumed, count).input_ids.tolist()]


def check_counts(pattern, shares):
    """Every prefix of endless repetitions has every part within one sample of its share."""
    period = sum(shares)
    assert pattern.size == period
    numbers = np.arange(1, period + 1)
    for part, share in enumerate(shares):
        counts = np.cumsum(pattern == part)
        assert counts[-1] == share
        assert (np.abs(counts * period - numbers * share) < period).all(), (shares, part)


SHARES = [(1,), (1, 1), (7, 2, 1), (1, 99), (5, 3, 3, 1), (90, *[1] * 10), (17, 13, 11, 7)]


@pytest.mark.parametrize("shares", SHARES)
def test_every_prefix_is_within_one_sample_of_the_shares(shares):
    check_counts(mixing_pattern(shares), shares)


def test_random_shares_are_met_within_one_sample():
    random = Random(0)
    for parts in (2, 3, 5, 12, 40):
        for _ in range(15):
            shares = [random.choice([1, random.randint(1, 30), 100]) for _ in range(parts)]
            check_counts(mixing_pattern(shares), shares)


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.2, 0.1], (7, 2, 1)),
        ([70, 20, 10], (7, 2, 1)),
        ([3.0], (1,)),
        ([1e-9, 2e-9], (1, 2)),
        ([0.333, 0.667], (333, 667)),
    ],
)
def test_simple_ratios_are_exact(weights, shares):
    assert whole_shares(weights) == shares


def test_other_ratios_are_rounded_to_the_longest_period():
    weights = [0.123456789, 0.5, 0.376543211, 3e-5]
    shares = whole_shares(weights)
    assert sum(shares) == MAX_PERIOD
    for share, weight in zip(shares, weights):
        assert abs(share - weight / sum(weights) * MAX_PERIOD) < 1


def test_a_weight_too_small_to_count_is_refused():
    with pytest.raises(UserError, match=r"data.parts\[1\].weight=1e-09 is less than 1/65536 of all weights"):
        whole_shares([1.0, 1e-9])


def test_parts_are_read_in_their_own_order_and_start_over():
    loader = mixture()
    rows = read(loader, 0, 200)
    for part, loader_of_part in enumerate(loader.parts):
        own = [index for number, index in rows if number == part]
        assert own == [loader_of_part.index_of(number) for number in range(len(own))]
    assert [sum(number == part for number, _ in rows) for part in range(3)] == [140, 40, 20]
    assert len(loader) == sum(SIZES)


def test_any_sample_can_be_read_first_without_reading_others():
    expected = read(mixture(), 0, 150)
    for number in (0, 1, 9, 10, 11, 77, 149):
        assert read(mixture(), number, 1) == [expected[number]]
    part, place = mixture().locate(10**15 + 3)
    assert place == 10**14 * mixture().shares[part] + mixture().locate(3)[1]


@pytest.mark.parametrize("old", [1, 2, 3])
@pytest.mark.parametrize("new", [1, 2, 4])
def test_restoring_under_another_degree_continues_the_exact_sequence(old, new):
    expected, seen = read(mixture(), 0, 120), {}

    def train(loader, consumed, degree, steps):
        for _ in range(steps):
            for rank in range(degree):
                batch = loader.microbatch(consumed, 0, rank, degree, 3)
                rows = [tuple(row) for row in batch.input_ids.tolist()]
                seen.update(zip(batch.sample_numbers.tolist(), rows, strict=True))
            consumed += 3 * degree
        return consumed

    first = mixture()
    state = json.loads(json.dumps(first.cursor(train(first, 0, old, 4))))
    second = mixture()
    consumed = train(second, second.check_cursor(state), new, 5)
    assert seen == dict(enumerate(expected[:consumed]))


def test_order_depends_on_the_seed_and_proportions_do_not():
    first, second = read(mixture(seed=5), 0, 60), read(mixture(seed=6), 0, 60)
    assert first != second
    assert [part for part, _ in first] == [part for part, _ in second]


def test_without_shuffle_parts_are_read_in_order():
    rows = read(mixture([1, 1], shuffle=False), 0, 6)
    assert rows == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_the_cursor_is_of_the_mixture():
    assert mixture().cursor(9) == {
        "consumed_samples": 9,
        "fingerprint": "f",
        "seed": 5,
        "seq_len": 2,
        "corpus": "mix",
    }
    with pytest.raises(UserError, match=r"train.seed=6 would change"):
        mixture(seed=6).check_cursor(mixture().cursor(9))
