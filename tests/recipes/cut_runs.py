"""Runs of tests on models that are cut over two ranks or more: trained, evaluated, and gone on with."""

from dataclasses import replace

import numpy as np

from ms_zero.checkpoint import open_checkpoint, save
from ms_zero.comm import local
from ms_zero.config import load_config
from ms_zero.data.run import load_data
from ms_zero.runner import build_trainer

SMALL = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_heads=4",
    "model.ffn_hidden_size=51",
    "model.max_seq_len=16",
    "data.seq_len=16",
    "train.global_batch_size=4",
    "train.accumulation_steps=1",
    "train.eval_interval=0",
    "optim.warmup_steps=1",
    "model.dropout=0.1",
)
BF16 = ("precision.policy=bf16",)
FP16 = ("precision.policy=fp16", "precision.loss_scale=dynamic", "precision.initial_scale=16777216")


def trainer_of(comm, *overrides):
    config = load_config("runs/quickstart", [*SMALL, *overrides], comm.world_size).config
    return build_trainer(config, load_data(config), comm), config


def steps(trainer, count):
    results = [trainer.step() for _ in range(count)]
    return [[result.loss, result.grad_norm, result.nonfinite] for result in results]


def trained(comm, *overrides, count, held_out):
    """Losses and norms, loss scales, and the loss on `held_out` other samples."""
    trainer, config = trainer_of(comm, *overrides)
    history, scales = [], []
    for _ in range(count):
        history += steps(trainer, 1)
        scales.append(trainer.engine.sharded.loss_scale)
    return [history, scales, trainer.evaluate(load_data(config).validation_loader(), held_out)]


def resumed(comm, root, layout, others, *, before, after):
    """Steps in one layout, saved, and more in each of others; and the same in one go."""
    first, _ = trainer_of(comm, *layout)
    begun = steps(first, before)
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    shards = first.engine.state_shards()
    path = save(root, before, shards, {}, exchange=comm.exchange, barrier=comm.barrier, **ranks)
    progress = replace(first.progress)
    begun += steps(first, after)
    found = []
    for overrides in others:
        other, _ = trainer_of(comm, *overrides)
        other.engine.load_state(open_checkpoint(path))
        other.progress = replace(progress)
        other.engine.optimizer.num_updates = progress.updates
        found.append(steps(other, after))
    return [str(path), begun, found]


def assert_like_one_process(reports, name, overrides, tolerance, **numbers):
    """Each rank's `trained` is that of one process, and all ranks have the same."""
    history, scales, validation = trained(local(), *overrides, **numbers)
    for report in reports:
        ours, our_scales, our_validation = report["runs"][name]
        found = [[loss, norm] for loss, norm, nonfinite in ours if nonfinite is None]
        expected = [[loss, norm] for loss, norm, nonfinite in history if nonfinite is None]
        np.testing.assert_allclose(found, expected, rtol=tolerance)
        np.testing.assert_allclose(our_validation, validation, rtol=tolerance)
        assert our_scales == scales
        assert [entry[2] is None for entry in ours] == [entry[2] is None for entry in history]
    assert all(report["runs"] == reports[0]["runs"] for report in reports)
