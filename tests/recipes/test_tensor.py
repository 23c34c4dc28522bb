"""Training with tensor parallelism: other layouts, 16 bits, evaluation, a model of one's own."""

from dataclasses import replace

import numpy as np
import pytest
from cut_runs import BF16, FP16, assert_like_one_process, resumed, steps, trained, trainer_of
from mindspore import Tensor, nn

from ms_zero import zero
from ms_zero.checkpoint import open_checkpoint
from ms_zero.comm import ProcessMesh, local
from ms_zero.mesh import Mesh
from ms_zero.optim import AdamW
from ms_zero.parallel import Column, Enter, Row, SplitSequence, WholeSequence, parallelize
from ms_zero.testing import run_workers

TP, SEQUENCE = ("parallel.tp=2",), ("parallel.tp=2", "parallel.sequence_parallel=true")
LAYOUTS = (("parallel.zero_stage=3",), (*TP, "parallel.zero_stage=3"), ("parallel.tp=4",))
NUMBERS = {"count": 5, "held_out": 10}


def job(comm, root):
    runs = {
        "bf16": (*TP, *BF16, "parallel.zero_stage=2"),
        "bf16 sequence": (*SEQUENCE, *BF16, "parallel.zero_stage=3", "memory.recompute=selective"),
        "fp16": (*TP, *FP16, "parallel.zero_stage=1"),
        "fp32": (*SEQUENCE, "memory.recompute=full", "parallel.zero_stage=0"),
    }
    return {
        "runs": {name: trained(comm, *overrides, **NUMBERS) for name, overrides in runs.items()},
        "resumed": resumed(comm, root, (*SEQUENCE, "parallel.zero_stage=1"), LAYOUTS, before=3, after=2),
        "own": [own_model(comm, stage, cut) for stage, cut in ((0, False), (3, True), (1, True))],
        "stop": trainer_of(comm, *TP)[0].step(stop_requested=comm.rank == 1).stop,
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return run_workers(4, job, str(tmp_path_factory.mktemp("state")), timeout_s=400)


@pytest.mark.parametrize(
    ("name", "overrides", "tolerance"),
    [("fp32", (), 2e-6), ("bf16", BF16, 5e-3), ("bf16 sequence", BF16, 5e-3), ("fp16", FP16, 5e-3)],
)
def test_it_trains_and_evaluates_like_one_process(reports, name, overrides, tolerance):
    assert_like_one_process(reports, name, overrides, tolerance, **NUMBERS)


def test_the_loss_scale_that_is_too_high_falls_for_all(reports):
    history, scales, _ = reports[0]["runs"]["fp16"]
    assert history[0][2] is not None and scales[-1] < 2**24


def test_a_checkpoint_goes_on_in_any_other_layout(reports):
    path, begun, others = reports[0]["resumed"]
    for other in others:
        np.testing.assert_allclose(*[[e[:2] for e in part] for part in (other, begun[3:])], rtol=5e-6)
    alone, _ = trainer_of(local())
    np.testing.assert_allclose(*[[e[:2] for e in part] for part in (steps(alone, 5), begun)], rtol=5e-6)
    single, _ = trainer_of(local())
    single.engine.load_state(open_checkpoint(path))
    single.progress = replace(alone.progress, step=3, updates=3, consumed_samples=12)
    single.engine.optimizer.num_updates = 3
    np.testing.assert_allclose([e[:2] for e in steps(single, 2)], [e[:2] for e in begun[3:]], rtol=5e-6)


def test_one_rank_that_wants_to_stop_stops_all(reports):
    assert [report["stop"] for report in reports] == [True] * 4


class Own(nn.Cell):
    def __init__(self, seed):
        super().__init__()
        rng = np.random.default_rng(seed)

        def dense(inputs, outputs):
            weight = Tensor(rng.standard_normal((outputs, inputs)).astype(np.float32) * 0.3)
            bias = Tensor(rng.standard_normal(outputs).astype(np.float32))
            return nn.Dense(inputs, outputs, weight_init=weight, bias_init=bias)

        self.blocks = nn.CellList([nn.SequentialCell(dense(6, 9), nn.ReLU(), dense(9, 6)) for _ in range(2)])
        self.norm = nn.LayerNorm([6])

    def construct(self, x):
        for block in self.blocks:
            x = self.norm(x + block(x))
        return x


def own_model(comm, stage, cut_sequence, count=3):
    """The whole parameters after some steps; with a cut sequence the loss is the sum of the ranks' parts."""
    tp = 2 if comm.world_size > 1 else 1
    mesh = ProcessMesh(Mesh(dp_shard=comm.world_size // tp, tp=tp), comm)
    cell = Own(seed=comm.rank)  # ranks may draw what they like
    border = (SplitSequence if cut_sequence else WholeSequence)(comm, mesh.group("tp"))
    plan = {"blocks.*": Enter(), "blocks.*.0": Column(), "blocks.*.2": Row()}
    placements = parallelize(cell, plan, border)
    model = zero.shard(cell, mesh, stage=stage, placements=placements)
    optimizer = AdamW(model, eps=1e-4)
    rows = np.random.default_rng(9).standard_normal((4, 8, 6)).astype(np.float32)
    share = 4 // (comm.world_size // tp)
    own = rows[mesh.mesh.dp_rank(comm.rank) * share :][:share]
    start, stop = border.span(8) if cut_sequence else (0, 8)
    x = Tensor(own[:, start:stop].copy())
    for _ in range(count):
        with model.record():
            loss = (model(x) ** 2 * x).sum()
        model.backward(loss, weight=1 / own.size)
        optimizer.step(lr=1e-2)
    return {name: value.reshape(-1).tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("number", range(3))
def test_a_model_of_ones_own_is_cut_and_sharded(reports, number):
    expected = own_model(local(), 0, cut_sequence=False)
    for report in reports:
        found = report["own"][number]
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6)
