import math

import pytest

from ms_zero.optim.schedule import Schedule


def make(kind, **values):
    return Schedule(kind, **{"lr": 1.0, "min_lr": 0.1, "warmup_steps": 10, "total_steps": 110} | values)


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
def test_warmup_is_linear_and_reaches_the_peak(kind):
    schedule = make(kind, decay_steps=50)
    assert [schedule(step) for step in range(10)] == pytest.approx([(step + 1) / 10 for step in range(10)])


@pytest.mark.parametrize("kind", ["linear", "cosine", "wsd"])
def test_decay_ends_at_the_minimum_and_stays_there(kind):
    schedule = make(kind, decay_steps=50)
    assert schedule(109) == pytest.approx(0.1)
    assert schedule(500) == pytest.approx(0.1)
    values = [schedule(step) for step in range(10, 110)]
    assert values == sorted(values, reverse=True)


def test_shapes_at_half_way():
    assert make("constant")(109) == 1.0
    assert make("linear")(59) == pytest.approx(0.55)
    assert make("cosine")(59) == pytest.approx(0.55)
    assert make("cosine")(34) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_wsd_is_flat_until_the_decay_window():
    schedule = make("wsd", decay_steps=20)
    assert {schedule(step) for step in range(10, 90)} == {1.0}
    assert schedule(99) == pytest.approx(0.55)


def test_no_warmup_starts_at_the_peak():
    assert make("constant", warmup_steps=0)(0) == 1.0
