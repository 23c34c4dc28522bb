"""A whole step as one graph, executed on CPU: the numbers of the steps in three graphs."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor
from mindspore.parallel.nn import GradAccumulation

from ms_zero import _compat, models
from ms_zero.config import load_config
from ms_zero.graph.build import build_update
from ms_zero.graph.network import LossNetwork
from ms_zero.graph.reduce import SameGradients
from ms_zero.graph.step import GraphStep, graph_mode
from ms_zero.graph.train import build_train_cell, trained_parameters
from ms_zero.graph.update import step_scalars
from ms_zero.precision.scaler import DynamicLossScaler, scaling_rule
from ms_zero.recipes.build import build_model

SMALL = (
    "model.num_layers=1",
    "model.hidden_size=16",
    "model.num_heads=2",
    "model.vocab_size=40",
    "data.tokenizer=none",
    "data.source=megatron",
    "data.files=[unused]",
    "data.seq_len=8",
    "train.global_batch_size=4",
    "train.accumulation_steps=2",
    "parallel.zero_stage=0",
    "optim.clip_norm=0.5",
)
RATES = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    _compat.launch_blocking()
    monkeypatch.chdir(tmp_path)


def parts_of(optimizer):
    config = load_config("runs/quickstart", [*SMALL, f"optim.kind={optimizer}"]).config
    model = build_model(config.model)
    models.initialise(model, seed=1)
    # 2^66 in the gradient makes a sum of squares that fp32 does not hold.
    scaler = DynamicLossScaler(scaling_rule("torch", initial=2.0**66, window=2))
    return config, model, scaler


def batches(count):
    rng = np.random.default_rng(0)
    return [rng.integers(0, 40, (2, 4, 8)).astype(np.int32) for _ in range(count)]


@pytest.mark.parametrize(("optimizer", "target"), [("adamw", "CPU-portable"), ("sgd", "CPU")])
def test_one_graph_makes_the_steps_of_three(optimizer, target):
    config, model, scaler = parts_of(optimizer)
    update = build_update(config.optim, model, trained_parameters(model))
    step = GraphStep(LossNetwork(model), update, scaler=scaler, **RATES)
    config, other, scaler = parts_of(optimizer)
    wrap = lambda network: GradAccumulation(network, 2)  # noqa: E731
    parts = build_train_cell(
        config, other, scaler=scaler, wrap=wrap, gradients=lambda _: SameGradients(), target=target
    )
    updates, applied = 0, []
    for ids, labels in batches(5):
        for half in (slice(0, 2), slice(2, 4)):
            step.forward_backward(Tensor(ids[half]), Tensor(labels[half]), weight=1 / 32)
        summary, decision = step.finish(lr=0.1, clip_norm=0.5)
        loss, norm, finite = run(parts, ids, labels, optimizer, updates + 1)
        updates += finite
        applied.append(finite)
        assert finite == decision.finite
        if finite:
            assert [loss, norm] == pytest.approx([summary.loss, decision.norm], rel=1e-5)
        assert parts.scaler.scale == step.loss_scale
    assert applied == [False, False, False, True, True]
    for ours, theirs in zip(parts.params, step.params, strict=True):
        assert ours.name == theirs.name
        if "k_proj.bias" not in ours.name:  # its gradient is zero but for rounding, which Adam amplifies
            np.testing.assert_allclose(ours.asnumpy(), theirs.asnumpy(), rtol=1e-3, atol=2e-5)


def run(parts, ids, labels, optimizer, step):
    scale = parts.scaler.scale
    parts.cell.loss_factor.set_data(Tensor(np.float32(scale / 32)))
    scalars = step_scalars(optimizer, lr=0.1, step=step, grad_scale=1.0, **RATES)
    parts.cell.decayed_scalars.set_data(Tensor(scalars[0]))
    parts.cell.plain_scalars.set_data(Tensor(scalars[1]))
    with graph_mode():
        loss, norm, finite = parts.cell(Tensor(ids), Tensor(labels))
    assert ms.get_context("mode") == ms.PYNATIVE_MODE
    return float(loss.asnumpy()) / scale, float(norm.asnumpy()), bool(finite.asnumpy())
