"""The harness itself: it must pass what is equal and point at what is not."""

import numpy as np
import pytest

from ms_zero.testing import parity
from ms_zero.testing.parity import Case, Plan, Tolerance, Trace, compare, run_cases

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
    values = {"losses": [3.0, 2.0], "grad_norms": [1.0, 0.5], "grads": tensors, "params": tensors}
    return Trace(**values | changes)


def changed(name, index, delta):
    tensors = {key: value.copy() for key, value in trace().params.items()}
    tensors[name][index] += delta
    return tensors


def test_equal_traces_have_no_difference():
    result = compare(case(1), trace(), trace(), Tolerance())
    assert result.divergence is None
    assert result.max_rel == {"loss": 0.0, "grad_norm": 0.0, "grad": 0.0, "param": 0.0}


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
    result = compare(case(1), trace(**changes), trace(), Tolerance())
    assert (result.divergence.what, result.divergence.where) == (what, where)
    assert result.divergence.value != result.divergence.reference


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("loss", {"losses": [3.0, np.nan]}), ("param", {"params": changed("a", (1, 1), np.nan)})],
)
def test_nan_is_an_infinite_difference(kind, changes):
    assert compare(case(1), trace(**changes), trace(), Tolerance()).max_rel[kind] == np.inf


def test_a_reference_of_zero_is_compared_absolutely():
    zero = {"grad_norms": [0.0, 0.5]}
    assert compare(case(1), trace(**zero), trace(**zero), Tolerance()).divergence is None
    result = compare(case(1), trace(grad_norms=[0.25, 0.5]), trace(**zero), Tolerance())
    assert result.max_rel["grad_norm"] == 0.25 and result.divergence.where == "step 1"


def test_noise_in_a_parameter_without_gradient_is_measured_against_the_model():
    result = compare(case(1), trace(grads=changed("b", 0, 1e-9)), trace(), Tolerance())
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

    def halved(self, *args, weight, last):
        forward_backward(self, *args, weight=weight / comm.world_size, last=last)

    EagerEngine.forward_backward = halved
    found = parity.train_cases(comm, jobs, steps, gradient_step)
    return [([loss * comm.world_size for loss in losses], norms) for losses, norms in found]
