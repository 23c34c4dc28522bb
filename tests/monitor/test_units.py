"""Short numbers."""

import math

import pytest

from ms_zero.monitor.units import format_bytes, format_count, format_duration


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (640, "640"),
        (999, "999"),
        (1000, "1.00k"),
        (81_920, "81.9k"),
        (999_499, "999k"),
        (999_950, "1.00M"),
        (15.2e12, "15.2T"),
        (1.234, "1.23"),
        (9.996, "10.0"),
        (0.9996, "1.00"),
        (0.0123, "0.012"),
        (0.000123, "1.2e-04"),
        (12.0, "12"),
        (-4096, "-4.10k"),
        (3e22, "30000E"),
        (None, "n/a"),
        (math.nan, "nan"),
        (-math.inf, "-inf"),
    ],
)
def test_counts(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1.00KiB"),
        (512 << 20, "512MiB"),
        (65464 << 20, "63.9GiB"),
        (None, "n/a"),
    ],
)
def test_bytes(value, text):
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (-3, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (83, "1m23s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (86399, "23h59m"),
        (3 * 86400 + 4 * 3600, "3d04h"),
        (None, "n/a"),
        (math.nan, "n/a"),
        (math.inf, "n/a"),
    ],
)
def test_durations(seconds, text):
    assert format_duration(seconds) == text
