"""One rank's inf skips the step on every rank and changes nothing but the loss scale."""

import hashlib
import itertools

import numpy as np
import pytest
from mindspore import Tensor

from ms_zero.config import load_config
from ms_zero.runner import build_trainer, load_data
from ms_zero.testing import run_workers

SMALL = (
    "model.num_layers=2",
    "model.hidden_size=26",
    "model.num_heads=2",
    "model.ffn_hidden_size=37",
    "model.max_seq_len=16",
    "data.seq_len=16",
    "train.global_batch_size=12",
    "train.accumulation_steps=2",
    "train.eval_interval=0",
    "train.output_dir=unused",
    "optim.warmup_steps=3",
    "optim.eps=1e-4",
    "parallel.sync_each_microbatch=true",
)
HALVING = ("precision.loss_scale_convention=torch", "precision.initial_scale=1024")
POISONED = "transformer.h.1.mlp.c_fc.weight"
PRECISIONS = ("fp32", "bf16", "fp16")


def build(comm, stage, precision):
    scaling = HALVING if precision == "fp16" else ()
    layout = (f"parallel.zero_stage={stage}", f"precision.policy={precision}", *scaling)
    config = load_config("runs/quickstart", [*SMALL, *layout], comm.world_size).config
    return build_trainer(config, load_data(config), comm)


def poison(trainer, value):
    """Put a value into one element of one gradient of this rank, once: in the next microbatch."""
    left = [value]
    for bucket in trainer.engine.sharded.buckets:

        def deliver(name, grad, original=bucket.deliver):
            if name == POISONED and left:
                array = grad.asnumpy().copy()
                array.reshape(-1)[5] = left.pop()
                grad = Tensor(array)
            original(name, grad)

        bucket.deliver = deliver
    return left


def state(trainer):
    """Every bit of this rank's parameters and moments."""
    digest = hashlib.sha256()
    for shard, values in trainer.engine.state_shards():
        digest.update(shard.name.encode() + np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def parameters(trainer, comm):
    """The parameters of all ranks, whatever the layout."""
    digest = hashlib.sha256()
    names = dict(trainer.engine.sharded.whole_values())
    for name in sorted(names):
        digest.update(np.ascontiguousarray(names[name].asnumpy()).tobytes())
    return digest.hexdigest()


def one_skip(comm, stage, precision, value):
    trainer = build(comm, stage, precision)
    sharded = trainer.engine.sharded
    first = trainer.step()
    before, scale = state(trainer), sharded.loss_scale
    left = poison(trainer, value) if comm.rank == 1 else []
    skipped = trainer.step()
    unchanged = state(trainer) == before
    found = {
        "fired": not left,
        "unchanged": unchanged,
        "nonfinite": skipped.nonfinite,
        "norm is finite": bool(np.isfinite(skipped.grad_norm)),
        "scales": [scale, sharded.loss_scale],
        "progress": list(vars(trainer.progress).values()),
        "updates": trainer.engine.optimizer.num_updates,
    }
    third = trainer.step()
    found["lr"] = [first.lr, skipped.lr, third.lr]
    found["third"] = [third.nonfinite, third.loss, third.grad_norm, parameters(trainer, comm)]
    trainer.engine.optimizer.close()
    return found


def skip_in_every_layout(comm):
    points = itertools.product(PRECISIONS, (0, 1, 2, 3))
    return [one_skip(comm, stage, precision, float("inf")) for precision, stage in points] + [
        one_skip(comm, 3, "bf16", float("nan"))
    ]


@pytest.fixture(scope="module")
def outcomes():
    return run_workers(2, skip_in_every_layout, timeout_s=300)


def test_ranks_agree_and_the_inf_was_there(outcomes):
    assert all(each["fired"] for rank in outcomes for each in rank)
    assert [{**each} for each in outcomes[0]] == outcomes[1]


def test_nothing_changes_but_the_data_position(outcomes):
    for each in outcomes[0]:
        assert each["unchanged"] and each["updates"] == 1
        assert not each["norm is finite"] and each["nonfinite"] == POISONED
        assert each["progress"] == [2, 1, 1, 24]  # steps, updates, skipped, consumed samples
        first, skipped, third = each["lr"]
        assert first < skipped == third  # of the same update


def test_the_loss_scale_follows_alike_in_all_layouts(outcomes):
    expected = {"fp32": [1.0, 1.0], "bf16": [1.0, 1.0], "fp16": [1024.0, 512.0]}
    for precision, layouts in zip(PRECISIONS, by_precision(outcomes[0]), strict=True):
        assert [each["scales"] for each in layouts] == [expected[precision]] * 4


def test_training_goes_on_with_the_same_bits_in_every_stage(outcomes):
    for layouts in by_precision(outcomes[0]):
        thirds = [each["third"] for each in layouts]
        assert thirds[0][0] is None and thirds == [thirds[0]] * 4


def by_precision(found):
    return [found[4 * number : 4 * number + 4] for number in range(len(PRECISIONS))]
