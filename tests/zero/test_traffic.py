"""What is sent equals the theory, and parameters are gathered when the theory says."""

import numpy as np
from mindspore import Tensor

from ms_zero.comm import ProcessMesh
from ms_zero.mesh import Mesh
from ms_zero.models import GPT
from ms_zero.models.init import init_rules, initial_values
from ms_zero.optim import SGD
from ms_zero.plan.zero import step_traffic
from ms_zero.precision.policy import BYTES, policy
from ms_zero.testing import run_workers
from ms_zero.zero import Options, shard, wrap_blocks

SHAPE = {"vocab_size": 96, "hidden_size": 32, "num_layers": 3, "num_heads": 2, "ffn_hidden_size": 128}


def build(comm, options, *, mesh=None, dtypes="fp32"):
    cell = GPT(**SHAPE, max_seq_len=16)
    rules = init_rules(cell)
    shapes = {name: tuple(param.shape) for name, param in cell.parameters_and_names()}
    return shard(
        cell,
        ProcessMesh(mesh or Mesh(dp_shard=comm.world_size), comm),
        stage=options.stage,
        policy=dtypes,
        options=options,
        values=lambda name, a, b: initial_values(rules[name], name, shapes[name], 1, a, b),
        wrap=wrap_blocks(cell, leaves=True),
    )


def step(model, optimizer, microbatches):
    for number in range(microbatches):
        ids = Tensor(np.full((1, 16), number, np.int32))
        with model.record():
            loss = model(ids).mean()
        model.backward(loss, last=number == microbatches - 1)
    optimizer.step(lr=0.1)


def measure(comm):
    """(case, bytes sent, theory) of many layouts; of the second step, when gathering ahead is at work."""
    found = []
    mesh = Mesh(dp_replicate=2, dp_shard=2) if comm.world_size == 4 else Mesh(dp_shard=comm.world_size)
    cases = [
        (stage, k, synchronise, reshard, dtypes)
        for stage in range(4)
        for k, synchronise in ((1, None), (2, True), (2, False))
        for reshard in ((True, False) if stage == 3 else (True,))
        for dtypes in (("fp32", "bf16") if comm.world_size == 2 else ("fp32",))
    ]
    for stage, k, synchronise, reshard, dtypes in cases:
        options = Options(stage, synchronise=synchronise, reshard_after_forward=reshard, bucket_bytes=20_000)
        model = build(comm, options, mesh=mesh, dtypes=dtypes)
        optimizer = SGD(model)
        step(model, optimizer, k)
        comm.counters.reset()
        step(model, optimizer, k)
        degree, replicas = model.groups.shard.size, model.groups.replica.size
        psi = sum(int(np.prod(shape)) for shape in model.names.values())
        chosen = policy(dtypes)
        theory = step_traffic(
            stage, k, synchronise=synchronise, reshard_after_forward=reshard, replicas=replicas
        ).sent_bytes(
            psi, degree, replicas, weight=BYTES[chosen.param], wire=BYTES[chosen.reduce], kept=4
        )
        case = f"stage {stage} k {k} synchronise {synchronise} reshard {reshard} {dtypes}"
        found.append((case, comm.counters.total_bytes(), theory))
    return found


def test_bytes_sent_equal_the_theory_within_one_percent():
    for world_size in (2, 4):
        for found in run_workers(world_size, measure, timeout_s=300):
            for case, sent, theory in found:
                assert abs(sent / theory - 1) < 0.01, (world_size, case, sent, theory)
