"""The host's part of steps that are one graph: on one worker, without AutoParallel; and who holds what."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore.parallel.nn import GradAccumulation

from ms_zero import _compat, _compat_frontend, models
from ms_zero.checkpoint import open_checkpoint, save
from ms_zero.comm import ProcessMesh, local
from ms_zero.config import load_config
from ms_zero.data.run import load_data
from ms_zero.errors import UserError
from ms_zero.graph.compiled import CompiledEngine, CompiledStep, agreed
from ms_zero.graph.reduce import SameGradients
from ms_zero.graph.slices import ParameterLayout, read_layout
from ms_zero.graph.train import build_train_cell
from ms_zero.mesh import Mesh
from ms_zero.parallel.placement import Box
from ms_zero.recipes.build import build_model, build_resets, build_scaler
from ms_zero.runner import build_batch_schedule, build_schedule, build_trainer
from ms_zero.trainer import Trainer

ROOT = Path(__file__).resolve().parents[2]
RUN = (
    "data.source=files",
    "data.validation_fraction=0.5",
    "model.num_layers=1",
    "model.hidden_size=32",
    "model.num_heads=4",
    "data.seq_len=16",
    "train.global_batch_size=8",
    "train.accumulation_steps=2",
    "train.eval_interval=0",
    "optim.warmup_steps=2",
    "optim.clip_norm=0.5",
    "parallel.zero_stage=0",
    "precision.loss_scale=dynamic",
    "precision.loss_scale_convention=torch",
    "precision.initial_scale=1e20",
    "precision.growth_interval=3",
    "data.reset_attention=true",
    "data.reset_positions=true",
)


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    _compat.launch_blocking()
    monkeypatch.chdir(tmp_path)
    for number in range(8):
        text = "".join(chr(97 + (i * i + number) % 26) for i in range(400 + 37 * number))
        (tmp_path / f"{number}.txt").write_text(text)


def config_of():
    return load_config("runs/quickstart", [*RUN, "data.files=[./*.txt]"]).config


def compiled_trainer(config, comm):
    model, schedule = build_model(config.model), build_schedule(config)
    models.initialise(model, config.train.seed)
    parts = build_train_cell(
        config,
        model,
        scaler=build_scaler(config.precision),
        wrap=lambda network: GradAccumulation(network, config.train.accumulation_steps),
        gradients=lambda params: SameGradients(),
    )
    rates = {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
    step = CompiledStep(parts.cell, parts, schedule, comm=comm, **rates)
    step.prepare(rows=8, tokens=16)
    group = ProcessMesh(Mesh(), comm).group("dp_replicate", "dp_shard")
    engine = CompiledEngine(model, step, comm=comm, group=group, resets=build_resets(config.data))
    loader = load_data(config).train_loader(config.train.seed)
    sizes = {"batch_size": build_batch_schedule(config.train), "micro_batch_size": 4, "clip_norm": 0.5}
    return Trainer(engine, loader, schedule, comm=comm, group=group, **sizes)


def steps(trainer, count):
    results = [trainer.step() for _ in range(count)]
    return [[result.loss, result.grad_norm, result.nonfinite is None] for result in results]


def check_equal(ours, expected):
    assert [row[2] for row in ours] == [row[2] for row in expected]
    applied = [[row[:2] for row in rows if row[2]] for rows in (ours, expected)]
    np.testing.assert_allclose(*applied, rtol=1e-5)


def test_a_run_of_one_graph_equals_the_eager_engine_and_takes_its_checkpoints(tmp_path):
    config, comm = config_of(), local()
    eager = build_trainer(config, load_data(config), comm)
    compiled = compiled_trainer(config, comm)
    expected, ours = steps(eager, 5), steps(compiled, 5)
    ranks = {"rank": 0, "world_size": 1, "exchange": comm.exchange, "barrier": comm.barrier}
    path = save(tmp_path / "saved", 5, eager.engine.state_shards(), eager.state(), **ranks)
    assert compiled.state() == eager.state()
    expected += steps(eager, 5)
    check_equal(ours, expected[:5])
    assert compiled.progress.skipped > 0
    again = open_checkpoint(path)
    compiled.load_state(again.state)
    compiled.engine.load_state(again)
    check_equal(steps(compiled, 5), expected[5:])
    saved = {shard.name: values for shard, values in compiled.engine.state_shards()}
    assert set(saved) == {shard.name for shard, _ in eager.engine.state_shards()}
    with pytest.raises(UserError, match=r"set train\.eval_interval to 0"):
        compiled.evaluate(compiled.loader, 1)


def test_the_loss_is_that_of_the_rank_that_has_it_and_ranks_have_to_agree():
    first, second = [6.0, 3.0, True], [0.0, 3.0, True]
    assert agreed([first, second], 2.0, 0).loss == 3.0
    assert agreed([first, second], 2.0, 1).loss == 0.0
    assert agreed([[1.0, np.nan, False]] * 2, 1.0, 0).sum_of_squares == np.inf
    for other in ([0.0, 3.5, True], [0.0, 3.0, False]):
        with pytest.raises(UserError, match="the ranks disagree"):
            agreed([first, other], 1.0, 0)


# Eight devices as (dp, cp, tp) = (2, 1, 4): rows or columns over tp, rows over both, or none; hsdp over dp.
@pytest.mark.parametrize(
    ("axes", "row_parts"),
    [(axes, parts) for axes in (((2,), ()), ((), (2,)), ((), ())) for parts in (1, 2)] + [(((0, 2), ()), 1)],
)
def test_the_parts_of_eight_ranks_tile_a_parameter(axes, row_parts):
    layout = ParameterLayout((2, 1, 4), axes, (16, 8))
    seen = np.zeros((16, 8), int)
    for box in {layout.box(rank, (rank // 4 if row_parts > 1 else 0, row_parts)) for rank in range(8)}:
        box.take(seen)[...] += 1
    assert (seen == 1).all()


def test_the_parts_are_those_that_mindspore_compiles():
    """Two stages of two tensor-parallel times four sharing ranks, two of them in a ring; the last rank."""
    if reason := _compat_frontend.unavailable_reason():
        pytest.skip(reason)
    overrides = ["engine=graph", "hardware.target=Ascend", "model.num_layers=2", "model.hidden_size=64"]
    overrides += ["model.tie_embeddings=false", "model.vocab_size=260", "data.seq_len=16"]
    overrides += ["train.global_batch_size=4", "train.accumulation_steps=2", "train.eval_interval=0"]
    overrides += ["parallel.zero_stage=3", "parallel.tp=2", "parallel.pp=2", "parallel.cp=2"]
    overrides += ["precision.policy=bf16", "train.micro_batch_size=1"]
    script = str(Path(__file__).with_name("cut_process.py"))
    command = [sys.executable, script, "15", "16", "runs/quickstart", *overrides]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3", "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    found = [line for line in shown.stdout.splitlines() if line.startswith("REPORT ")]
    assert found, shown.stdout[-2000:] + shown.stderr[-2000:]
    report = json.loads(found[0].removeprefix("REPORT "))
    parts, shapes = report["parts"], report["shapes"]
    owned = [name for name in report["model"] if name in parts]
    first_stage = ("transformer.wte.", "transformer.wpe.", "transformer.h.0.")
    assert owned == [name for name in report["model"] if not name.startswith(first_stage)]
    # This rank has made its parts, with the values of those parts, and no others.
    assert report["filled"] == dict.fromkeys(owned, True)
    assert report["declared"] == [name for name in report["model"] if name.startswith(first_stage)]
    for name in owned:
        assert shapes[name] == parts[name][2] == shapes[f"exp_avg.{name}"] == shapes[f"accu_grads.{name}"]
    # The last rank has the last rows: of the second half by tp, the last quarter by zero_stage.
    assert parts["transformer.h.1.mlp.c_fc.weight"] == [[256, 64], [224, 0], [32, 64]]
    assert parts["transformer.h.1.mlp.c_proj.weight"] == [[64, 256], [48, 128], [16, 128]]


def test_a_layout_is_read_as_mindspore_writes_it():
    layout = read_layout("w", ([2, 1, 4], [0, -1], [2, 8], 0, True, "group", [16, 8]))
    assert layout == ParameterLayout((2, 1, 4), ((2,), ()), (16, 8), "group")
    assert layout.box(rank=6, row_part=(1, 2)) == Box((16, 8), (10, 0), (2, 8))
    both = read_layout("w", ([2, 1, 4], [(2, 0), -1], [2, 8], 0, True, "", [16, 8]))
    assert both.axes == ((0, 2), ()) and both.box(rank=5).offset == (10, 0)
    with pytest.raises(UserError, match="cut in unequal parts"):
        read_layout("w", ([2, 1, 4], [0, -1], [2, 8], 0, 0, "", [15, 8]))
