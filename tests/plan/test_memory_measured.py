"""The memory model against bytes that the eager engine counts on CPU."""

import pytest

from ms_zero.plan.recompute import RECOMPUTE_KINDS
from ms_zero.testing import memory_cases as cases

TOLERANCE = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("measured")
    cases.write_cases(folder)
    return folder


@pytest.fixture(scope="module")
def counted(folder):
    return cases.measure_states(folder)


@pytest.mark.parametrize("case", cases.STATES)
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_states_are_what_the_engine_holds(folder, counted, family, case):
    predicted = cases.predict_states(cases.read_case(folder, family, case, cases.WORLD_SIZE))
    for rank in counted:
        held = rank[f"{family} {case}"]
        assert held.keys() == predicted.keys()
        for part in (*cases.STATE_PARTS, *cases.HOST_PARTS):
            assert predicted[part] == pytest.approx(held[part], rel=TOLERANCE), part
        # A padded chunk may add a few bytes; what is fetched ahead is not always there.
        assert 0.999 * held["open"] <= predicted["open"] <= 2 * held["open"]


@pytest.mark.parametrize("case", cases.SAVED)
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_saved_activations_are_what_the_engine_saves(folder, blocking, family, case):
    config = cases.read_case(folder, family, case)
    # A run in bf16 that recomputes whole blocks keeps their tables of rotary positions, once.
    tolerance = 0.02 if "bf16" in case else 0.005
    assert cases.predict_saved(config) == pytest.approx(cases.measure_saved(config), rel=tolerance)


def test_every_kind_of_recompute_is_measured():
    assert {case.split()[1] for case in cases.SAVED} == set(RECOMPUTE_KINDS)


@pytest.mark.parametrize("place", cases.PLACES)
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_packed_activations_are_what_the_ledger_says(folder, blocking, family, place):
    config = cases.read_case(folder, family)
    predicted, counted = cases.predict_packed(config, place), cases.measure_packed(config, place)
    for expected, found in zip(predicted, counted, strict=True):
        # Packing keeps a tensor that is saved under two shapes twice: in a block, the weighted values.
        assert 0.9 * found <= expected <= (1 + TOLERANCE) * found
    assert (predicted[0] > 0, predicted[1] > 0) == (place == "int8", place != "int8")
