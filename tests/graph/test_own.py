"""A model of one's own under AutoParallel: what the compiler inserts for its names and strategies."""

import functools
from pathlib import Path

import numpy as np
import own_model
import pytest
from mindspore import Tensor
from own_model import LAYERS, WIDTH, arrangement, build

from ms_zero import comm, graph
from ms_zero.checkpoint import open_checkpoint, save
from ms_zero.cli.main import main
from ms_zero.errors import UserError
from ms_zero.graph.frontend import FrontEndUnavailable, compile_case, own_case
from ms_zero.mesh import Mesh

FILE = Path(own_model.__file__)
TIMEOUT_S = 1500.0
CUT = ("layers.0.up", "layers.1.up", "layers.0.down", "layers.1.down")


@functools.cache
def compiled(function, axes, rank=0, **arguments):
    """What the front end makes of a function of `own_model` on a mesh of these axes."""
    job = {"degrees": dict(axes), **arguments}
    size = Mesh(**job["degrees"]).world_size
    try:
        return compile_case(own_case(f"{FILE}:{function}", job, rank=rank, size=size), timeout_s=TIMEOUT_S)
    except FrontEndUnavailable as reason:
        pytest.skip(str(reason))


DP_TP = (("dp_shard", 2), ("tp", 2))


def test_given_strategies_cut_layers_and_sum_their_products():
    result = compiled("build", DP_TP, zero_stage=2, microbatches=2)
    held = {name: kind.shape for name, kind in result.graph.parameters.items()}
    # tp cuts, and then zero_stage the rows of what is left.
    assert held["layers.0.up.weight"] == (4 * WIDTH // 2 // 2, WIDTH)
    assert held["accu_grads.layers.0.up.weight"] == (16, WIDTH)
    assert held["layers.0.down.weight"] == (WIDTH // 2, 4 * WIDTH // 2)
    assert held["table.embedding_table"] == (32 // 2 // 2, WIDTH)
    assert held["head.weight"] == (8 // 4, WIDTH)
    # Each microbatch sums the products of rows over tp, and in backward those of columns.
    for phase in ("forward", "backward"):
        kinds = ("AllReduce", "ReduceScatter")
        sums = [result.graph.number(kind, role="layout", phase=phase, ranks=(0, 1)) for kind in kinds]
        assert sum(sums) >= 2 * LAYERS, (phase, sums)
    assert result.graph.number("ReduceScatter", role="gradient", ranks=(0, 2)) == 2 * (2 * 3 + 1)
    assert result.notes["mesh"]["tp"] == 2 and result.deprecations() == []


def test_strategies_that_are_not_given_propagate():
    result = compiled("build_propagated", DP_TP).graph
    sums = result.select("AllReduce", role="layout", phase="forward", ranks=(0, 1), scope="layers")
    assert [each.sent.shape for each in sums] == [(16, WIDTH)] * LAYERS
    assert result.parameters["layers.0.up.weight"].shape == (2 * WIDTH, WIDTH)
    # What nobody cut is summed over all ranks, what tp cuts over those with other data.
    summed = {each.parameter: each.ranks for each in result.select("AllReduce", role="gradient")}
    assert {summed[f"{name}.weight"] for name in CUT} == {(0, 2)}
    assert summed["layers.0.norm.gamma"] == (0, 1, 2, 3)


def test_named_blocks_become_stages_and_run_again_in_backward():
    again = ("model.layers.*",)
    result = compiled("build", (("pp", 2),), rank=1, microbatches=2, recompute=again).graph
    owners = {name.split(".")[0] for name in result.parameters if "." in name}
    assert owners == {"layers", "head", "accu_grads"}
    assert not any(name.startswith("layers.0") for name in result.parameters)
    assert result.number("Receive", role="pipeline", phase="forward") == 2
    assert result.number("Send", role="pipeline", phase="backward") == 2
    assert result.recomputed["MatMul"] >= 2  # the first product of a block, once for each microbatch


def test_what_the_compiler_refuses_is_one_line(capsys):
    compiled("build_propagated", DP_TP)  # skips with another MindSpore
    assert main(["graph", "inspect", f"{FILE}:build_refused", "--workers", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "compiler refuses the step of rank 0: RuntimeError" in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["own.py:build"], "--workers: expected the number of ranks of the mesh"),
        ([f"{FILE}:build", "--workers", "2", "--rank", "2"], "--rank 2: expected 0 to 1"),
        ([f"{FILE}:build", "--workers", "2", "3"], "3: expected name=value"),
    ],
)
def test_commands_that_ask_for_nothing(arguments, message, capsys):
    assert main(["graph", "inspect", *arguments]) == 2
    assert message in capsys.readouterr().err


TP = Mesh(tp=2)


@pytest.mark.parametrize(
    ("strategies", "message"),
    [
        ({"model.layer.*.up": graph.Column()}, "matches no Cell of the network; near are model.layers"),
        ({"model.head.matmul2": graph.Operator(((), ("tp",)))}, "matches no operator"),
        ({"model.layers.*.norm": graph.Column()}, r"model.layers.0.norm \(LayerNorm\) is no nn.Dense"),
        ({"model.head": graph.Vocabulary()}, "is no nn.Embedding"),
        ({"square": graph.Operator((("dp", "sp"),)), "model.head": graph.Row()}, "'sp' is no axis"),
        ({"square": graph.Operator((("tp", ("dp", "tp")),))}, "tp cuts two dims of one tensor"),
        ({"model.head": graph.Column(), "model.hea*": graph.Row()}, "matches model.head and model.hea"),
        ({"model.head": graph.Column(blocks=3)}, "tp 2 does not divide its 3 output features"),
        ({}, "no strategy cuts anything over the 2 ranks of tp"),
    ],
)
def test_strategies_that_do_not_fit_are_refused(strategies, message):
    with pytest.raises(UserError, match=message):
        arranged = arrangement(TP, strategies=strategies)
        graph.given.apply_strategies(own_model.SummedLoss(own_model.Regressor()), strategies, arranged.grid)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": Mesh(pp=2), "blocks": ()}, "name them with blocks="),
        ({"blocks": "model.layers.*"}, "expected a tuple of patterns"),
        ({"schedule": "zb-h1"}, "expected one of gpipe, 1f1b, interleaved"),
        ({"zero_stage": 4}, "expected 0 to 3"),
        ({"zero_stage": 1, "mesh": Mesh(dp_replicate=2)}, "nothing to shard"),
        ({"microbatches": 0}, "expected at least 1"),
        ({"mesh": Mesh(pp=2), "propagate": True}, "not in a pipeline"),
        ({"propagate": True, "zero_stage": 2, "microbatches": 2}, "use zero_stage 1, one microbatch"),
    ],
)
def test_arrangements_that_cannot_be_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        arrangement(**({"mesh": Mesh()} | options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"degrees": {"tp": 2}}, "AutoParallel is not for CPU"),
        ({"rows": 9, "microbatches": 2}, r"tensor 0 of the batch, \[9\], cannot be cut into 2 parts"),
        ({"recompute": ("model.layer",)}, "recompute: pattern model.layer matches no Cell"),
    ],
)
def test_what_cannot_be_built_here_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        build(**options)


def test_a_function_that_builds_something_else_is_told():
    with pytest.raises(UserError, match="returns a SummedLoss: expected the result of"):
        graph.own.build_inspected(f"{FILE}:build_something_else", {})
    with pytest.raises(UserError, match="has no function nothing"):
        graph.own.build_inspected(f"{FILE}:nothing", {})


def test_one_rank_trains_on_cpu_and_saves(tmp_path):
    job = comm.local()
    ids = Tensor(np.arange(16, dtype=np.int32))
    target = Tensor(np.random.default_rng(0).standard_normal((16, 8)).astype(np.float32))
    step = build(microbatches=2, clip_norm=1.0, comm=job)
    first = float(step.network(ids, target).asnumpy()) / 16
    results = [step(ids, target, lr=0.1, weight=1 / 16) for _ in range(4)]
    losses = [summary.loss for summary, _ in results]
    assert losses[0] == pytest.approx(first, rel=1e-5)
    assert losses == sorted(losses, reverse=True)
    assert all(decision.finite and decision.norm > 0 for _, decision in results)
    ranks = {"rank": 0, "world_size": 1, "exchange": job.exchange, "barrier": job.barrier}
    saved = open_checkpoint(save(tmp_path, 4, step.state_shards(), {}, **ranks))
    ahead = step(ids, target, lr=0.1, weight=1 / 16)[0].loss
    step(ids, target, lr=0.1, weight=1 / 16)
    step.load_state(saved)
    assert step(ids, target, lr=0.1, weight=1 / 16)[0].loss == ahead
