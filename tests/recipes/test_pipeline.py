"""A model split over stages trains, evaluates, skips and resumes like one that is not."""

from math import prod

import numpy as np
import pytest
from mindspore import nn

from ms_zero._compat import launch_blocking
from ms_zero.checkpoint import open_checkpoint, save
from ms_zero.comm import ProcessMesh
from ms_zero.config import load_config
from ms_zero.mesh import Mesh
from ms_zero.models.init import initialise
from ms_zero.models.layers import Embedding, Linear, name_parameters_by_path
from ms_zero.optim import SGD
from ms_zero.pipeline.balance import balance
from ms_zero.pipeline.schedule import build, in_flight_bound
from ms_zero.pipeline.stage import Chain, cell_at
from ms_zero.plan.run import stage_layers
from ms_zero.recipes.account import account, sent_bytes
from ms_zero.recipes.build import build_model
from ms_zero.recipes.eager import EagerEngine
from ms_zero.recipes.pipeline import PipelineEngine, chain_of, split_model
from ms_zero.runner import build_trainer, load_data
from ms_zero.testing.parity import Plan, run_cases
from ms_zero.testing.pipeline_matrix import pipeline_cases
from ms_zero.testing.workers import run_workers
from ms_zero.zero.sharded import Groups, Options, Sharded

BASE = (
    "data.seq_len=16",
    "model.num_layers=4",
    "train.eval_interval=0",
    "train.global_batch_size=8",
    "train.accumulation_steps=4",
    "train.output_dir=unused",
)
DATA = ("parallel.dp_shard=2", "parallel.zero_stage=2")
PIPE = ("parallel.pp=2",)
INTERLEAVED = (*PIPE, "parallel.schedule=interleaved", "parallel.virtual_stages=2")


def test_a_pipeline_trains_like_one_process():
    results = list(run_cases(pipeline_cases(quick=True), Plan(steps=3, gradient_step=1)))
    wrong = [f"{result.case.name}: {result.divergence}" for result in results if result.divergence]
    assert wrong == [] and len(results) == 8


def trainer_of(comm, *overrides):
    config = load_config("runs/quickstart", [*BASE, *overrides], comm.world_size).config
    return build_trainer(config, load_data(config), comm)


# Stages down the ranks and up again, so that the first and the last one are on one rank.
FOLDED = """\
0F0,0F1,3F0,3B0,0F2,3F1,3B1,0B0,0F3,3F2,3B2,0B1,3F3,3B3,0B2,0B3
1F0,2F0,1F1,2F1,2B0,1B0,1F2,2F2,2B1,1B1,1F3,2F3,2B2,1B2,2B3,1B3
"""


def shared_out(comm, path):
    """By layout: losses and norms of two steps, reduced bytes of the second, and what it sent and held."""
    zero = "parallel.zero_stage=2"
    layouts = {
        "data": (zero, "parallel.dp_shard=4"),
        "plain": (*PIPE, zero),
        "uneven": (*PIPE, zero, "parallel.stage_layers=[4, 0]"),
        "interleaved": (*INTERLEAVED, zero),
        "folded": (*PIPE, zero, f"parallel.schedule={path}"),
        "stage 3": (*PIPE, "parallel.zero_stage=3", "parallel.schedule=zb-h1"),
        "empty": ("parallel.pp=4", "parallel.stage_layers=[2, 0, 2, 0]"),  # rank 1 has no parameter
    }
    found = {}
    for name, layout in layouts.items():
        trainer = trainer_of(comm, *layout, "train.accumulation_steps=auto", "train.micro_batch_size=1")
        engine, steps = trainer.engine, [trainer.step()]
        comm.counters.reset()
        steps.append(trainer.step())
        count = 8 // engine.sharded.groups.num_ranks
        sent = sent_bytes(comm.counters, engine.sharded)
        made = account(engine.sharded, engine.optimizer, sent=sent, num_microbatches=count)
        found[name] = {
            "numbers": [[step.loss, step.grad_norm] for step in steps],
            "reduced": comm.counters.total_bytes(op="reduce_scatter"),
            "measured": [made.sent, made.held],
            "theory": [made.sent_theory, made.held_theory],
            "saved": len(list(engine.state_shards())),
        }
    return found


def test_however_blocks_are_shared_out_numbers_and_reductions_are_the_same(tmp_path):
    path = tmp_path / "folded.csv"
    path.write_text(FOLDED)
    for rank, found in enumerate(run_workers(4, shared_out, str(path), timeout_s=200)):
        numbers = [layout["numbers"] for layout in found.values()]
        np.testing.assert_allclose(numbers, np.broadcast_to(numbers[0], np.shape(numbers)), rtol=2e-6)
        # A chunk is reduced when it was visited, not whenever any of its rank was.
        assert found["interleaved"]["reduced"] == found["plain"]["reduced"], rank
        del found["folded"]  # a rank has the first and the last stage: the tied table is reduced for each
        for name, layout in found.items():
            assert layout["measured"] == pytest.approx(layout["theory"], rel=0.02), (rank, name)
        empty = found["empty"]
        assert (empty["measured"][1] == 0) == (empty["saved"] == 0) == (rank == 1)


@pytest.mark.parametrize("preset", ["quickstart", "llama-tiny", "mixtral-tiny"])
@pytest.mark.parametrize("tied", ["true", "false"])
def test_the_planner_shares_blocks_out_as_the_model_itself_would_be(preset, tied):
    overrides = ["model.num_layers=9", f"model.tie_embeddings={tied}", "model.vocab_size=2000"]
    config = load_config(f"runs/{preset}", overrides, to_run=False).config
    model = build_model(config.model)
    chain = chain_of(model)

    def size(*cells):
        return sum(prod(param.shape) for cell in cells for param in cell.get_parameters())

    first, last = (size(*(cell_at(model, path) for path in paths)) for paths in (chain.first, chain.last))
    costs = [size(block) for block in cell_at(model, chain.blocks)]
    for num_stages in (2, 3, 4):
        ranges = balance(costs, num_stages, first=first, last=last)
        assert stage_layers(config, num_stages) == tuple(map(len, ranges))


def store(comm, trainer, root):
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    shards = trainer.engine.state_shards()
    return save(root, 2, shards, trainer.state(), exchange=comm.exchange, barrier=comm.barrier, **ranks)


def resumed(comm, path, *overrides):
    """Loss and norm of the step after a checkpoint, and the validation loss before it."""
    trainer, checkpoint = trainer_of(comm, *overrides), open_checkpoint(path)
    trainer.load_state(checkpoint.state)
    trainer.engine.load_state(checkpoint)
    validation = trainer.evaluate(trainer.loader, 7)
    result = trainer.step()
    return [validation, result.loss, result.grad_norm]


def go_on(comm, root):
    """Save under one layout, go on under others; both ways."""
    found = {}
    for name, layout in (("pipeline", PIPE), ("data", DATA)):
        trainer = trainer_of(comm, *layout)
        for _ in range(2):
            trainer.step()
        path = store(comm, trainer, f"{root}/{name}")
        names = open_checkpoint(path).names()
        assert len(names) == len(set(names))
        found[name] = [sorted(names), [resumed(comm, path, *new) for new in (PIPE, INTERLEAVED, DATA)]]
    return found


def test_a_checkpoint_goes_on_under_another_layout(tmp_path):
    found = run_workers(2, go_on, str(tmp_path), timeout_s=200)
    assert found[0] == found[1]  # loss, norm and validation are the same on all ranks
    assert found[0]["pipeline"][0] == found[0]["data"][0]
    results = np.array([values for part in ("pipeline", "data") for values in found[0][part][1]])
    np.testing.assert_allclose(results, np.broadcast_to(results[0], results.shape), rtol=2e-6)


def overflow(comm):
    """What a step with gradients beyond fp16 does, and one after it; and who stops when one rank wants to."""
    found = []
    for layout in (PIPE, DATA):
        trainer = trainer_of(comm, *layout, "precision.policy=fp16", "precision.initial_scale=2e9")
        before = trainer.engine.sharded.loss_scale
        results = [trainer.step(stop_requested=comm.rank == 1) for _ in range(2)]
        scales = [before, trainer.engine.sharded.loss_scale]
        found.append([scales, [result.nonfinite for result in results], [r.stop for r in results]])
    return found


def test_all_ranks_skip_a_step_that_overflows():
    found = run_workers(2, overflow, timeout_s=100)
    assert found[0] == found[1]
    (scales, nonfinite, stops), data = found[0]
    assert data == [scales, nonfinite, stops]
    assert all(nonfinite) and stops == [True, True] and scales[1] < scales[0]


def peaks(comm):
    trainers = [trainer_of(comm, *PIPE, f"parallel.schedule={name}") for name in ("gpipe", "1f1b", "zb-h1")]
    trainers.append(trainer_of(comm, *INTERLEAVED))
    for trainer in trainers:
        trainer.step()
    return [trainer.engine.outcome.peak_in_flight for trainer in trainers]


def test_microbatches_in_flight_are_those_of_the_schedule():
    found = run_workers(2, peaks, timeout_s=100)
    for rank in range(2):
        bounds = [in_flight_bound(name, rank, 2, 4) for name in ("gpipe", "1f1b", "zb-h1")]
        assert found[rank] == [*bounds, in_flight_bound("interleaved", rank, 2, 4, 2)]


class Bigrams(nn.Cell):
    """A model that is not ours: a table that is also the head, and a bias that is not trained."""

    def __init__(self):
        super().__init__()
        self.table = Embedding(11, 6, init_std=0.5)
        self.layers = nn.CellList([Linear(6, 6, bias=True, init_std=0.4) for _ in range(3)])
        self.head = Linear(6, 11, bias=False, init_std=0.5, weight=self.table.weight)
        name_parameters_by_path(self)
        initialise(self, 3)
        self.layers[1].bias.requires_grad = False

    def construct(self, input_ids):
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


BIGRAMS = Chain(
    blocks="layers",
    first=("table",),
    last=("head",),
    begin=lambda cell, inputs: cell.table(inputs["input_ids"]),
    context=lambda cell, hidden, inputs: (),
    end=lambda cell, hidden: cell.head(hidden),
)


def bigram_engines(comm):
    """One engine of the plain model on this rank alone, and one of the model over two stages."""
    pmesh, alone = ProcessMesh(Mesh(pp=2), comm), comm.new_group((comm.rank,), "alone")
    values = {name: param.asnumpy().reshape(-1) for name, param in Bigrams().parameters_and_names()}
    options = {"comm": comm, "groups": Groups(alone, alone)}

    def source(name, start, stop):
        return values[name][start:stop]

    model, part = Bigrams(), split_model(Bigrams(), BIGRAMS, pmesh)
    plain = Sharded(model, source, Options(1), **options)
    yield EagerEngine(model, plain, SGD(plain), comm=comm, group=alone)
    sharded = Sharded(part.cell, source, Options(1), placements=part.placements, **options)
    stages = {"stages": pmesh.group("pp"), "schedule": lambda count: build("1f1b", 2, count)}
    yield PipelineEngine(part, sharded, SGD(sharded), comm=comm, group=alone, **stages)


def train_bigrams(comm):
    launch_blocking()
    found = []
    for engine in bigram_engines(comm):
        history = []
        for step in range(4):
            for microbatch in range(3):
                rng = np.random.default_rng(10 * step + microbatch)
                ids, labels = rng.integers(0, 11, (2, 2, 4 + microbatch)).astype(np.int32)
                engine.forward_backward(ids, labels, weight=0.05, last=microbatch == 2)
            summary = engine.reduce()
            history.append([summary.loss, summary.sum_of_squares])
            engine.update(lr=0.1, grad_scale=1.0)
        found.append([history, engine.loss_sum(ids, labels)])
    return found


def test_a_model_of_ones_own_is_split_by_its_chain():
    found = run_workers(2, train_bigrams, timeout_s=100)
    assert found[0][1] == found[1][1]
    (history, evaluated), (expected, reference) = found[0][1], found[0][0]
    np.testing.assert_allclose(history, expected, rtol=1e-5)
    assert evaluated == pytest.approx(reference, rel=1e-6) and expected[0] != expected[3]
