"""Training a model with experts in one process: what the loss is made of, and what follows a step."""

import numpy as np
import pytest

from ms_zero.comm import local
from ms_zero.config import load_config
from ms_zero.data.run import load_data
from ms_zero.plan.flops import train_flops_per_token
from ms_zero.plan.models import load_model
from ms_zero.plan.parameters import active_parameters
from ms_zero.runner import build_trainer

SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.expert_ffn_hidden_size=24",
    "data.seq_len=16",
    "train.global_batch_size=6",
    "train.eval_interval=0",
    "optim.warmup_steps=0",
    "train.output_dir=unused",
)


def trainer_of(run, *overrides):
    config = load_config(f"runs/{run}-tiny", [*SMALL, *overrides]).config
    return build_trainer(config, load_data(config), local()), config


def first_step(*overrides):
    trainer, _ = trainer_of("mixtral", "train.accumulation_steps=1", *overrides)
    before = trainer.evaluate(trainer.loader, 6)
    return trainer.step(), before


@pytest.fixture(scope="module")
def without_loss():
    return first_step("model.balance_coefficient=0", "model.z_coefficient=0")


def test_the_loss_of_a_step_has_the_auxiliary_one_and_evaluation_has_not(without_loss):
    plain, evaluated = without_loss
    assert plain.loss == pytest.approx(evaluated, rel=1e-6)
    step, again = first_step("model.balance_coefficient=0.5", "model.z_coefficient=0")
    assert again == evaluated
    # Two layers, each with a balance of a little above 1.
    assert 1.0 < step.loss - plain.loss < 1.3
    assert step.grad_norm != plain.grad_norm


@pytest.mark.parametrize("overrides", [(), ("model.capacity_factor=1.0",)])
def test_microbatches_make_no_difference_to_loss_and_gradient(overrides):
    found = []
    for count in (1, 3, 6):
        trainer, _ = trainer_of("mixtral", f"train.accumulation_steps={count}", *overrides)
        step = trainer.step()
        found.append([step.loss, step.grad_norm])
    np.testing.assert_allclose(found, [found[0]] * 3, rtol=2e-6)


def test_a_bias_follows_the_load_of_a_step_and_not_of_an_evaluation():
    trainer, config = trainer_of("deepseek", "train.accumulation_steps=2", "model.num_layers=3")
    trainer.evaluate(trainer.loader, 6)
    speed, kept = config.model.router_bias_speed, trainer.engine.sharded.kept
    assert len(kept) == 2 and not any(bias.asnumpy().any() for bias in kept.values())
    trainer.step()
    for bias in kept.values():
        values = bias.asnumpy()
        assert set(np.round(values / speed).astype(int)) <= {-1, 0, 1}
        assert values.any() and np.abs(values).max() == pytest.approx(speed)


BUDGET = ("device", "memory.recompute=budget", "memory.budget_gb=0.0005")


@pytest.mark.parametrize("overrides", [("host",), BUDGET])
def test_activations_elsewhere_and_recompute_by_a_budget_change_no_bit(overrides):
    found = []
    for activations in (("device",), overrides):
        settings = (f"memory.activations={activations[0]}", *activations[1:])
        trainer, _ = trainer_of("deepseek", "train.accumulation_steps=2", *settings)
        found.append([(step.loss, step.grad_norm) for step in (trainer.step(), trainer.step())])
    assert found[0] == found[1]
    assert ("2 of 2 blocks in full" in trainer.engine.notes[0]) == (overrides is BUDGET)


def test_flops_of_a_configured_model_are_those_of_its_active_parameters():
    """Six for each element of a matrix that a token meets, at sequence length 0."""
    for name in ("mixtral-tiny", "deepseek-tiny"):
        config = load_config(f"runs/{name}").config.model
        active = active_parameters(load_model(name))
        aside = config.vocab_size * config.hidden_size  # the embedding is no product
        assert train_flops_per_token(config, 0) / 6 == pytest.approx(active - aside, rel=0.005)
