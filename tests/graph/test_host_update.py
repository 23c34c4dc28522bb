"""Optimizer state on the host: the same update, and operators that the compiled graph marks for the host."""

import re

import numpy as np
import pytest
from front_end_cases import PARAMETERS, compiled, config_of, text_of
from mindspore import Parameter, Tensor

from ms_zero.config import require_runnable
from ms_zero.errors import UserError
from ms_zero.graph.parallel import options_of
from ms_zero.graph.update import ComposedAdamW, HostAdamW, host_flags, step_scalars

OFFLOAD = ("offload.optimizer=cpu", "optim.kind=adamw", "parallel.zero_stage=1")
# The state that an Assign for the host writes.
STATE = re.compile(r'= PrimFunc_Assign\(%para\d+_(exp_avg(?:_sq)?)\.[^,]*,.*primitive_target: "CPU"')


def updated(rule, skip):
    rng = np.random.default_rng(0)
    names = ("param", "exp_avg", "exp_avg_sq")
    kept = [Parameter(Tensor(np.abs(rng.standard_normal((6, 4))).astype(np.float32)), name=n) for n in names]
    rates = {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    for step in (1, 2):
        grad = rng.standard_normal((6, 4)).astype(np.float32)
        if skip:
            grad[0, 0] = np.nan
        scalars, _ = step_scalars("adamw", lr=0.01, step=step, grad_scale=0.5, skip=skip, **rates)
        rule(*kept, Tensor(grad), Tensor(scalars))
    return [param.asnumpy() for param in kept]


@pytest.mark.parametrize("skip", [False, True])
def test_the_update_on_the_host_is_the_same(skip):
    for ours, expected in zip(updated(HostAdamW(), skip), updated(ComposedAdamW(), skip), strict=True):
        assert np.isfinite(expected).all()
        np.testing.assert_allclose(ours, expected, rtol=1e-6)


def test_the_graph_updates_all_moments_on_the_host():
    text = text_of(2, *OFFLOAD)
    written = [found.group(1) for found in map(STATE.search, text.splitlines()) if found]
    assert sorted(written) == sorted(["exp_avg", "exp_avg_sq"] * PARAMETERS)
    for operation in ("Sqrt", "Square", "Div"):  # one for each parameter, there and nowhere else
        lines = [line for line in text.splitlines() if f"= PrimFunc_{operation}(" in line]
        assert sum('primitive_target: "CPU"' in line for line in lines) == PARAMETERS, operation
    # Weights are written on the device, and what communicates stays there.
    on_weights = re.compile(r"PrimFunc_Assign\(%para\d+_(model|lm_head)")
    weights = [line for line in text.splitlines() if on_weights.search(line)]
    assert len(weights) == PARAMETERS and not any('"CPU"' in line for line in weights)
    graph = compiled(2, *OFFLOAD).graph
    assert graph.number("ReduceScatter", role="gradient") == PARAMETERS
    assert compiled(2, *OFFLOAD).deprecations() == []


def test_a_share_of_the_state_goes_to_the_host():
    assert host_flags([4, 4, 4, 4], 0.5) == (True, False, True, False)
    assert sum(host_flags([1] * 10, 0.1)) == 1
    assert host_flags([3, 3], 0.0) == (False, False)
    assert host_flags([3, 3], 1.0) == (True, True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["offload.params=cpu", "parallel.zero_stage=3"], "leaves no trace in the graph"),
        (["offload.optimizer=nvme", "offload.nvme_path=x"], "no optimizer state in files"),
    ],
)
def test_what_does_not_leave_the_device_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        options_of(config_of(2, *overrides))


def test_a_run_with_offloaded_state_is_for_autoparallel_on_ascend():
    common = ("engine=graph", "optim.kind=adamw", "train.eval_interval=0")
    require_runnable(config_of(2, *common, "offload.optimizer=cpu"))
    with pytest.raises(UserError, match=r"offload\.params"):
        require_runnable(config_of(2, *common, "offload.params=cpu", "parallel.zero_stage=3"))
    with pytest.raises(UserError, match="cpu is not available with engine graph"):
        require_runnable(config_of(2, *common, "offload.optimizer=cpu", "hardware.target=CPU"))
