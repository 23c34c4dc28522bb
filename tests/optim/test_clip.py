import math

import pytest

from ms_zero.optim.clip import decide


def test_a_long_gradient_is_scaled_to_the_clip_norm():
    decision = decide(25.0, 1.0)
    assert (decision.norm, decision.finite) == (5.0, True)
    assert decision.scale == pytest.approx(0.2)


@pytest.mark.parametrize(("squares", "clip_norm"), [(0.25, 1.0), (1.0, 1.0), (25.0, 0.0), (0.0, 1.0)])
def test_a_short_gradient_or_no_clipping_leaves_it_alone(squares, clip_norm):
    decision = decide(squares, clip_norm)
    assert decision.scale == 1.0
    assert decision.norm == math.sqrt(squares)


@pytest.mark.parametrize("squares", [math.inf, math.nan])
def test_a_gradient_that_is_not_finite_is_marked(squares):
    decision = decide(squares, 1.0)
    assert not decision.finite
    assert decision.scale == 0.0
