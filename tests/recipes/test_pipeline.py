"""A model split over stages trains, evaluates, skips and resumes like one that is not."""

import numpy as np

from ms_zero.checkpoint import open_checkpoint, save
from ms_zero.config import load_config
from ms_zero.pipeline.schedule import in_flight_bound
from ms_zero.runner import build_trainer, load_data
from ms_zero.testing.parity import Plan, run_cases
from ms_zero.testing.pipeline_matrix import pipeline_cases
from ms_zero.testing.workers import run_workers

BASE = (
    "data.seq_len=16",
    "model.num_layers=4",
    "train.eval_interval=0",
    "train.global_batch_size=8",
    "train.accumulation_steps=4",
    "train.output_dir=unused",
)
DATA = ("parallel.dp_shard=2", "parallel.zero_stage=2")
PIPE = ("parallel.pp=2",)
INTERLEAVED = (*PIPE, "parallel.schedule=interleaved", "parallel.virtual_stages=2")


def test_a_pipeline_trains_like_one_process():
    results = list(run_cases(pipeline_cases(quick=True), Plan(steps=3)))
    wrong = [f"{result.case.name}: {result.divergence}" for result in results if result.divergence]
    assert wrong == [] and len(results) == 6


def trainer_of(comm, *overrides):
    config = load_config("runs/quickstart", [*BASE, *overrides], comm.world_size).config
    return build_trainer(config, load_data(config), comm)


def store(comm, trainer, root):
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    shards = trainer.engine.state_shards()
    return save(root, 2, shards, trainer.state(), exchange=comm.exchange, barrier=comm.barrier, **ranks)


def resumed(comm, path, *overrides):
    """Loss and norm of the step after a checkpoint, and the validation loss before it."""
    trainer, checkpoint = trainer_of(comm, *overrides), open_checkpoint(path)
    trainer.load_state(checkpoint.state)
    trainer.engine.load_state(checkpoint)
    validation = trainer.evaluate(trainer.loader, 7)
    result = trainer.step()
    return [validation, result.loss, result.grad_norm]


def go_on(comm, root):
    """Save under one layout, go on under others; both ways."""
    found = {}
    for name, layout in (("pipeline", PIPE), ("data", DATA)):
        trainer = trainer_of(comm, *layout)
        for _ in range(2):
            trainer.step()
        path = store(comm, trainer, f"{root}/{name}")
        names = open_checkpoint(path).names()
        assert len(names) == len(set(names))
        found[name] = [sorted(names), [resumed(comm, path, *new) for new in (PIPE, INTERLEAVED, DATA)]]
    return found


def test_a_checkpoint_goes_on_under_another_layout(tmp_path):
    found = run_workers(2, go_on, str(tmp_path), timeout_s=200)
    assert found[0] == found[1]  # loss, norm and validation are the same on all ranks
    assert found[0]["pipeline"][0] == found[0]["data"][0]
    results = np.array([values for part in ("pipeline", "data") for values in found[0][part][1]])
    np.testing.assert_allclose(results, np.broadcast_to(results[0], results.shape), rtol=2e-6)


def overflow(comm):
    """What a step with gradients beyond fp16 does, and one after it; and who stops when one rank wants to."""
    found = []
    for layout in (PIPE, DATA):
        trainer = trainer_of(comm, *layout, "precision.policy=fp16", "precision.initial_scale=2e9")
        before = trainer.engine.sharded.loss_scale
        results = [trainer.step(stop_requested=comm.rank == 1) for _ in range(2)]
        scales = [before, trainer.engine.sharded.loss_scale]
        found.append([scales, [result.nonfinite for result in results], [r.stop for r in results]])
    return found


def test_all_ranks_skip_a_step_that_overflows():
    found = run_workers(2, overflow, timeout_s=100)
    assert found[0] == found[1]
    (scales, nonfinite, stops), data = found[0]
    assert data == [scales, nonfinite, stops]
    assert all(nonfinite) and stops == [True, True] and scales[1] < scales[0]


def peaks(comm):
    trainers = [trainer_of(comm, *PIPE, f"parallel.schedule={name}") for name in ("gpipe", "1f1b", "zb-h1")]
    trainers.append(trainer_of(comm, *INTERLEAVED))
    for trainer in trainers:
        trainer.step()
    return [trainer.engine.outcome.peak_in_flight for trainer in trainers]


def test_microbatches_in_flight_are_those_of_the_schedule():
    found = run_workers(2, peaks, timeout_s=100)
    for rank in range(2):
        bounds = [in_flight_bound(name, rank, 2, 4) for name in ("gpipe", "1f1b", "zb-h1")]
        assert found[rank] == [*bounds, in_flight_bound("interleaved", rank, 2, 4, 2)]
