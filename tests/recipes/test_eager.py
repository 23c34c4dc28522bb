"""The engine with a model that is not ours: frozen and tied parameters, state under another layout."""

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ms_zero.checkpoint import open_checkpoint, save
from ms_zero.comm import local
from ms_zero.errors import UserError
from ms_zero.optim import SGD, AdamW
from ms_zero.recipes.eager import EagerEngine
from ms_zero.testing.workers import run_workers
from ms_zero.zero.sharded import Groups, Options, Sharded

VOCAB, WIDTH = 11, 6


class ForeignModel(nn.Cell):
    """A bigram model with a tied embedding and a frozen scale."""

    def __init__(self):
        super().__init__()
        rng = np.random.default_rng(3)
        table = rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
        self.table = Parameter(Tensor(table), name="table")
        self.head = nn.Cell()
        self.head.weight = self.table
        self.mix = Parameter(Tensor(rng.standard_normal((WIDTH, WIDTH)).astype(np.float32)), name="mix")
        self.scale = Parameter(Tensor(np.full(1, 0.5, np.float32)), name="scale", requires_grad=False)

    def construct(self, ids):
        hidden = ops.gather(self.table, ids.reshape(-1), 0)
        hidden = ops.MatMul(False, True)(hidden, self.mix) * self.scale
        return ops.MatMul(False, True)(hidden, self.table).reshape(*ids.shape, VOCAB)


def build(comm, bucket_bytes=200, stage=0, optimizer=AdamW):
    model = ForeignModel()
    values = {name: param.asnumpy().reshape(-1) for name, param in model.parameters_and_names()}
    sharded = Sharded(
        model,
        lambda name, start, stop: values[name][start:stop],
        Options(stage, bucket_bytes=bucket_bytes),
        comm=comm,
        groups=Groups(comm.world, comm.new_group((comm.rank,), "alone")),
        wrap=lambda path, cell: False,
    )
    return EagerEngine(model, sharded, optimizer(sharded), comm=comm, group=comm.world)


def train(engine, rank, world_size, steps, start=0):
    losses = []
    for step in range(start, start + steps):
        ids = np.random.default_rng(step).integers(0, VOCAB, (12, 5)).astype(np.int32)
        labels = np.random.default_rng(100 + step).integers(0, VOCAB, (12, 5)).astype(np.int32)
        engine.forward_backward(
            ids[rank::world_size], labels[rank::world_size], weight=1 / labels.size, last=True
        )
        summary = engine.reduce()
        engine.update(lr=1e-2, grad_scale=1.0)
        losses.append(summary.loss)
    return losses


def store(engine, comm, root, step):
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    return save(
        root, step, engine.state_shards(), {}, exchange=comm.exchange, barrier=comm.barrier, **ranks
    )


def two_then_one(comm, root, stage):
    engine = build(comm, stage=stage)
    train(engine, comm.rank, comm.world_size, 3)
    path = store(engine, comm, root, 3)
    return [str(path), train(engine, comm.rank, comm.world_size, 3, start=3)]


@pytest.mark.parametrize(("stage", "other"), [(0, 3), (1, 0), (2, 1), (3, 2)])
def test_state_of_two_workers_goes_on_in_one_under_another_stage(tmp_path, stage, other):
    path, expected = run_workers(2, two_then_one, str(tmp_path), stage)[0]
    engine = build(local(), bucket_bytes=4000, stage=other)
    engine.load_state(open_checkpoint(path))
    engine.optimizer.num_updates = 3
    np.testing.assert_allclose(train(engine, 0, 1, 3, start=3), expected, rtol=1e-6)


def test_a_frozen_parameter_is_stored_and_stays():
    engine = build(local())
    assert engine.sharded.trained == {"table", "mix"} and "scale" in engine.sharded.names
    train(engine, 0, 1, 2)
    shards = {shard.name: values for shard, values in engine.state_shards()}
    np.testing.assert_array_equal(shards["model.scale"], [0.5])
    assert {"model.table", "model.mix", "optim.exp_avg.table", "optim.exp_avg_sq.mix"} <= shards.keys()
    assert "optim.exp_avg.scale" not in shards


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    path = store(build(local()), local(), tmp_path, 0)
    engine = build(local())
    engine.sharded.names["extra"] = (2,)
    with pytest.raises(UserError, match=r"missing: model\.extra"):
        engine.load_state(open_checkpoint(path))
    engine = build(local(), optimizer=SGD)
    with pytest.raises(UserError, match=r"not in this run: optim\.exp_avg\."):
        engine.load_state(open_checkpoint(path))


def test_a_tied_parameter_gets_the_gradient_of_both_uses():
    engine = build(local())
    table, mix = engine.model.table.asnumpy().copy(), engine.model.mix.asnumpy().copy()
    ids, labels = np.array([[1, 2]], np.int32), np.array([[2, 3]], np.int32)
    engine.forward_backward(ids, labels, weight=1.0, last=True)
    engine.reduce()
    found = np.zeros(table.size)
    for shard, values in engine.gradient_shards():
        if shard.name == "table":
            found[shard.flat_start : shard.flat_stop] = values
    hidden = 0.5 * table[ids[0]] @ mix.T
    logits = hidden @ table.T
    probs = np.exp(logits - logits.max(1, keepdims=True))
    d_logits = probs / probs.sum(1, keepdims=True) - np.eye(VOCAB)[labels[0]]
    expected = d_logits.T @ hidden
    np.add.at(expected, ids[0], 0.5 * d_logits @ table @ mix)
    np.testing.assert_allclose(found.reshape(table.shape), expected, rtol=1e-4, atol=1e-6)
