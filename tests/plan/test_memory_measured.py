"""The memory model against bytes that the eager engine counts on CPU, by ZeRO stage and recompute kind."""

import pytest

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


@pytest.mark.parametrize(("stage", "policy"), cases.STAGES)
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_states_are_what_the_engine_holds(folder, counted, family, stage, policy):
    predicted = cases.predict_states(cases.read_case(folder, family, stage, policy, cases.WORLD_SIZE))
    for rank in counted:
        case = rank[f"{family}-{stage}-{policy}"]
        for part in cases.STATE_PARTS:
            assert predicted[part] == pytest.approx(case[part], rel=TOLERANCE), part
        assert case["open"] <= predicted["open"] <= 2 * case["open"]


@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize("family", cases.FAMILIES)
def test_saved_activations_are_what_the_engine_saves(folder, blocking, family, kind):
    config = cases.read_case(folder, family)
    predicted, counted = cases.predict_saved(config, kind), cases.measure_saved(config, kind)
    assert predicted == pytest.approx(counted, rel=TOLERANCE / 10)
