import hashlib
from statistics import NormalDist

import numpy as np
import pytest

from ms_zero import rng

MASK = (1 << 64) - 1

GOLDEN_BITS = [14436364903362645477, 12629926132866363860, 6344387351890159529]
GOLDEN_NORMAL = [
    "-0x1.6ce85a0000000p+1",
    "-0x1.676fec0000000p-2",
    "-0x1.dcb0a80000000p-1",
    "-0x1.8942220000000p-2",
    "0x1.cf35900000000p-8",
    "0x1.8fde680000000p-1",
]
GOLDEN_UNIFORM = ["0x1.1dc2000000000p-9", "0x1.737f0c0000000p-2", "0x1.6847800000000p-3"]
GOLDEN_DIGEST = "d17294fbcd317fecfad7f2390e9598b61d011a304d782ba1772fb41d3b45d56d"


def philox(counter, key):
    """Philox4x64-10 of Salmon et al., written from the paper."""
    c, k = list(counter), list(key)
    for _ in range(10):
        high0, low0 = divmod(0xD2E7470EE14C6C93 * c[0], 1 << 64)
        high1, low1 = divmod(0xCA5A826395121157 * c[2], 1 << 64)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B97F4A7C15) & MASK, (k[1] + 0xBB67AE8584CAA73B) & MASK]
    return c


def test_reference_equals_the_published_vector():
    assert philox([0] * 4, [0] * 2) == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


def test_bits_are_philox_keyed_by_the_hash_of_seed_and_name():
    digest = hashlib.sha256(b"ms_zero rng 1\x001234\x00layer.0.weight").digest()
    key = [int.from_bytes(digest[at : at + 8], "little") for at in (0, 8)]
    expected = [word for block in range(1, 5) for word in philox([block, 0, 0, 0], key)]
    assert rng.uniform_bits(1234, "layer.0.weight", 0, 16).tolist() == expected


def test_golden_values_never_change():
    name = "model.layers.0.weight"
    assert rng.uniform_bits(1234, name, 5, 8).tolist() == GOLDEN_BITS
    assert [value.hex() for value in rng.normal(1234, name, 0, 6).tolist()] == GOLDEN_NORMAL
    assert [value.hex() for value in rng.uniform(1234, name, 0, 3).tolist()] == GOLDEN_UNIFORM
    digest = hashlib.sha256(rng.normal(7, "long", 0, 300_000).astype("<f4").tobytes()).hexdigest()
    assert digest == GOLDEN_DIGEST


@pytest.mark.parametrize("draw", [rng.uniform_bits, rng.uniform, rng.normal])
def test_any_slice_equals_the_slice_of_the_whole(draw):
    edge = rng._CHUNK
    whole = draw(3, "w", 0, 2 * edge + 9)
    bounds = [0, 1, 2, 3, 4, 5, 7, 8, edge - 1, edge, edge + 1, edge + 6, 2 * edge, 2 * edge + 9]
    for start in bounds:
        for stop in bounds:
            if start <= stop:
                np.testing.assert_array_equal(draw(3, "w", start, stop), whole[start:stop])


@pytest.mark.parametrize("draw", [rng.uniform_bits, rng.uniform, rng.normal])
def test_elements_far_beyond_32_bits_of_index(draw):
    at = 10**15
    np.testing.assert_array_equal(draw(3, "w", at, at + 40)[13:29], draw(3, "w", at + 13, at + 29))


def test_streams_differ_by_seed_and_by_name():
    streams = [rng.uniform_bits(seed, name, 0, 100) for seed in (0, 1, 12) for name in ("a", "b", "2\0a", "")]
    assert len(np.unique(np.concatenate(streams))) == 1200
    assert np.array_equal(rng.uniform_bits(1, "a", 0, 9), rng.uniform_bits(1, "a", 0, 9))


def test_dtypes_and_empty_slices():
    for draw, dtype in ((rng.uniform_bits, np.uint64), (rng.uniform, np.float32), (rng.normal, np.float32)):
        assert draw(1, "a", 6, 6).shape == (0,)
        assert draw(1, "a", 6, 9).dtype == dtype


def test_bounds_are_checked():
    for draw in (rng.uniform_bits, rng.uniform, rng.normal):
        with pytest.raises(AssertionError):
            draw(1, "a", 5, 4)
        with pytest.raises(AssertionError):
            draw(1, "a", -1, 4)


def test_normal_is_the_inverse_distribution_of_the_bits():
    bits = rng.uniform_bits(11, "n", 0, 3000)
    tails = np.array([0, MASK, 1 << 12, 1 << 24, 1 << 40, MASK - (1 << 30)], dtype=np.uint64)
    bits = np.concatenate([bits, tails])
    expected = [NormalDist().inv_cdf(((int(word) >> 12) + 0.5) * 2.0**-52) for word in bits]
    np.testing.assert_allclose(rng._inverse_normal(bits), expected, rtol=5e-7, atol=1e-9)


def test_normal_moments_and_tails():
    count = 1_000_000
    values = rng.normal(1234, "moments", 0, count).astype(np.float64)
    assert abs(values.mean()) < 4 / count**0.5
    assert abs(values.var() - 1) < 4 * (2 / count) ** 0.5
    assert abs((values**3).mean()) < 4 * (15 / count) ** 0.5
    assert abs((values**4).mean() - 3) < 4 * (96 / count) ** 0.5
    for bound in (1.0, 2.0, 3.0):
        expected = 2 * NormalDist().cdf(-bound)
        assert abs((np.abs(values) > bound).mean() - expected) < 4 * (expected / count) ** 0.5
    neighbours = (values[:-1] * values[1:]).mean()
    assert abs(neighbours) < 4 / count**0.5


def test_uniform_is_in_the_unit_interval_and_even():
    values = rng.uniform(1234, "even", 0, 400_000)
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    chi_square = ((counts - 4000) ** 2 / 4000).sum()
    assert 45 < chi_square < 170  # 99 degrees of freedom: mean 99, standard deviation 14
