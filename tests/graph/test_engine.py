"""Runs with `engine: graph`: the numbers of the eager engine, and its checkpoints."""

import numpy as np
import pytest

from ms_zero import _compat
from ms_zero.checkpoint import open_checkpoint, save
from ms_zero.comm import local
from ms_zero.config import load_config
from ms_zero.data.run import load_data
from ms_zero.graph.engine import GraphEngine
from ms_zero.runner import build_trainer
from ms_zero.testing import run_workers

SMALL = (
    "data.source=files",
    "data.validation_fraction=0.5",
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=4",
    "data.seq_len=16",
    "train.global_batch_size=8",
    "train.eval_interval=0",
    "optim.warmup_steps=2",
    "optim.lr=0.003",
    "parallel.zero_stage=0",
)
GRAPH = ("engine=graph",)
RUNS = {
    # Two microbatches on one worker, a norm that is clipped in every step, and dropout.
    "gpt": ("train.accumulation_steps=2", "optim.clip_norm=0.5", "model.dropout=0.2"),
    # The sum of squares of gradients that are scaled by 2^80 is not finite in fp32: two steps are skipped
    # before the scale has come down.
    "gpt scaled": (
        "train.accumulation_steps=4",
        "precision.loss_scale=dynamic",
        "precision.loss_scale_convention=torch",
        "precision.initial_scale=1e19",
        "precision.growth_interval=4",
        "optim.kind=sgd",
        "optim.lr=0.1",
    ),
    # The loss scale starts so high that fp16 gradients overflow.
    "gpt fp16": (
        "train.accumulation_steps=1",
        "precision.policy=fp16",
        "precision.initial_scale=16777216",
        "precision.loss_scale_convention=torch",
    ),
}
LLAMA = ("data.reset_attention=true", "data.reset_positions=true", "train.accumulation_steps=2")
LLAMA += ("model.dropout=0.1",)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """MindSpore leaves a folder custom_kernel_meta where a custom operator is made."""
    _compat.launch_blocking()
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A small corpus: tokenizing the standard library for each trainer would take most of the time."""
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        text = "".join(chr(97 + (i * i + number) % 26) for i in range(400 + 37 * number))
        (folder / f"{number}.txt").write_text(text)
    return f"data.files=[{folder}/*.txt]"


def trainer_of(comm, *overrides, preset="runs/quickstart"):
    config = load_config(preset, [*SMALL, *overrides], comm.world_size).config
    return build_trainer(config, load_data(config), comm), config


def steps(trainer, count):
    found = []
    for _ in range(count):
        result = trainer.step()
        scale = trainer.engine.sharded.loss_scale
        found.append([result.loss, result.grad_norm, result.nonfinite is None, scale])
    return found


def weights(trainer):
    return {shard.name: values for shard, values in trainer.engine.state_shards()}


def check_equal(ours, expected, rtol=1e-5):
    """Losses and norms of applied steps; which were applied, and the loss scales, exactly."""
    assert [row[2:] for row in ours] == [row[2:] for row in expected]
    applied = [[row[:2] for row in rows if row[2]] for rows in (ours, expected)]
    np.testing.assert_allclose(*applied, rtol=rtol)


def job(comm, root, files):
    """Two workers: ten steps of each engine; then a checkpoint of each, resumed by the other."""
    overrides = (*RUNS["gpt"], "parallel.bucket_mb=0.01", files)
    trainers = [trainer_of(comm, *overrides, *engine)[0] for engine in ((), GRAPH)]
    histories = [steps(trainer, 3) for trainer in trainers]
    saved = [write(comm, f"{root}/{number}", trainer) for number, trainer in enumerate(trainers)]
    histories = [rows + steps(trainer, 7) for rows, trainer in zip(histories, trainers, strict=True)]
    crossed = [go_on(trainer, path, 7) for trainer, path in zip(trainers, reversed(saved), strict=True)]
    skipped = overflow(comm, trainers[1])
    return {"histories": histories, "crossed": crossed, "saved": saved, "overflow": skipped}


def write(comm, root, trainer):
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    shards = trainer.engine.state_shards()
    return str(save(root, 3, shards, trainer.state(), exchange=comm.exchange, barrier=comm.barrier, **ranks))


def go_on(trainer, path, count):
    checkpoint = open_checkpoint(path)
    trainer.load_state(checkpoint.state)
    trainer.engine.load_state(checkpoint)
    return steps(trainer, count)


def overflow(comm, trainer):
    """One rank's loss is infinite: nothing changes anywhere, and the parameter is named."""
    before = weights(trainer)
    run, factor = trainer.engine.forward_backward, np.inf if comm.rank == 1 else 1.0
    trainer.engine.forward_backward = lambda *args, weight, **how: run(*args, weight=weight * factor, **how)
    result = trainer.step()
    trainer.engine.forward_backward = run
    same = all(np.array_equal(values, before[name]) for name, values in weights(trainer).items())
    return [result.nonfinite, same, trainer.step().nonfinite, trainer.progress.skipped]


@pytest.fixture(scope="module")
def reports(tmp_path_factory, files):
    return run_workers(2, job, str(tmp_path_factory.mktemp("state")), files, timeout_s=400)


@pytest.mark.parametrize("name", [*RUNS, "llama"])
def test_ten_steps_and_an_evaluation_equal_those_of_the_eager_engine(name, files):
    overrides = (*(LLAMA if name == "llama" else RUNS[name]), files)
    preset = "runs/llama-tiny" if name == "llama" else "runs/quickstart"
    eager, config = trainer_of(local(), *overrides, preset=preset)
    graph, _ = trainer_of(local(), *overrides, *GRAPH, preset=preset)
    assert isinstance(graph.engine, GraphEngine)
    expected, ours = steps(eager, 10), steps(graph, 10)
    check_equal(ours, expected, rtol=5e-3 if name == "gpt fp16" else 1e-5)
    assert graph.progress == eager.progress
    held_out = load_data(config).validation_loader()
    rtol = 5e-3 if name == "gpt fp16" else 1e-5
    assert graph.evaluate(held_out, 10) == pytest.approx(eager.evaluate(held_out, 10), rel=rtol)
    assert expected[-1][0] < expected[0][0]
    assert (eager.progress.skipped > 0) == (name in ("gpt scaled", "gpt fp16"))


def test_two_workers_take_the_steps_of_the_eager_engine_and_of_one_worker(reports, files):
    alone, _ = trainer_of(local(), *RUNS["gpt"], "train.accumulation_steps=4", files, *GRAPH)
    expected = steps(alone, 10)
    assert reports[0] == reports[1]
    eager, graph = reports[0]["histories"]
    check_equal(graph, eager)
    check_equal(graph, expected)
    # What is compiled sees the weights of a checkpoint.
    check_equal(go_on(alone, reports[0]["saved"][1], 7), graph[3:])


def test_each_engine_goes_on_from_the_checkpoint_of_the_other(reports):
    for rows in reports[0]["crossed"]:
        check_equal(rows, reports[0]["histories"][0][3:])


def test_the_overflow_of_one_rank_skips_the_step_on_all(reports):
    for report in reports:
        assert report["overflow"] == ["transformer.wte.weight", True, None, 1]
