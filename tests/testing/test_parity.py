"""The harness itself: it must pass what is equal and point at what is not."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from ms_zero.testing import parity
from ms_zero.testing.parity import (
    Case,
    Plan,
    Result,
    Tolerance,
    Trace,
    bitwise_difference,
    bitwise_groups,
    compare,
    run_cases,
    scale_histories,
)

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "model.num_layers=1",
    "model.hidden_size=32",
    "data.seq_len=32",
    "train.global_batch_size=6",
    "train.eval_interval=0",
    "train.output_dir=unused",
    "optim.warmup_steps=2",
    "optim.eps=1e-4",
)


def case(world_size, *layout):
    return Case("case", world_size, "runs/quickstart", SMALL, ("train.accumulation_steps=1", *layout))


def trace(**changes):
    rng = np.random.default_rng(1)
    tensors = {"a": rng.standard_normal((3, 4)).astype(np.float32), "b": np.zeros(2, np.float32)}
    numbers = {"losses": [3.0, 2.0], "grad_norms": [1.0, 0.5], "scales": [1.0, 1.0]}
    values = {**numbers, "grads": tensors, "params": tensors}
    return Trace(**values | changes)


def changed(name, index, delta):
    tensors = {key: value.copy() for key, value in trace().params.items()}
    tensors[name][index] += delta
    return tensors


def test_equal_traces_have_no_difference():
    result = compare(Result(case(1)), trace(), trace(), Tolerance())
    assert result.divergence is None
    assert result.max_rel == {"loss": 0.0, "grad_norm": 0.0, "scale": 0.0, "grad": 0.0, "param": 0.0}


@pytest.mark.parametrize(
    ("changes", "what", "where"),
    [
        ({"losses": [3.0, 2.001]}, "loss", "step 2"),
        ({"grad_norms": [float("nan"), 0.5]}, "grad_norm", "step 1"),
        ({"grads": changed("a", (2, 1), 0.01)}, "grad", "a[2, 1]"),
        ({"params": changed("b", 1, 0.01)}, "param", "b[1]"),
        ({"params": changed("a", (0, 3), np.nan)}, "param", "a[0, 3]"),
    ],
)
def test_the_first_difference_is_named_with_both_values(changes, what, where):
    result = compare(Result(case(1)), trace(**changes), trace(), Tolerance())
    assert (result.divergence.what, result.divergence.where) == (what, where)
    assert result.divergence.value != result.divergence.reference


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("loss", {"losses": [3.0, np.nan]}), ("param", {"params": changed("a", (1, 1), np.nan)})],
)
def test_nan_is_an_infinite_difference(kind, changes):
    assert compare(Result(case(1)), trace(**changes), trace(), Tolerance()).max_rel[kind] == np.inf


def test_a_reference_of_zero_is_compared_absolutely():
    zero = {"grad_norms": [0.0, 0.5]}
    assert compare(Result(case(1)), trace(**zero), trace(**zero), Tolerance()).divergence is None
    result = compare(Result(case(1)), trace(grad_norms=[0.25, 0.5]), trace(**zero), Tolerance())
    assert result.max_rel["grad_norm"] == 0.25 and result.divergence.where == "step 1"


def test_noise_in_a_parameter_without_gradient_is_measured_against_the_model():
    result = compare(Result(case(1)), trace(grads=changed("b", 0, 1e-9)), trace(), Tolerance())
    assert result.divergence is None
    assert 0 < result.max_rel["grad"] < 1e-6


def test_layouts_equal_the_reference_and_a_wrong_engine_is_caught(monkeypatch):
    results = list(run_cases([case(1), case(2, "parallel.bucket_mb=0.01")], Plan(steps=3)))
    assert [result.divergence for result in results] == [None, None]
    assert all(result.max_rel["loss"] < 1e-6 for result in results)
    monkeypatch.setattr(parity, "train_cases", train_with_gradients_averaged_twice)
    (wrong,) = run_cases([case(2)], Plan(steps=3))
    assert (wrong.divergence.what, wrong.divergence.where) == ("grad_norm", "step 1")
    assert wrong.divergence.value == pytest.approx(wrong.divergence.reference / 2, rel=1e-3)


def train_with_gradients_averaged_twice(comm, jobs, steps, gradient_step):
    from ms_zero.recipes.eager import EagerEngine
    from ms_zero.testing import parity

    forward_backward = EagerEngine.forward_backward

    def halved(self, *args, weight, **rest):
        forward_backward(self, *args, weight=weight / comm.world_size, **rest)

    EagerEngine.forward_backward = halved
    found = parity.train_cases(comm, jobs, steps, gradient_step)
    return [{**each, "losses": [loss * comm.world_size for loss in each["losses"]]} for each in found]


def test_an_overflow_counts_as_such_whether_it_is_inf_or_nan():
    norms = [[float("inf"), 0.5], [float("nan"), 0.5]]
    ours, theirs = (trace(grad_norms=values) for values in norms)
    assert compare(Result(case(1)), ours, theirs, Tolerance()).divergence is None
    result = compare(Result(case(1)), ours, trace(), Tolerance())
    assert result.divergence.what == "grad_norm"


def test_the_first_step_has_a_limit_of_its_own():
    tolerance = Tolerance(loss=1e-2, first=1e-5)
    late = compare(Result(case(1)), trace(losses=[3.0, 2.001]), trace(), tolerance)
    early = compare(Result(case(1)), trace(losses=[3.001, 2.0]), trace(), tolerance)
    assert late.divergence is None and early.divergence.where == "step 1"


def test_other_loss_scales_diverge_however_little():
    result = compare(Result(case(1)), trace(scales=[1.0, 0.5]), trace(), Tolerance(first=1.0))
    assert (result.divergence.what, result.divergence.where) == ("scale", "step 2")


def judged(name, group, **changes):
    found = trace(**changes)
    described = Case(name, 1, "runs/quickstart", SMALL, group=group)
    return Result(described, digests=found.digests(), scales=tuple(found.scales))


def test_a_group_shows_its_first_difference_in_a_bit():
    one_bit = {"params": changed("a", (0, 0), 1e-7)}
    results = [judged("plain", "x"), judged("same", "x"), judged("other", "x", **one_bit)]
    results.append(judged("alone", "y"))
    groups = bitwise_groups([*results, judged("no group", "")])
    assert list(groups) == ["x"]
    assert bitwise_difference(results[:2]) == ""
    assert bitwise_difference(groups["x"]) == "plain and other differ in param"


def test_layouts_that_disagree_about_the_loss_scale_are_told():
    same = [judged("one", ""), judged("two", "")]
    assert [len(each) for each in scale_histories(same).values()] == [1]
    other = judged("three", "", scales=[1.0, 2.0])
    assert [len(each) for each in scale_histories([*same, other]).values()] == [2]


def test_frozen_parameters_stay_and_16_bits_repeat_the_roundings():
    layout = ("train.accumulation_steps=1", "parallel.zero_stage=3")
    problem = (*SMALL, "precision.policy=bf16")
    frozen = Case("frozen", 2, "runs/quickstart", problem, layout, frozen=("*.mlp.*",))
    (result,) = run_cases([frozen], Plan(steps=2, gradient_step=1))
    assert result.divergence is None and result.precision == "bf16"
    assert result.max_rel["grad"] < 1e-6 < result.max_rel["fp32 grad"]


def test_the_figures_of_16_bits_stand_apart_from_those_of_fp32():
    spec = importlib.util.spec_from_file_location("parity", ROOT / "scripts" / "parity.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    results = [
        Result(case(1), "fp32", max_rel={"loss": 2e-7}),
        Result(case(2), "bf16", max_rel={"loss": 3e-5, "fp32 loss": 4e-4}),
    ]
    figures = script.metrics_of(results)
    assert (figures["cases"], figures["failures"], figures["max_rel_loss"]) == (2, 0, 2e-7)
    assert (figures["bf16_max_rel_loss"], figures["bf16_max_rel_fp32_loss"]) == (3e-5, 4e-4)
