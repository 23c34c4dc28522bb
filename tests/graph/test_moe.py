"""Models with experts in the graph engine: the eager one's numbers on CPU, and what AutoParallel makes."""

import functools
import tempfile
from math import prod
from pathlib import Path

import numpy as np
import pytest
from front_end_cases import BUILD_RUN, TIMEOUT_S

from ms_zero import _compat
from ms_zero.checkpoint import open_checkpoint, save
from ms_zero.comm import local
from ms_zero.config import load_config
from ms_zero.data.run import load_data
from ms_zero.errors import UserError
from ms_zero.graph.frontend import Case, FrontEndUnavailable, compile_case
from ms_zero.graph.moe import MoEGraphEngine
from ms_zero.graph.report import render
from ms_zero.mesh import Mesh
from ms_zero.plan.traffic import expert_parallel
from ms_zero.runner import build_trainer
from ms_zero.testing import run_workers

SMALL = (
    "data.source=files",
    "data.validation_fraction=0.5",
    "model.num_layers=2",
    "model.hidden_size=32",
    "data.seq_len=16",
    "train.global_batch_size=8",
    "train.accumulation_steps=2",
    "train.eval_interval=0",
    "optim.warmup_steps=2",
    "optim.lr=0.003",
    "parallel.zero_stage=0",
)
GRAPH = ("engine=graph",)
RUNS = {
    "mixtral": ("runs/mixtral-tiny", "model.num_layers=1", "model.capacity_factor=0.75", "model.qk_norm=true",
             "model.renormalise=false", "model.shared_ffn_hidden_size=48", "model.shared_gate=true",
             "model.qkv_bias=true", "model.tie_embeddings=true"),
    "deepseek": ("runs/deepseek-tiny",),
}  # fmt: skip
BALANCED = (*RUNS["mixtral"][:2], "model.router_bias=true", "model.router_bias_speed=0.01")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """MindSpore leaves a folder custom_kernel_meta where a custom operator is made."""
    _compat.launch_blocking()
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(8):
        text = "".join(chr(97 + (i * i + number) % 26) for i in range(400 + 37 * number))
        (folder / f"{number}.txt").write_text(text)
    return f"data.files=[{folder}/*.txt]"


def trainer_of(comm, preset, *overrides):
    config = load_config(preset, [*SMALL, *overrides], comm.world_size).config
    return build_trainer(config, load_data(config), comm), config


def steps(trainer, count):
    results = [trainer.step() for _ in range(count)]
    return [[result.loss, result.grad_norm] for result in results]


def biases(trainer):
    """The biases of the routers that this rank saves a part of."""
    shards = {shard.name: values for shard, values in trainer.engine.state_shards()}
    return {name: values.tolist() for name, values in shards.items() if name.endswith("router.bias")}


@pytest.mark.parametrize("name", RUNS)
def test_ten_steps_equal_those_of_the_eager_engine(name, files):
    eager, config = trainer_of(local(), *RUNS[name], files)
    graph, _ = trainer_of(local(), *RUNS[name], files, *GRAPH)
    assert isinstance(graph.engine, MoEGraphEngine)
    expected = steps(eager, 10)
    np.testing.assert_allclose(steps(graph, 10), expected, rtol=1e-5)
    assert biases(graph) == biases(eager) and bool(biases(graph)) == (name == "deepseek")
    assert expected[-1][0] < expected[0][0]
    if name == "mixtral":  # evaluation leaves auxiliary losses out
        held_out = load_data(config).validation_loader()
        assert graph.evaluate(held_out, 10) == pytest.approx(eager.evaluate(held_out, 10), rel=1e-4)


def job(comm, root, files):
    """Two workers: ten steps of the graph engine, and one more from its checkpoint by the eager one."""
    overrides = (*BALANCED, files, "train.accumulation_steps=1")
    trainer, _ = trainer_of(comm, *overrides, *GRAPH)
    history, moved = steps(trainer, 10), biases(trainer)
    ranks = {"rank": comm.rank, "world_size": comm.world_size}
    shards = trainer.engine.state_shards()
    path = save(root, 10, shards, trainer.state(), exchange=comm.exchange, barrier=comm.barrier, **ranks)
    eager, _ = trainer_of(comm, *overrides)
    checkpoint = open_checkpoint(path)
    eager.load_state(checkpoint.state)
    eager.engine.load_state(checkpoint)
    return {"history": history, "biases": moved, "next": [steps(trainer, 1), steps(eager, 1)]}


def test_two_workers_take_the_steps_of_one_with_the_load_of_both(tmp_path, files):
    alone, _ = trainer_of(local(), *BALANCED, files)  # the eager engine
    expected = steps(alone, 10)
    reports = run_workers(2, job, str(tmp_path), files, timeout_s=400)
    moved = {}
    for report in reports:
        np.testing.assert_allclose(report["history"], expected, rtol=1e-5)
        np.testing.assert_allclose(*report["next"], rtol=1e-5)
        for name, values in report["biases"].items():
            moved[name] = moved.get(name, []) + values
    assert moved == biases(alone)


# -- what AutoParallel makes ---------------------------------------------------------------------------------

HIDDEN, TOKENS, EXPERTS, TOP_K, FFN = 64, 32, 8, 2, 32
_RUN = f"""
include: [models/mixtral-tiny]
model: {{num_layers: 1, hidden_size: {HIDDEN}, num_heads: 4, num_kv_heads: 2, num_experts: {EXPERTS},
  experts_per_token: {TOP_K}, expert_ffn_hidden_size: {FFN}, vocab_size: 512, max_seq_len: 64,
  capacity_factor: 1.0}}
data: {{source: stdlib, seq_len: {TOKENS}}}
train: {{steps: 10, micro_batch_size: 1, accumulation_steps: 1, output_dir: /tmp/unused}}
optim: {{warmup_steps: 1, kind: sgd, clip_norm: 0}}
precision: {{policy: bf16}}
hardware: {{target: Ascend}}
"""
EXPERT_WEIGHTS = tuple(f"model.layers.0.mlp.experts.{name}_proj" for name in ("gate", "up", "down"))
K3 = "train.accumulation_steps=3"
STAGES = ("parallel.pp=2", "model.num_layers=4", "train.accumulation_steps=4")
INTERLEAVED = (*STAGES, "parallel.schedule=interleaved")


@functools.cache
def run_file():
    path = Path(tempfile.mkdtemp(prefix="ms-zero-graph-tests-"), "run.yaml")
    path.write_text(_RUN)
    return str(path)


@functools.cache
def compiled(workers, *overrides, rank=0):
    """What the front end makes of a case; skips the test where MindSpore is another version."""
    arguments = {"run": run_file(), "overrides": list(overrides), "workers": workers}
    try:
        return compile_case(Case(BUILD_RUN, arguments, rank=rank, size=workers), timeout_s=TIMEOUT_S)
    except FrontEndUnavailable as reason:
        pytest.skip(str(reason))


def alltoalls(graph, **wanted):
    return graph.select("AlltoAll", role="layout", **wanted)


def gradients_of_experts(graph, name):
    """Ranks of the operations on gradients of the experts' weights (the only ones of three dims)."""
    found = [each for each in graph.select(name, role="gradient") if len(each.sent.shape) == 3]
    return [each.ranks for each in found for _ in range(each.times)]


def test_tokens_go_to_experts_and_come_back_by_all_to_all():
    graph = compiled(4, "parallel.ep=2").graph
    for phase in ("forward", "backward"):  # there and back, on neighbours
        found = alltoalls(graph, phase=phase)
        assert [each.ranks for each in found] == [(0, 1)] * 2
        # the slots of a sequence, of all experts: with capacity 1 as many as choices
        assert [prod(each.sent.shape) for each in found] == [TOP_K * TOKENS * HIDDEN] * 2
        assert {each.sent.dtype for each in found} == {"BFloat16"}
        assert all("ShardedExperts" in each.scope for each in found)
    assert len(alltoalls(graph)) == graph.number("AlltoAll") == 4
    # a rank has half of the experts, and shares them with the rank two places on
    assert [graph.parameters[name].shape[0] for name in EXPERT_WEIGHTS] == [EXPERTS // 2] * 3
    assert gradients_of_experts(graph, "AllReduce") == [(0, 2)] * 3
    router = [each for each in graph.select("AllReduce", role="gradient") if each.sent.shape == (8, HIDDEN)]
    assert [each.ranks for each in router] == [(0, 1, 2, 3)]
    assert compiled(4, "parallel.ep=2").deprecations() == []


def test_all_to_all_bytes_equal_the_planners_and_dropless_experts_have_empty_slots():
    dropless = ("parallel.ep=4", "model.capacity_factor=null")
    for overrides, copies, degree in ((("parallel.ep=2",), TOP_K, 2), (dropless, EXPERTS, 4)):
        sent = sum(each.bytes_sent for each in alltoalls(compiled(4, *overrides).graph))
        assert sent == 2 * expert_parallel(TOKENS, HIDDEN, copies, degree)


def test_tensor_parallel_ranks_cut_each_expert_and_route_alike():
    overrides = ("parallel.ep=2", "parallel.tp=2", "parallel.sequence_parallel=true")
    graph = compiled(4, *overrides).graph
    assert [each.ranks for each in alltoalls(graph)] == [(0, 2)] * 4
    shapes = [graph.parameters[name].shape for name in EXPERT_WEIGHTS]
    assert shapes == [(4, FFN // 2, HIDDEN)] * 2 + [(4, HIDDEN, FFN // 2)]
    assert gradients_of_experts(graph, "AllReduce") == []  # nobody else has this part
    sums = graph.select("AllReduce", role="layout", ranks=(0, 1))
    assert sorted(each.phase for each in sums if len(each.sent.shape) == 3) == ["backward", "forward"]


@pytest.mark.parametrize(("stage", "scatters"), [(1, 1), (3, 3)])
def test_hsdp_shards_experts_over_the_ranks_that_have_the_same_ones(stage, scatters):
    overrides = ("parallel.ep=2", f"parallel.zero_stage={stage}", K3, "optim.kind=adamw")
    graph = compiled(4, *overrides, rank=3).graph
    assert gradients_of_experts(graph, "ReduceScatter") == [(1, 3)] * 3 * scatters
    gathers = [each for each in graph.select("AllGather", role="weight") if len(each.sent.shape) == 3]
    assert {each.ranks for each in gathers} == {(1, 3)}
    for name in EXPERT_WEIGHTS:  # 8 experts over 2 x 2 ranks, with their moments
        held = [graph.parameters[f"{prefix}{name}"].shape[0] for prefix in ("", "exp_avg.", "exp_avg_sq.")]
        assert held == [2, 2, 2]
        assert graph.parameters[f"accu_grads.{name}"].shape[0] == (4 if stage == 1 else 2)
    assert sum(each.times for each in alltoalls(graph)) == 3 * 4  # of each microbatch
    assert {each.ranks for each in alltoalls(graph)} == {(2, 3)}


def test_the_auxiliary_loss_travels_with_the_hidden_states():
    overrides = ("parallel.ep=2", "parallel.pp=2", "model.num_layers=2", "train.accumulation_steps=2")
    first, last = (compiled(4, *overrides, rank=rank).graph for rank in (0, 2))
    for ours, theirs, phase in (("Send", "Receive", "forward"), ("Receive", "Send", "backward")):
        there = first.select(ours, role="pipeline", phase=phase)
        back = last.select(theirs, role="pipeline", phase=phase)
        # hidden states and a number for each sequence, of two microbatches
        shapes = sorted((each.sent if ours == "Send" else each.received).shape for each in there)
        assert shapes == [(1,)] * 2 + [(TOKENS, HIDDEN)] * 2
        assert shapes == sorted((each.sent if theirs == "Send" else each.received).shape for each in back)
    assert [each.ranks for each in alltoalls(last) for _ in range(each.times)] == [(2, 3)] * 2 * 4
    # With stages the compiler leaves away the first output of a step, the loss, but not what is kept.
    assert "step_loss" in last.parameters and last.number("AllReduce", phase="forward", scope="loss_sum") > 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.cp=2"], "routers see whole sequences"),
        ([*INTERLEAVED, "parallel.virtual_stages=2"], "interleaved is not tried with experts"),
        (["model.router_bias=true", "parallel.ep=2"], "moved by the host"),
        (["parallel.ep=2", "parallel.dp_replicate=2", "parallel.zero_stage=1"], "replicas"),
        (["parallel.tp=2", "model.expert_ffn_hidden_size=33"], "tp 2 does not divide the 33"),
    ],
)
def test_what_cannot_be_done_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        compiled(4, *overrides)


def test_the_report_names_the_axes_of_experts():
    degrees = {"dp_shard": 4, "ep": 2}
    lines = render(compiled(4, "parallel.ep=2").graph, Mesh(**degrees), 0)
    found = {tuple(line.split()[1:3]) for line in lines}
    assert {("AlltoAll", "ep"), ("AllReduce", "edp"), ("AllReduce", "dp_shard")} <= found
    assert "sent by this rank in a step: ep " in lines[-1]
