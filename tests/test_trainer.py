"""One step: agreement between ranks, skipped steps, evaluation, state."""

import numpy as np
import pytest

from ms_zero import _compat
from ms_zero.comm import local
from ms_zero.config import load_config
from ms_zero.errors import UserError
from ms_zero.runner import build_trainer, load_data
from ms_zero.testing.workers import run_workers

TINY = (
    "model.num_layers=1",
    "model.hidden_size=16",
    "data.seq_len=16",
    "train.global_batch_size=12",
    "train.accumulation_steps=1",
    "optim.warmup_steps=3",
    "train.output_dir=unused",
    "data.source=files",
    "data.validation_fraction=0.5",
)


@pytest.fixture(scope="module", autouse=True)
def blocking():
    _compat.launch_blocking()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        text = "".join(chr(97 + (i * i + number) % 26) for i in range(40 + 37 * number))
        (folder / f"{number}.txt").write_text(text)
    return f"data.files=[{folder}/*.txt]"


def make(comm, files, *overrides):
    config = load_config("runs/quickstart", [*TINY, files, *overrides], comm.world_size).config
    text = load_data(config)
    return build_trainer(config, text, comm), text


def bits(trainer):
    return {shard.name: values.tobytes() for shard, values in trainer.engine.state_shards()}


def poison(trainer, value, *names):
    """Make the next gradients of some parameters on this rank not finite."""
    waiting = set(names)

    def spoil(bucket):
        deliver = bucket.deliver

        def spoiled(name, grad):
            if name in waiting:
                waiting.remove(name)
                grad = grad * np.float32(value)
            return deliver(name, grad)

        bucket.deliver = spoiled

    for bucket in trainer.engine.sharded.buckets:
        spoil(bucket)


def test_a_step_that_is_not_finite_changes_nothing_and_names_the_parameter(files):
    trainer, _ = make(local(), files)
    trainer.step()
    before, updates = bits(trainer), trainer.progress.updates
    poison(trainer, np.inf, "transformer.h.0.mlp.c_fc.weight")
    result = trainer.step()
    assert result.nonfinite == "transformer.h.0.mlp.c_fc.weight"
    assert bits(trainer) == before
    progress = trainer.progress
    assert (progress.step, progress.updates, progress.skipped) == (2, updates, 1)
    assert progress.consumed_samples == 24
    healthy = trainer.step()
    assert healthy.nonfinite is None
    assert healthy.lr == trainer.schedule(1), "the schedule waits for a skipped step"
    assert bits(trainer) != before


def test_of_several_broken_gradients_the_first_parameter_is_named(files):
    trainer, _ = make(local(), files)
    names = ("transformer.ln_f.weight", "transformer.h.0.ln_1.bias", "transformer.h.0.mlp.c_fc.weight")
    poison(trainer, np.nan, *names)
    assert trainer.step().nonfinite == "transformer.h.0.ln_1.bias"


def ranks_agree(comm, files):
    trainer, text = make(comm, files)
    trainer.step()
    if comm.rank == 1:
        poison(trainer, np.nan, "transformer.wpe.weight")
    before = bits(trainer)
    skipped = trainer.step(stop_requested=comm.rank == 2)
    same = bits(trainer) == before
    after = trainer.step()
    return {
        "skipped": [skipped.nonfinite, skipped.stop, same],
        "after": [after.loss, after.grad_norm, after.stop, after.num_tokens],
        "eval": trainer.evaluate(text.validation_loader(), 7),
    }


def test_one_rank_decides_for_all_and_evaluation_does_not_depend_on_the_layout(files):
    found = run_workers(3, ranks_agree, files)
    assert [f["skipped"] for f in found] == [["transformer.wpe.weight", True, True]] * 3
    assert len({str(f) for f in found}) == 1
    trainer, text = make(local(), files)
    trainer.step()
    poison(trainer, np.nan, "transformer.wpe.weight")
    trainer.step()
    result = trainer.step()
    assert found[0]["after"][:2] == pytest.approx([result.loss, result.grad_norm], rel=1e-6)
    assert found[0]["after"][2:] == [False, result.num_tokens]
    assert result.num_samples == 12
    assert found[0]["eval"] == pytest.approx(trainer.evaluate(text.validation_loader(), 7), rel=1e-6)


def test_evaluation_counts_each_sample_once_and_leaves_the_state_alone(files):
    trainer, text = make(local(), files)
    loader = text.validation_loader()
    before = bits(trainer)
    batch = loader.batch(0, 7)
    rows = zip(batch.input_ids[:, None], batch.labels[:, None])
    total = sum(trainer.engine.loss_sum(ids, labels) for ids, labels in rows)
    valid = (batch.labels != -100).sum()
    assert trainer.evaluate(loader, 7) == pytest.approx(total / valid, rel=1e-6)
    assert bits(trainer) == before
    assert trainer.evaluate(loader, 10**9) == pytest.approx(trainer.evaluate(loader, len(loader)), rel=1e-6)


def test_state_restores_progress_and_refuses_another_sequence(files):
    trainer, _ = make(local(), files)
    for _ in range(3):
        trainer.step()
    state = trainer.state()
    other, _ = make(local(), files, "train.global_batch_size=6")
    other.load_state(state)
    assert other.progress == trainer.progress
    assert other.engine.optimizer.num_updates == 3
    different, _ = make(local(), files, "train.seed=9")
    with pytest.raises(UserError, match=r"train\.seed"):
        different.load_state(state)


def test_clipping_bounds_the_update_and_not_the_reported_norm(files):
    free, _ = make(local(), files, "optim.clip_norm=0", "optim.kind=sgd", "optim.weight_decay=0")
    clipped, _ = make(local(), files, "optim.clip_norm=0.01", "optim.kind=sgd", "optim.weight_decay=0")
    start = {s.name: v.copy() for s, v in clipped.engine.state_shards()}
    norm = clipped.step().grad_norm
    assert norm == free.step().grad_norm > 0.01
    moved = sum(
        np.square(v.astype(np.float64) - start[s.name]).sum() for s, v in clipped.engine.state_shards()
    )
    assert np.sqrt(moved) == pytest.approx(0.01 * clipped.schedule(0), rel=1e-3)


def test_resets_reach_training_and_evaluation(files):
    losses = {}
    for reset in ("false", "true"):
        overrides = (f"data.reset_attention={reset}", f"data.reset_positions={reset}")
        trainer, text = make(local(), files, "data.seq_len=64", *overrides)
        losses[reset] = [trainer.evaluate(text.validation_loader(), 4), trainer.step().loss]
        assert losses[reset][0] == pytest.approx(expected_loss(trainer, text, reset == "true"), rel=1e-5)
    assert all(abs(on - off) > 1e-5 for on, off in zip(losses["true"], losses["false"], strict=True))


def expected_loss(trainer, text, reset):
    """Each document of the first validation samples through a fresh model on its own."""
    model = make(local(), "data.source=stdlib", "data.seq_len=64")[0].engine
    batch = text.validation_loader().batch(0, 4)
    total = 0.0
    for ids, labels, starts in zip(batch.input_ids, batch.labels, batch.document_starts, strict=True):
        borders = sorted(set(starts.tolist())) if reset else [0]
        for begin, end in zip(borders, [*borders[1:], 64], strict=True):
            total += model.loss_sum(ids[None, begin:end], labels[None, begin:end])
    return total / (batch.labels != -100).sum()
