"""Recompute and offload under sharded weights: no further gather, and the same bits."""

import numpy as np
from mindspore import Tensor

from ms_zero import memory
from ms_zero.comm import ProcessMesh
from ms_zero.mesh import Mesh
from ms_zero.models import GPT
from ms_zero.models.init import init_rules, initial_values
from ms_zero.optim import SGD
from ms_zero.testing import run_workers
from ms_zero.zero import Options, shard, wrap_blocks

SHAPE = {"vocab_size": 48, "hidden_size": 16, "num_layers": 3, "num_heads": 2, "ffn_hidden_size": 32}
STEPS = 2


def apply(cell, technique):
    kind, _, packing = technique.partition("+")
    memory.apply_recompute(cell, kind)
    if packing == "offload":
        memory.offload_activations(cell, min_bytes=1)


def train(comm, technique, *, leaves, reshard=True, dropout=0.0):
    """Final weights, and bytes gathered in the last step, when gathering ahead is at work."""
    cell = GPT(**SHAPE, max_seq_len=8, dropout=dropout)
    rules = init_rules(cell)
    shapes = {name: tuple(param.shape) for name, param in cell.parameters_and_names()}
    apply(cell, technique)
    model = shard(
        cell,
        ProcessMesh(Mesh(dp_shard=comm.world_size), comm),
        stage=3,
        options=Options(3, reshard_after_forward=reshard),
        values=lambda name, a, b: initial_values(rules[name], name, shapes[name], 1, a, b),
        wrap=wrap_blocks(cell, leaves=leaves),
    )
    optimizer = SGD(model)
    for step in range(STEPS):
        comm.counters.reset()
        for number in range(2):
            ids = np.random.default_rng(10 * step + 2 * number + comm.rank).integers(0, 48, (2, 8))
            if dropout:
                samples = [8 * step + 4 * number + 2 * comm.rank + row for row in range(2)]
                cell.dropout_state.set_position(seed=5, step=step, sample_numbers=samples)
            with model.record():
                loss = (model(Tensor(ids.astype(np.int32))) ** 2).mean()
            model.backward(loss, weight=0.5, last=number == 1)
        sent = comm.counters.total_bytes()
        assert model.held_bytes()["unsharded"] == 0
        optimizer.step(lr=0.5)
    weights = {name: value.tolist() for name, value in model.state_dict().items()}
    return weights, sent


def compare(comm):
    """(case, whether the weights are those without recompute, bytes sent, bytes sent without)."""
    found = []
    for options in (
        {"leaves": True},
        {"leaves": False},
        {"leaves": True, "reshard": False},
        {"leaves": True, "dropout": 0.2},
    ):
        weights, sent = train(comm, "none", **options)
        for technique in ("full", "selective", "none+offload", "full+offload"):
            other, other_sent = train(comm, technique, **options)
            found.append((f"{technique} {options}", weights == other, other_sent, sent))
    return found


def test_weights_and_traffic_are_those_without_recompute():
    for found in run_workers(2, compare, timeout_s=300):
        assert len(found) == 16
        for case, equal, sent, expected in found:
            assert equal, case
            assert sent == expected, (case, sent, expected)
