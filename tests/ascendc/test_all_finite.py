"""MindSpore's own kernel as a test of the emulation: right verdicts, and what it finds in the source."""

import all_finite
import numpy as np
import pytest
from cases import values
from emulated import Library, build_variants

pytestmark = pytest.mark.skipif(
    all_finite.source_path() is None, reason="this MindSpore has no all_finite.cpp"
)


@pytest.fixture(scope="module")
def library(workshop):
    return Library(build_variants(workshop, "all_finite", [all_finite.variant()]))


def test_verdicts_are_right_and_findings_known(library):
    result = all_finite.self_test(library)
    assert result.verdicts == 180
    assert result.wrong == 0
    assert result.findings == all_finite.KNOWN_FINDINGS


def test_cores_race_for_the_verdict(library):
    clean = all_finite.bits_of(values(np.random.default_rng(0), 20_000, "float16", "normal"), "float16")
    x = all_finite.spoiled(clean, "float16", np.inf, [3, 19_990])
    finite, run = all_finite.run(library, x, "float16", 3, all_finite.TILE)
    assert not finite
    assert set(run.findings) & all_finite.KNOWN_RACES == all_finite.KNOWN_RACES
