"""MindSpore's own kernel as a test of the emulation: right verdicts, and what it finds in the source."""

import all_finite
import numpy as np
import pytest
from cases import REFERENCE, values
from emulated import NUMPY_TYPES, Library, build_variants

pytestmark = pytest.mark.skipif(
    all_finite.source_path() is None, reason="this MindSpore has no all_finite.cpp"
)

TILE = 2048


@pytest.fixture(scope="module")
def library(workshop):
    return Library(build_variants(workshop, "all_finite", [all_finite.variant()]))


def bits(numbers, dtype):
    return numbers.view(np.uint32 if dtype == "float32" else np.uint16)


def spoiled(x, dtype, value, places):
    bad = np.array([value], np.float32)
    narrowed = bad if dtype == "float32" else REFERENCE.narrow(bad, np.dtype(NUMPY_TYPES[dtype]))
    y = x.copy()
    y[list(places)] = bits(narrowed, dtype)[0]
    return y


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_verdicts_are_right_and_findings_known(library, dtype):
    found = set()
    for cores in (1, 3):
        for length in (1000, 4 * TILE + 5, 20_000):
            x = bits(values(np.random.default_rng(length), length, dtype, "normal"), dtype)
            finite, run = all_finite.run(library, x, dtype, cores, TILE)
            assert finite
            found |= set(run.findings)
            for value in (np.inf, -np.inf, np.nan):
                for place in (0, length // 2, length - 1):
                    finite, run = all_finite.run(
                        library, spoiled(x, dtype, value, [place]), dtype, cores, TILE
                    )
                    assert not finite, (cores, length, value, place)
                    found |= set(run.findings)
    assert found == all_finite.KNOWN_FINDINGS


def test_cores_race_for_the_verdict(library):
    x = bits(values(np.random.default_rng(0), 20_000, "float16", "normal"), "float16")
    finite, run = all_finite.run(library, spoiled(x, "float16", np.inf, [3, 19_990]), "float16", 3, TILE)
    assert not finite
    assert set(run.findings) & all_finite.KNOWN_RACES == all_finite.KNOWN_RACES
