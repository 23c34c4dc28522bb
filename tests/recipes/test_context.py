"""Training with context parallelism: evaluation, 16 bits, other layouts, portable kernels, own loops."""

import numpy as np
import pytest
from cut_runs import BF16, FP16, SMALL, assert_like_one_process, resumed, trained, trainer_of
from mindspore import Tensor

from ms_zero import kernels, zero
from ms_zero.comm import ProcessMesh, checked, local
from ms_zero.config import load_config
from ms_zero.data import IGNORED_LABEL, DocumentResets
from ms_zero.kernels import default_target
from ms_zero.mesh import Mesh
from ms_zero.models.init import initialise
from ms_zero.optim import AdamW
from ms_zero.parallel import ContextPart, cut_context
from ms_zero.plan.run import layout_of
from ms_zero.plan.shapes import from_config
from ms_zero.plan.traffic import step_bytes
from ms_zero.recipes.build import build_model
from ms_zero.recipes.context import CutSamples
from ms_zero.testing import run_workers

RING, ULYSSES = ("parallel.cp=2",), ("parallel.cp=2", "parallel.context=ulysses")
NUMBERS = {"count": 4, "held_out": 5}  # a number of samples that is no multiple of a pass
RUNS = {
    "fp32": (*RING, "memory.recompute=full", "parallel.zero_stage=0"),
    "fp32 ulysses": (*ULYSSES, "parallel.zero_stage=3"),
    "bf16": (*RING, *BF16, "parallel.zero_stage=3", "memory.recompute=selective"),
    "fp16": (*ULYSSES, *FP16, "parallel.zero_stage=1"),
}


LAYOUTS = (
    ("parallel.zero_stage=3",),
    ("parallel.cp=4", "parallel.context=ulysses", "parallel.zero_stage=1"),
    (*RING, "parallel.pp=2", "parallel.zero_stage=0"),
)


def portable(comm):
    """With MindSpore's operators only, and every collective compared between the ranks."""
    with default_target("CPU-portable"), checked(comm) as watched:
        return [trained(watched, *layout, count=2, held_out=5) for layout in (RING, ULYSSES)]


def traffic(comm):
    """Bytes sent between context-parallel ranks in a step of two microbatches, and by the planner."""
    found = []
    for method, kind in (("ring", "none"), ("ring", "full"), ("ulysses", "none"), ("ulysses", "selective")):
        layout = ("parallel.cp=4", f"parallel.context={method}", f"memory.recompute={kind}")
        trainer, config = trainer_of(comm, *layout, "train.accumulation_steps=2", "parallel.zero_stage=1")
        comm.counters.reset()
        trainer.step()
        sent = comm.counters.total_bytes(group="cp")
        found.append([sent, step_bytes(from_config(config.model), layout_of(config), 1.0)["cp"]])
    return found


def own_loop(comm):
    """Losses of a loop of one's own over the three-line API, for 2 x 2 ranks; each has drawn other values."""
    mesh = ProcessMesh(Mesh(dp_shard=2, cp=2), comm)
    model, ids, labels = own_problem(seed=comm.rank)
    part = ContextPart(comm, mesh.group("cp"))
    cut_context(model, part)
    samples = CutSamples(part)
    rows = slice(mesh.group("dp_shard").index, None, 2)
    inputs = samples.inputs(ids[rows], None, DocumentResets())
    return own_losses(zero.shard(model, mesh, stage=2), inputs, samples.labels(labels[rows]))


def own_problem(seed):
    config = load_config("runs/quickstart", [*SMALL, "model.dropout=0"]).config
    model = build_model(config.model)
    initialise(model, seed)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 200, (4, 17)).astype(np.int32)
    return model, tokens[:, :-1].copy(), tokens[:, 1:].copy()


def own_losses(model, inputs, labels):
    optimizer, loss_sum, losses = AdamW(model), kernels.CrossEntropySum(), []
    inputs = {name: Tensor(array) for name, array in inputs.items()}
    flat = Tensor(labels.reshape(-1))
    for _ in range(3):
        with model.record():
            logits = model(**inputs)
            loss = loss_sum(logits.reshape((-1, logits.shape[-1])), flat) / flat.size
        model.backward(loss)
        optimizer.step(lr=1e-2, clip_norm=1.0)
        losses.append(float(loss.asnumpy()))
    return losses


def job(comm, root):
    return {
        "runs": {name: trained(comm, *overrides, **NUMBERS) for name, overrides in RUNS.items()},
        "resumed": resumed(comm, root, (*RING, "parallel.zero_stage=2"), LAYOUTS, before=2, after=1),
        "portable": portable(comm),
        "traffic": traffic(comm),
        "own": own_loop(comm),
        "stop": trainer_of(comm, *RING)[0].step(stop_requested=comm.rank == 1).stop,
        "notes": trainer_of(comm, *ULYSSES)[0].engine.notes,
    }


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    return run_workers(4, job, str(tmp_path_factory.mktemp("state")), timeout_s=600)


@pytest.mark.parametrize(("name", "tolerance"), [("fp32", 5e-6), ("fp32 ulysses", 5e-6)])
def test_it_trains_and_evaluates_like_one_process(reports, name, tolerance):
    assert_like_one_process(reports, name, (), tolerance, **NUMBERS)


@pytest.mark.parametrize(("name", "overrides"), [("bf16", BF16), ("fp16", FP16)])
def test_16_bits_train_and_evaluate_like_one_process(reports, name, overrides):
    assert_like_one_process(reports, name, overrides, 5e-3, **NUMBERS)


def test_a_checkpoint_goes_on_in_any_other_layout(reports):
    _, begun, others = reports[0]["resumed"]
    for found in others:
        np.testing.assert_allclose([found[0][:2]], [begun[2][:2]], rtol=5e-6)


def test_portable_kernels_train_alike_and_collectives_agree(reports):
    with default_target("CPU-portable"):
        history, _, validation = trained(local(), count=2, held_out=5)
    for report in reports:
        for ours, _, our_validation in report["portable"]:
            np.testing.assert_allclose([e[:2] for e in ours], [e[:2] for e in history], rtol=1e-4)
            np.testing.assert_allclose(our_validation, validation, rtol=1e-4)


def test_a_step_sends_what_the_planner_says(reports):
    for report in reports:
        for sent, expected in report["traffic"]:
            assert sent == expected


def test_a_loop_of_ones_own_trains_alike(reports):
    model, ids, labels = own_problem(seed=0)
    positions = np.arange(ids.shape[1], dtype=np.int32)
    mesh = ProcessMesh(Mesh(), local())
    expected = own_losses(
        zero.shard(model, mesh, stage=0), {"input_ids": ids, "position_ids": positions}, labels
    )
    found = np.mean([report["own"] for report in reports], 0)
    np.testing.assert_allclose(found, expected, rtol=5e-6)


def test_every_rank_stops_and_the_log_says_how_samples_are_cut(reports):
    assert all(report["stop"] for report in reports)
    assert "context parallelism: samples cut over 2 ranks, ulysses" in reports[0]["notes"]
    assert any("sharded over 4 ranks" in note for note in reports[0]["notes"])


class OneOf:
    """A group of two in which this process has a place."""

    def __init__(self, index):
        self.size, self.index = 2, index


def test_labels_cross_the_borders_of_chunks():
    tokens = np.arange(9, dtype=np.int32)[None]
    ids, labels = tokens[:, :-1], tokens[:, 1:].copy()
    labels[0, 3] = IGNORED_LABEL
    starts = np.array([[0, 0, 0, 0, 4, 4, 4, 4]], np.int32)
    resets = DocumentResets(attention=True, positions=True)
    parts = [CutSamples(ContextPart(None, OneOf(index))) for index in (0, 1)]
    assert [part.labels(labels).tolist() for part in parts] == [[[1, 2, 7, 8]], [[3, -100, 5, 6]]]
    inputs = [part.inputs(ids, starts, resets) for part in parts]
    assert [found["input_ids"].tolist() for found in inputs] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert [found["position_ids"].tolist() for found in inputs] == [[[0, 1, 2, 3]], [[2, 3, 0, 1]]]
    assert all(found["document_starts"].tolist() == starts.tolist() for found in inputs)
    plain = parts[1].inputs(ids, None, DocumentResets())
    assert plain["position_ids"].tolist() == [2, 3, 4, 5] and "document_starts" not in plain
    # Two tensor-parallel ranks that keep a part of the own tokens each.
    assert parts[0].spans(8, None) == ((0, 2), (6, 8))
    assert parts[0].spans(8, lambda length: [(1, 3)]) == ((1, 2), (6, 7))
