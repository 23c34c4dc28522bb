import math
from collections import Counter

import numpy as np
import pytest

from ms_zero.data.shuffle import Shuffle

GOLDEN = [7, 11, 4, 2, 3, 1, 5, 10, 9, 8, 6, 0]
GOLDEN_LARGE = 579578877700


def order(n, seed=1, name="a"):
    shuffle = Shuffle(seed, name, n)
    return [shuffle(place) for place in range(n)]


@pytest.mark.parametrize("n", [*range(1, 66), 99, 100, 101, 1000, 4099])
def test_each_index_comes_once(n):
    assert sorted(order(n)) == list(range(n))


def test_the_order_is_the_same_everywhere():
    assert order(12, 1234, "order") == GOLDEN
    assert Shuffle(1234, "order", 10**12)(10**11) == GOLDEN_LARGE


def test_seed_and_name_give_other_orders():
    assert len({tuple(order(50, *key)) for key in ((1, "a"), (2, "a"), (1, "b"), (-1, "a"))}) == 4


def test_orders_of_three_are_all_about_equally_likely():
    counts = Counter(tuple(order(3, seed)) for seed in range(6000))
    assert len(counts) == 6
    assert max(abs(count - 1000) for count in counts.values()) < 150


def test_places_and_neighbours_are_uniform():
    n, draws = 10, 3000
    orders = np.array([order(n, seed) for seed in range(draws)])
    expected = draws / n
    for place in range(n):
        counts = np.bincount(orders[:, place], minlength=n)
        assert ((counts - expected) ** 2 / expected).sum() < 35  # chi-square with 9 degrees: 6e-5
    steps = np.bincount(((orders[:, 1:] - orders[:, :-1]) % n).ravel(), minlength=n)[1:]
    expected = draws * (n - 1) / (n - 1)
    assert (np.abs(steps - expected) < 6 * math.sqrt(expected)).all()


def test_a_large_order_is_uncorrelated_with_places():
    n = 20_011
    values = np.array(order(n), float)
    assert abs(np.corrcoef(values, np.arange(n))[0, 1]) < 5 / math.sqrt(n)
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 5 / math.sqrt(n)


@pytest.mark.parametrize("place", [-1, 5])
def test_places_are_checked(place):
    with pytest.raises(AssertionError, match=f"place {place} of 5"):
        Shuffle(1, "a", 5)(place)
