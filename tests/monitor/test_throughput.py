"""Rates over a sliding window, on a clock that the test moves."""

import pytest

from ms_zero.monitor import Rates, Throughput


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def meter(clock, **changes):
    arguments = {"num_devices": 4, "flops_per_token": 1e9, "peak_flops": 1e12, "window": 3, "clock": clock}
    return Throughput(**{**arguments, **changes})


def steps(throughput, clock, *durations, tokens=4000):
    for seconds in durations:
        clock.now += seconds
        rates = throughput.step(tokens)
    return rates


def test_rates_are_per_device(clock):
    rates = steps(meter(clock), clock, 2.0)
    assert rates.seconds_per_step == 2.0
    assert rates.tokens_per_second_per_device == 4000 / 2.0 / 4
    assert rates.tflops_per_device == pytest.approx(0.5)
    assert rates.mfu == pytest.approx(0.5)
    assert rates.eta_seconds(10) == 20.0


def test_no_known_peak_means_no_mfu(clock):
    assert steps(meter(clock, peak_flops=None), clock, 2.0).mfu is None


def test_nothing_is_known_before_the_first_step(clock):
    assert meter(clock).rates() == Rates(None, None, None, None)
    assert meter(clock).rates().eta_seconds(5) is None


def test_the_first_step_counts_only_until_there_is_another(clock):
    throughput = meter(clock)
    assert steps(throughput, clock, 60.0).seconds_per_step == 60.0
    assert steps(throughput, clock, 2.0).seconds_per_step == 2.0
    assert steps(throughput, clock, 4.0).seconds_per_step == 3.0


def test_the_window_slides(clock):
    assert steps(meter(clock), clock, 9.0, 9.0, 9.0, 1.0, 2.0, 3.0).seconds_per_step == 2.0


def test_steps_of_unequal_size_are_weighted_by_time(clock):
    throughput = meter(clock, num_devices=1)
    steps(throughput, clock, 1.0)
    steps(throughput, clock, 1.0, tokens=100)
    rates = steps(throughput, clock, 3.0, tokens=700)
    assert rates.tokens_per_second_per_device == 200.0


def test_paused_time_does_not_count_even_if_it_fails(clock):
    throughput = meter(clock)
    steps(throughput, clock, 1.0)
    clock.now += 1.0
    with throughput.paused():
        clock.now += 50.0
    with pytest.raises(KeyError), throughput.paused():
        clock.now += 7.0
        raise KeyError
    assert steps(throughput, clock, 1.0).seconds_per_step == 2.0
    assert steps(throughput, clock, 4.0).seconds_per_step == 3.0


def test_a_clock_that_stands_still_gives_no_rate(clock):
    assert steps(meter(clock), clock, 0.0) == Rates()
