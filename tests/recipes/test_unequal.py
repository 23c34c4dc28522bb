"""Ranks that do not do the same work, or are started differently: told in one line, in seconds."""

import time

import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_zero import optim, runner, zero
from ms_zero.comm import CollectiveError, ProcessMesh, checked
from ms_zero.config import load_config
from ms_zero.errors import UserError
from ms_zero.mesh import Mesh
from ms_zero.testing.workers import WorkerError, run_workers

SMALL = (
    "model.num_layers=1",
    "data.seq_len=16",
    "train.global_batch_size=4",
    "train.steps=1",
    "train.eval_interval=0",
    "optim.warmup_steps=0",
)


def step(comm, stage, num_microbatches):
    """One step of a loop of one's own; the weights after it."""
    mesh = ProcessMesh(Mesh(dp_shard=comm.world_size), comm)
    cell = nn.Dense(8, 1, weight_init=Tensor(np.ones((1, 8), np.float32)))
    model = zero.shard(cell, mesh, stage=stage)
    optimizer = optim.SGD(model)
    for number in range(num_microbatches):
        with model.record():
            loss = model(Tensor(np.ones((2, 8), np.float32))).sum()
        model.backward(loss, last=number == num_microbatches - 1)
    optimizer.step(lr=0.5)
    return model.state_dict()["weight"].tolist()


def attempts(comm, folder):
    """What ranks with 3 and with 2 microbatches are told or get, by stage; and ranks with two configs."""
    found = []
    for stage in (1, 2, 3):
        try:
            with checked(comm, "127.0.0.1") as watched:
                found.append(step(watched, stage, 3 - comm.rank))
        except CollectiveError as error:
            found.append(str(error))
    for layouts in (("zero_stage=1", "zero_stage=2"), ("pp=2", "tp=2")):
        overrides = [*SMALL, f"train.output_dir={folder}", f"parallel.{layouts[comm.rank]}"]
        try:
            found.append(runner.run(load_config("runs/quickstart", overrides, 2), comm))
        except UserError as error:
            found.append(str(error))
    return found


def test_unequal_work_and_other_layouts_are_told_in_one_line_on_all_ranks(tmp_path):
    for once, *unequal, stages, axes in run_workers(2, attempts, str(tmp_path), timeout_s=100):
        # Stage 1 reduces once in a step, whatever the number of microbatches: 5 gradients of 2, over 2 ranks.
        assert once == [[1 - 0.5 * 5 * 2 / 2] * 8]
        for told in unequal:
            assert told.startswith("debug_collectives: ") and "\n" not in told
            assert "rank 0: " in told and "zero/sharded.py" in told and "; rank 1: all_gather" in told
        assert stages == axes == "rank 1 has another config than rank 0: start all with the same one"


def work_apart(comm):
    step(comm, 2, 3 - comm.rank)


def test_without_the_check_unequal_work_ends_in_seconds_and_says_how_to_find_it():
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"did not pass.*debug_collectives=true names the first call"):
        run_workers(2, work_apart, timeout_s=100)
    assert time.monotonic() - start < 60  # instead of the time limit
