"""Loss scaling against the published values and against each convention restated in plain Python."""

import json
import random

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero.errors import UserError
from ms_zero.precision.scaler import (
    DynamicLossScaler,
    ScalingRule,
    StaticLossScaler,
    Unscale,
    scaling_rule,
)


@pytest.fixture(params=["pynative", "graph"])
def mode(request):
    ms.set_context(mode=ms.GRAPH_MODE if request.param == "graph" else ms.PYNATIVE_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


def scales(scaler, decisions):
    return [scaler.update(finite) for finite in decisions]


def dynamic(convention, **values):
    return DynamicLossScaler(scaling_rule(convention, **values))


def test_deepspeed_growth(mode):
    found = scales(dynamic("deepspeed", initial=2.0**8, window=2), [True] * 10)
    assert found == [256, 256, 512, 512, 1024, 1024, 2048, 2048, 4096, 4096]


def test_deepspeed_overflows_down_to_the_minimum(mode):
    scaler = dynamic("deepspeed", initial=2.0**4, hysteresis=1)
    assert scales(scaler, [False] * 8) == [8, 4, 2, 1, 1, 1, 1, 1]
    assert scaler.skips_at_minimum == 4


def test_deepspeed_defaults_spend_hysteresis_first():
    scaler = dynamic("deepspeed")
    assert scaler.rule == ScalingRule(initial=2.0**16, window=1000, hysteresis=2, minimum=1.0, delay=1)
    assert scales(scaler, [False] * 3) == [2.0**16, 2.0**15, 2.0**14]
    # A thousand clean steps do not double it, the next one does, and restores the hysteresis.
    assert scaler.state()["clean"] == -1
    scaler.load_state({**scaler.state(), "clean": 998})
    assert scales(scaler, [True] * 2) == [2.0**14, 2.0**15]
    assert scales(scaler, [False] * 2) == [2.0**15, 2.0**14]


def test_megatron_growth(mode):
    assert scales(dynamic("megatron", initial=2.0**8, window=2), [True] * 4) == [256, 512, 512, 1024]


def test_megatron_defaults():
    scaler = dynamic("megatron")
    assert scaler.rule == ScalingRule(initial=2.0**32, window=1000, hysteresis=2, minimum=1.0)
    assert scales(scaler, [False] * 3) == [2.0**32, 2.0**31, 2.0**30]
    assert scaler.state()["clean"] == 0
    scaler.load_state({**scaler.state(), "clean": 998})
    assert scales(scaler, [True] * 2) == [2.0**30, 2.0**31]


def test_the_founding_convention_grows_every_2000_steps_and_halves_on_every_overflow():
    scaler = dynamic("torch")
    assert scaler.rule == ScalingRule(initial=2.0**16, window=2000, hysteresis=1, minimum=1.0)
    scaler.load_state({**scaler.state(), "clean": 1997})
    assert scales(scaler, [True] * 3) == [2.0**16, 2.0**16, 2.0**17]
    assert scales(scaler, [False] * 2) == [2.0**16, 2.0**15]


def deepspeed_by_iteration(decisions, scale, window, hysteresis, minimum, consecutive):
    """Counts iterations since the last overflow."""
    left, last_overflow, out = hysteresis, -1, []
    for step, finite in enumerate(decisions):
        if not finite:
            if hysteresis == 1 or left == 1:
                scale = max(scale / 2, minimum)
            else:
                left -= 1
            last_overflow = step
        else:
            if consecutive:
                left = hysteresis
            since = step - last_overflow - 1
            if since > 0 and since % window == 0:
                left = hysteresis
                scale *= 2
        out.append(scale)
    return out


def megatron_by_tracker(decisions, scale, window, hysteresis, minimum):
    """Counts down hysteresis below zero and clean steps up to the window."""
    growth, left, out = 0, hysteresis, []
    for finite in decisions:
        if not finite:
            growth, left = 0, left - 1
            if left <= 0:
                scale = max(scale * 0.5, minimum)
        else:
            growth += 1
            if growth == window:
                growth, left, scale = 0, hysteresis, scale * 2
        out.append(scale)
    return out


@pytest.mark.parametrize("seed", range(6))
def test_random_decisions(seed):
    rng = random.Random(seed)
    values = {
        "initial": 2.0 ** rng.randint(2, 8),
        "window": rng.randint(1, 4),
        "hysteresis": rng.randint(1, 3),
        "minimum": rng.choice([0.25, 1.0, 3.0]),
    }
    decisions = [rng.random() < rng.choice([0.3, 0.7, 0.9]) for _ in range(50)]
    plain = (decisions, *values.values())
    for consecutive in (False, True):
        expected = deepspeed_by_iteration(*plain, consecutive)
        scaler = dynamic("deepspeed", **values, consecutive_hysteresis=consecutive)
        assert scales(scaler, decisions) == expected
    assert scales(dynamic("megatron", **values), decisions) == megatron_by_tracker(*plain)


def test_consecutive_hysteresis_counts_overflows_in_a_row_only():
    decisions = [False, True, False, True, False, False]
    lasting = dynamic("deepspeed", initial=8.0)
    consecutive = dynamic("deepspeed", initial=8.0, consecutive_hysteresis=True)
    assert scales(lasting, decisions) == [8, 8, 4, 4, 2, 1]
    assert scales(consecutive, decisions) == [8, 8, 8, 8, 8, 4]


def test_at_the_minimum_skips_are_counted_until_a_clean_step():
    scaler = dynamic("megatron", initial=4.0, minimum=2.0, hysteresis=2)
    counts = []
    for finite in (False, False, False, False, True, False):
        scaler.update(finite)
        counts.append((scaler.scale, scaler.skips_at_minimum))
    # The first overflow spends hysteresis, the second halves.
    assert counts == [(4, 0), (2, 0), (2, 1), (2, 2), (2, 0), (2, 1)]


def test_growth_stops_before_the_reciprocal_is_no_longer_normal():
    scaler = dynamic("megatron", initial=2.0**125, window=1)
    assert scales(scaler, [True] * 3) == [2.0**126] * 3
    assert scaler.update(False) == 2.0**126  # one hysteresis
    assert scaler.update(False) == 2.0**125


def test_static_scale_never_moves_and_counts_skips(mode):
    scaler = StaticLossScaler(128.0)
    assert scales(scaler, [False, False]) == [128, 128]
    assert scaler.skips_at_minimum == 2
    assert scaler.update(True) == 128
    assert scaler.skips_at_minimum == 0


@pytest.mark.parametrize("convention", ["deepspeed", "megatron", "torch"])
def test_resuming_from_the_saved_state_continues_exactly(convention):
    rng = random.Random(1)
    decisions = [rng.random() < 0.7 for _ in range(40)]
    values = {"initial": 64.0, "window": 3, "hysteresis": 2}
    whole = scales(dynamic(convention, **values), decisions)
    for cut in (1, 7, 20):
        first, second = dynamic(convention, **values), dynamic(convention, **values)
        scales(first, decisions[:cut])
        second.load_state(json.loads(json.dumps(first.state())))
        assert second.state() == first.state()
        assert scales(second, decisions[cut:]) == whole[cut:]


def test_a_compiled_scaler_sees_loaded_state(mode):
    scaler = dynamic("megatron", initial=8.0, window=3, hysteresis=1)
    scaler.update(True)
    scaler.load_state({**scaler.state(), "scale": 32.0, "clean": 2})
    assert scales(scaler, [True, False]) == [64, 32]


def test_state_of_another_scaler_is_refused():
    fixed, moving = StaticLossScaler(2.0), dynamic("torch")
    for scaler, state in ((fixed, moving.state()), (moving, fixed.state()), (moving, {"scale": 1.0})):
        before = scaler.state()
        with pytest.raises(UserError, match="resume with the loss scaling of the run that saved it"):
            scaler.load_state(state)
        assert scaler.state() == before


def test_ranks_with_equal_decisions_keep_equal_scales():
    rng = random.Random(2)
    ranks = [dynamic("deepspeed", initial=2.0**10, window=3) for _ in range(3)]
    for _ in range(50):
        local = [rng.random() < 0.9 for _ in ranks]  # one rank's overflow is everyone's
        assert len({scaler.update(all(local)) for scaler in ranks}) == 1


def test_state_is_no_trainable_parameter():
    scaler = dynamic("torch")
    assert scaler.trainable_params() == []
    assert len(list(scaler.get_parameters())) == 4


def test_numbers_serve_as_decisions(mode):
    scaler = dynamic("torch", initial=8.0)
    assert float(scaler(Tensor(np.float32(1))).asnumpy()) == 8
    assert float(scaler(Tensor(np.float32(0))).asnumpy()) == 4


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"initial": 0.5}, "initial scale is 0.5: expected from the minimum 1 to 2^126"),
        ({"initial": float("inf")}, "initial scale is inf"),
        ({"initial": 2.0**127}, "initial scale"),
        ({"window": 0}, "window is 0: expected a whole number, at least 1"),
        ({"window": 1.5}, "window is 1.5"),
        ({"window": True}, "window is True"),
        ({"hysteresis": 0}, "hysteresis is 0"),
        ({"minimum": 0.0}, "minimum is 0.0: expected a number above 0"),
        ({"minimum": float("nan")}, "minimum is nan"),
        ({"convention": "deep-speed"}, "unknown convention 'deep-speed': expected one of deepspeed"),
        ({"convention": "megatron", "consecutive_hysteresis": True}, "belongs to the convention deepspeed"),
    ],
)
def test_refused(values, message):
    with pytest.raises(UserError) as error:
        scaling_rule(**{"convention": "torch", **values})
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("field", [{"growth": 1.0}, {"backoff": 1.0}, {"backoff": 0.0}, {"delay": 2}])
def test_refused_rules(field):
    with pytest.raises(UserError, match=f"{next(iter(field))} is"):
        ScalingRule(initial=8.0, window=2, hysteresis=1, minimum=1.0, **field)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), "2", True])
def test_refused_static_scales(scale):
    with pytest.raises(UserError, match="scale is"):
        StaticLossScaler(scale)


@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
def test_unscale(mode, bad):
    grads = [np.array([[1.0, -2.0], [0.5, 65504.0]], np.float16), np.array([3.0], np.float32)]
    if bad is not None:
        grads[1][0] = bad
    unscaled, finite = Unscale()(tuple(map(Tensor, grads)), Tensor(np.float32(4.0)))
    assert bool(finite.asnumpy()) is (bad is None)
    for found, grad in zip(unscaled, grads, strict=True):
        assert found.dtype == ms.float32
        np.testing.assert_array_equal(found.asnumpy(), grad.astype(np.float32) / 4)
