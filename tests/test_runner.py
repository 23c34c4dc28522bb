"""A whole run: log, checkpoints, resume, graceful stop, broken runs."""

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from ms_zero import _compat, runner
from ms_zero.checkpoint import latest, open_checkpoint
from ms_zero.comm import local
from ms_zero.config import load_config
from ms_zero.errors import UserError
from ms_zero.plan.calibrate import read_run
from ms_zero.testing.workers import run_workers
from ms_zero.trainer import Trainer

TINY = (
    "model.num_layers=1",
    "model.hidden_size=16",
    "data.seq_len=16",
    "data.source=files",
    "data.validation_fraction=0.5",
    "train.global_batch_size=8",
    "train.accumulation_steps=2",
    "train.steps=6",
    "train.log_interval=1",
    "train.eval_interval=3",
    "train.eval_samples=4",
    "optim.warmup_steps=2",
    "checkpoint.interval=2",
    "checkpoint.keep=0",
)


@pytest.fixture(scope="module", autouse=True)
def blocking():
    _compat.launch_blocking()


@pytest.fixture
def options(tmp_path):
    for number in range(6):
        text = "".join(chr(97 + i * i % 26) for i in range(90 + 37 * number))
        (tmp_path / f"{number}.txt").write_text(text)
    return [*TINY, f"data.files=[{tmp_path}/*.txt]", f"train.output_dir={tmp_path}/run"]


def run(options, comm=None):
    comm = comm or local()
    return runner.run(load_config("runs/quickstart", options, comm.world_size), comm)


def tensors(path):
    checkpoint = open_checkpoint(path)
    return {name: checkpoint.read(checkpoint.whole(name)) for name in checkpoint.names()}


def assert_same_bits(one, two):
    one, two = tensors(one), tensors(two)
    assert one.keys() == two.keys()
    assert [name for name in one if one[name].tobytes() != two[name].tobytes()] == []


def lines(folder, rank=0):
    return [json.loads(line) for line in (folder / f"logs/metrics-{rank:05d}.jsonl").read_text().splitlines()]


def test_a_run_logs_evaluates_and_saves(options, tmp_path, capsys):
    assert run(options) == 0
    steps = [line for line in lines(tmp_path / "run") if line["event"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["consumed_samples"] for line in steps] == [8, 16, 24, 32, 40, 48]
    assert steps[-1]["consumed_tokens"] == 48 * 16
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert steps[-1]["mfu"] is None
    evaluations = [line for line in lines(tmp_path / "run") if line["event"] == "validation"]
    assert [line["step"] for line in evaluations] == [3, 6]
    assert evaluations[1]["loss"] < evaluations[0]["loss"]
    assert 0 < evaluations[0]["unigram_entropy"] == evaluations[1]["unigram_entropy"] < np.log(257)
    state = open_checkpoint(tmp_path / "run/checkpoints/step-00000004").state
    assert state["progress"] == {"step": 4, "updates": 4, "skipped": 0, "consumed_samples": 32}
    assert state["rng"] == {"seed": 1234}
    assert state["data"]["consumed_samples"] == 32
    assert state["config"]["train"]["steps"] == 6
    saved = sorted(path.name for path in (tmp_path / "run/checkpoints").iterdir())
    assert saved == ["step-00000002", "step-00000004", "step-00000006"]
    measured = read_run(tmp_path / "run/logs/metrics-00000.jsonl")
    assert (measured.steps, measured.world_size) == (6, 1)
    assert json.loads(json.dumps(asdict(measured.config))) == state["config"]
    assert measured.memory_bytes > 1e8
    shown = capsys.readouterr().out
    assert "6/6" in shown
    assert "validation" in shown
    assert f"{tmp_path}/run/checkpoints/step-00000006" in shown


def test_the_batch_grows_as_told_and_a_resumed_run_goes_on_growing(options, tmp_path):
    growing = ["train.rampup_samples=16", "train.rampup_start=4", "train.rampup_increment=4"]
    run([*options, *growing, "train.accumulation_steps=auto", "train.micro_batch_size=2"])
    steps = [line for line in lines(tmp_path / "run") if line["event"] == "step"]
    assert [line["consumed_samples"] for line in steps] == [4, 8, 12, 16, 24, 32]
    at_three = f"checkpoint.resume={tmp_path}/run/checkpoints/step-00000002"
    again = [*options, *growing, "train.accumulation_steps=auto", "train.micro_batch_size=4", at_three]
    run([*again, f"train.output_dir={tmp_path}/again"])
    second = [line for line in lines(tmp_path / "again") if line["event"] == "step"]
    assert [line["consumed_samples"] for line in second] == [12, 16, 24, 32]
    assert second[-1]["loss"] == pytest.approx(steps[-1]["loss"], rel=1e-6)


def resumed(comm, options, resume):
    run([*options, f"checkpoint.resume={resume}"], comm)


@pytest.mark.parametrize(
    ("world_size", "more"), [(1, []), (2, ["data.reset_attention=true", "data.reset_positions=true"])]
)
def test_resume_on_the_same_layout_is_bitwise(options, tmp_path, world_size, more):
    options = [*options, *more]
    run_workers(world_size, resumed, options, "never")
    whole = tmp_path / "run/checkpoints"
    again = [*options, f"train.output_dir={tmp_path}/again"]
    run_workers(world_size, resumed, again, str(whole / "step-00000002"))
    assert_same_bits(whole / "step-00000006", tmp_path / "again/checkpoints/step-00000006")
    first = {line["step"]: line for line in lines(tmp_path / "run") if line["event"] == "step"}
    second = {line["step"]: line for line in lines(tmp_path / "again") if line["event"] == "step"}
    assert sorted(second) == [3, 4, 5, 6]
    for key in ("loss", "lr", "grad_norm", "consumed_samples"):
        assert [second[step][key] for step in second] == [first[step][key] for step in second], key


def test_a_finished_run_does_nothing_and_a_longer_one_goes_on(options, tmp_path, capsys):
    run(options)
    capsys.readouterr()
    assert run(options) == 0
    assert "nothing to do: 6 of 6 steps" in capsys.readouterr().out
    assert run([*options, "train.steps=8"]) == 0
    assert open_checkpoint(latest(tmp_path / "run/checkpoints")).state["progress"]["step"] == 8


def test_a_signal_finishes_the_step_saves_and_ends_well(options, tmp_path, capsys, monkeypatch):
    run([*options, "train.steps=4", f"train.output_dir={tmp_path}/whole"])
    step = Trainer.step

    def interrupted(self, **arguments):
        if self.progress.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, **arguments)

    handler = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(Trainer, "step", interrupted)
    assert run([*options, "train.steps=4", "checkpoint.interval=0"]) == 0
    assert signal.getsignal(signal.SIGTERM) is handler
    stopped_at = open_checkpoint(latest(tmp_path / "run/checkpoints")).step
    assert stopped_at in (3, 4)
    assert f"stopped on request after step {stopped_at} of 4" in capsys.readouterr().out
    monkeypatch.setattr(Trainer, "step", step)
    assert run([*options, "train.steps=4", "checkpoint.interval=0"]) == 0
    assert_same_bits(tmp_path / "whole/checkpoints/step-00000004", tmp_path / "run/checkpoints/step-00000004")


def test_the_second_interrupt_ends_at_once(options, tmp_path, monkeypatch):
    def interrupted(self, **arguments):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        raise AssertionError("the second signal did not end the run")

    monkeypatch.setattr(Trainer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(options)
    assert latest(tmp_path / "run/checkpoints") is None


def test_a_signal_before_the_training_ends_at_once(options, monkeypatch):
    """Building a large model or reading data takes long, and there is nothing to save."""
    monkeypatch.setattr(runner, "load_data", lambda config: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(options)
    finally:
        signal.signal(signal.SIGINT, before)


def test_gradients_that_stay_broken_end_the_run_and_every_skip_is_logged(options, tmp_path, monkeypatch):
    forward_backward = runner.build_engine

    def broken(*args):
        engine = forward_backward(*args)
        original = engine.forward_backward
        engine.forward_backward = lambda *args, **options: original(*args, **{**options, "weight": np.nan})
        return engine

    monkeypatch.setattr(runner, "build_engine", broken)
    with pytest.raises(UserError, match=r"10 steps in a row .* first [a-z_.0-9]+"):
        run([*options, "train.steps=50"])
    skips = [line for line in lines(tmp_path / "run") if line["event"] == "skipped_step"]
    assert [line["step"] for line in skips] == list(range(1, 11))
    assert all(line["first_nonfinite"].startswith("transformer.") for line in skips)


def test_a_missing_checkpoint_and_another_corpus_are_refused(options, tmp_path):
    with pytest.raises(UserError, match="no such checkpoint"):
        run([*options, f"checkpoint.resume={tmp_path}/absent"])
    run(options)
    Path(tmp_path / "3.txt").write_text("something else " * 20)
    with pytest.raises(UserError, match="another corpus"):
        run([*options, "train.steps=9"])


def refusal(options, comm):
    try:
        run(options, comm)
    except UserError as error:
        return str(error)
    return "accepted"


def different_workers(comm, options, folder):
    own = Path(folder) / str(comm.rank)
    own.mkdir()
    for name in "abcd":
        (own / f"{name}.txt").write_text(f"{name} {comm.rank} " * 50)
    os.chdir(own)
    other_text = refusal([*options, "data.files=['*.txt']"], comm)
    return [other_text, refusal([*options, f"train.steps={7 + comm.rank}"], comm)]


def test_workers_with_other_text_or_another_config_are_refused(options, tmp_path):
    for other_text, other_config in run_workers(2, different_workers, options, str(tmp_path)):
        assert "rank 1 reads other text than rank 0" in other_text
        assert "rank 1 has another config" in other_config


def trained(comm, options):
    run(options, comm)


def test_debug_collectives_changes_no_bit(options, tmp_path):
    short = [*options, "train.steps=2"]
    run_workers(2, trained, short)
    run_workers(2, trained, [*short, "train.debug_collectives=true", f"train.output_dir={tmp_path}/debug"])
    assert_same_bits(*(tmp_path / folder / "checkpoints/step-00000002" for folder in ("run", "debug")))
