"""Extreme but valid layouts train alike, and ranks that leave the common course are stopped with a reason."""

from pathlib import Path

import numpy as np

from ms_zero.comm import CollectiveError, ProcessMesh, checked
from ms_zero.config import load_config
from ms_zero.errors import UserError
from ms_zero.mesh import Mesh
from ms_zero.runner import build_trainer, load_data
from ms_zero.testing import run_workers
from ms_zero.zero import Options, shard
from tests.zero.recorder import Followed, forward

BASE = str(Path(__file__).resolve().parents[2] / "configs" / "runs" / "quickstart.yaml")
# Sizes that three workers do not divide.
SMALL = (
    "model.num_layers=3",
    "model.hidden_size=10",
    "model.num_heads=2",
    "model.max_seq_len=17",
    "data.seq_len=17",
    "train.global_batch_size=6",
    "train.accumulation_steps=2",
    "train.steps=8",
    "optim.warmup_steps=1",
)
LAYOUTS = (
    ("parallel.zero_stage=0", "parallel.bucket_mb=1e-9"),
    ("parallel.zero_stage=1", "parallel.bucket_mb=999999"),
    ("parallel.zero_stage=2", "parallel.bucket_mb=1e-9", "offload.optimizer=cpu", "offload.fraction=0"),
    ("parallel.zero_stage=2", "parallel.dp_replicate=3", "parallel.sync_each_microbatch=false"),
    ("parallel.zero_stage=3", "parallel.prefetch=1000"),
    ("parallel.zero_stage=3", "parallel.prefetch=0", "parallel.reshard_after_forward=false"),
    ("parallel.zero_stage=3", "parallel.wrap=size", "parallel.wrap_elements=1", "memory.recompute=full"),
    ("parallel.zero_stage=3", "parallel.wrap=size", "parallel.wrap_elements=2000000000"),
    ("parallel.zero_stage=3", "offload.params=cpu", "memory.recompute=full", "parallel.prefetch=3"),
    ("parallel.zero_stage=3", "memory.recompute=every_k", "memory.recompute_every=2"),
)


def losses(comm, folder):
    """Losses of two steps of each layout; every collective is compared between the ranks."""
    found = []
    with checked(comm, "127.0.0.1") as comm:
        for layout in LAYOUTS:
            overrides = [*SMALL, f"train.output_dir={folder}", *layout]
            config = load_config(BASE, overrides, comm.world_size).config
            trainer = build_trainer(config, load_data(config), comm)
            found.append([trainer.step().loss for _ in range(2)])
    return found


def test_extreme_layouts_train_alike_and_agree_in_every_collective(tmp_path):
    found = run_workers(3, losses, str(tmp_path), timeout_s=300)
    assert found[0] == found[1] == found[2]
    for layout, values in zip(LAYOUTS, found[0], strict=True):
        np.testing.assert_allclose(values, found[0][0], rtol=1e-5, err_msg=str(layout))


def test_a_budget_that_nothing_fits_is_refused(tmp_path):
    (told,) = run_workers(1, refused_budget, str(tmp_path))
    assert "budget" in told and "\n" not in told


def refused_budget(comm, folder):
    extra = ("memory.recompute=budget", "memory.budget_gb=0.0000001")
    config = load_config(BASE, [*SMALL, f"train.output_dir={folder}", *extra], comm.world_size).config
    try:
        build_trainer(config, load_data(config), comm)
    except UserError as error:
        return str(error)
    return "nothing"


def leave_the_course(comm):
    """Rank 1 leaves out a block: what it is told, by stage."""
    told = []
    for stage in (2, 3):
        try:
            with checked(comm, "127.0.0.1") as watched:
                cell = Followed(calls=(0, 1, 2) if comm.rank == 0 else (0, 2))
                mesh = ProcessMesh(Mesh(dp_shard=2), watched)
                model = shard(cell, mesh, stage=stage, options=Options(stage, prefetch=0))
                model.backward(forward(model))
                told.append("nothing")
        except CollectiveError as error:
            told.append(str(error))
    return told


def test_a_rank_that_runs_other_units_is_named():
    for fine, told in run_workers(2, leave_the_course):
        assert fine == "nothing"  # in stages 0 to 2 units need no agreement
        assert "all_gather" in told and "windows.py" in told and "rank 1" in told, told
