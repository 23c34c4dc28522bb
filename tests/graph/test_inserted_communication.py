"""What MindSpore's front end inserts for each kind of parallelism: operation, group, number, place, size.

Nothing is executed. Numbers are per step of one rank; see `ms_zero.graph.frontend`.
"""

from math import prod

import pytest
from front_end_cases import HIDDEN, PARAMETERS, TOKENS, compiled, config_of, mesh_of

from ms_zero.errors import UserError
from ms_zero.graph.report import axes_of, axis_bytes, held_bytes, render
from ms_zero.plan import compiled as plan
from ms_zero.plan.run import layout_of
from ms_zero.plan.shapes import from_config

K3 = "train.accumulation_steps=3"
TP = "parallel.tp=2"
SP = "parallel.sequence_parallel=true"


def planned(workers, *overrides, rank=0):
    """Bytes by axis as the planner has them."""
    config, mesh = config_of(workers, *overrides, "engine=graph"), mesh_of(workers, *overrides)
    return plan.stage_bytes(from_config(config.model), layout_of(config), mesh.coords(rank)["pp"])


def assert_planned(workers, *overrides, rank=0):
    """What a rank sends on every axis is what the planner says, but for single numbers."""
    found, known = sent(workers, *overrides, rank=rank), planned(workers, *overrides, rank=rank)
    assert found.pop("other") == pytest.approx(known.pop("other"), abs=1000)
    assert found == known


def sent(workers, *overrides, rank=0):
    return axis_bytes(compiled(workers, *overrides, rank=rank).graph, mesh_of(workers, *overrides), rank)


def test_data_parallel_sums_each_gradient_once():
    graph = compiled(4).graph
    assert graph.number("AllReduce", role="gradient", phase="backward", ranks=range(4)) == PARAMETERS
    assert graph.number(role="weight") == graph.number(role="pipeline") == 0
    assert_planned(4)


def test_hsdp_level_1_gathers_once_and_scatters_once():
    graph = compiled(4, "parallel.zero_stage=1", K3).graph
    assert graph.number("AllGather", role="weight", ranks=range(4)) == PARAMETERS
    assert graph.number("ReduceScatter", role="gradient", ranks=range(4)) == PARAMETERS
    assert_planned(4, "parallel.zero_stage=1", K3)


def test_hsdp_level_1_cuts_weights_and_moments_and_not_the_sums():
    name = "model.layers.0.mlp.gate_proj.weight"
    graph = compiled(4, "parallel.zero_stage=1", "optim.kind=adamw").graph
    whole = compiled(4, "parallel.zero_stage=1", "optim.kind=adamw").notes["parameters"]
    state = {key: value for key, value in graph.parameters.items() if key.startswith("exp_avg")}
    assert len(state) == 2 * PARAMETERS
    for key, held in state.items():
        assert prod(held.shape) * 4 == prod(whole[key.split(".", 1)[1]]), key
    assert graph.parameters[name].shape == (32, HIDDEN)
    config = config_of(4, "parallel.zero_stage=1", "optim.kind=adamw", "engine=graph")
    assert held_bytes(graph, whole) == plan.held_bytes(from_config(config.model), layout_of(config), 0)
    accumulated = compiled(4, "parallel.zero_stage=1", K3).graph.parameters
    assert accumulated[f"accu_grads.{name}"].shape == (128, HIDDEN)


def test_hsdp_level_2_scatters_in_every_microbatch_and_keeps_shards():
    graph = compiled(4, "parallel.zero_stage=2", K3).graph
    assert graph.number("AllGather", role="weight") == PARAMETERS
    assert graph.number("ReduceScatter", role="gradient", phase="backward") == 3 * PARAMETERS
    assert graph.parameters["accu_grads.model.layers.0.mlp.gate_proj.weight"].shape == (32, HIDDEN)
    assert_planned(4, "parallel.zero_stage=2", K3)


def test_hsdp_level_3_gathers_again_in_every_backward():
    overrides = ("parallel.zero_stage=3", K3)
    graph = compiled(4, *overrides).graph
    assert graph.number("AllGather", role="weight", phase="forward") == 3 * PARAMETERS
    # all but the table of tokens, of which backward reads nothing
    assert graph.number("AllGather", role="weight", phase="recompute") == 3 * (PARAMETERS - 1)
    assert graph.number("ReduceScatter", role="gradient") == 3 * PARAMETERS
    assert_planned(4, *overrides)


def test_without_accumulation_level_3_communicates_like_level_2():
    graph = compiled(4, "parallel.zero_stage=3").graph
    assert graph.number("AllGather", role="weight", phase="forward") == PARAMETERS
    assert graph.number("AllGather", role="weight", phase="recompute") == 0
    assert graph.number("ReduceScatter", role="gradient") == PARAMETERS
    assert_planned(4, "parallel.zero_stage=3")


def test_replicas_sum_what_shards_scatter():
    overrides = ("parallel.zero_stage=2", "parallel.dp_shard=2", "parallel.dp_replicate=2")
    graph = compiled(4, *overrides).graph
    assert graph.number("ReduceScatter", role="gradient", ranks=(0, 1)) == PARAMETERS
    assert graph.number("AllReduce", role="gradient", ranks=(0, 2)) == PARAMETERS
    assert_planned(4, *overrides)


def test_tensor_parallel_sums_twice_a_layer_each_way():
    graph = compiled(4, TP).graph
    wide = [each for each in graph.select("AllReduce", role="layout") if each.sent.shape == (TOKENS, HIDDEN)]
    assert {each.ranks for each in wide} == {(0, 1)}
    assert {each.sent.dtype for each in wide} == {"BFloat16"}
    phases = [each.phase for each in wide]
    # attention, MLP, and the table of tokens or the head
    assert (phases.count("forward"), phases.count("backward")) == (3, 3)
    assert graph.parameters["model.layers.0.self_attn.q_proj.weight"].shape == (32, HIDDEN)
    assert graph.parameters["model.layers.0.self_attn.o_proj.weight"].shape == (HIDDEN, 32)
    assert graph.parameters["lm_head.weight"].shape == (256, HIDDEN)
    # gradients: cut weights over dp, the norms' over all
    assert graph.number("AllReduce", role="gradient", ranks=(0, 2)) == PARAMETERS - 3
    assert graph.number("AllReduce", role="gradient", ranks=range(4)) == 3
    assert_planned(4, TP)


def test_gpt_with_a_vocabulary_that_tp_does_not_divide():
    graph = compiled(4, TP, SP, "model.vocab_size=511", family="gpt").graph
    # the table is whole, and each rank's head works on tokens of its own: nothing but the block communicates
    for phase in ("forward", "backward"):
        assert graph.number("ReduceScatter", role="layout", phase=phase, ranks=(0, 1)) == 2
        assert graph.number("AllGather", role="layout", phase=phase, ranks=(0, 1)) == 2
    assert graph.parameters["transformer.wte.weight"].shape == (511, HIDDEN)
    # biases after the sums, norms, both tables; the others are cut over tp
    assert graph.number("AllReduce", role="gradient", ranks=range(4)) == 10
    assert graph.number("AllReduce", role="gradient", ranks=(0, 2)) == 10


def test_sequence_parallel_scatters_and_gathers_the_same_volume():
    graph = compiled(4, TP, SP).graph
    for phase in ("forward", "backward"):
        assert graph.number("ReduceScatter", role="layout", phase=phase, ranks=(0, 1)) == 3
        assert graph.number("AllGather", role="layout", phase=phase, ranks=(0, 1)) == 3
    assert sent(4, TP, SP)["tp"] == sent(4, TP)["tp"]
    assert_planned(4, TP, SP)


def test_ulysses_exchanges_heads_for_tokens():
    graph = compiled(4, "parallel.cp=2", "parallel.context=ulysses").graph
    for phase in ("forward", "backward"):  # queries, keys, values, and what comes out
        assert graph.number("AlltoAll", role="layout", phase=phase, ranks=(0, 1)) == 4
    assert graph.number("AllGather", role="layout") == 0
    assert_planned(4, "parallel.cp=2", "parallel.context=ulysses")


def test_a_pipeline_sends_each_microbatch_once_each_way():
    overrides = ("parallel.pp=4", "model.num_layers=4", "train.accumulation_steps=4")
    graph = compiled(4, *overrides, rank=2).graph
    for name, phase, peer in (
        ("Receive", "forward", 1),
        ("Send", "forward", 3),
        ("Receive", "backward", 3),
        ("Send", "backward", 1),
    ):
        found = graph.select(name, role="pipeline", phase=phase)
        assert [each.peer for each in found] == [peer] * 4, (name, phase)
        assert sorted(each.microbatch for each in found) == [0, 1, 2, 3]
    assert not any("embed_tokens" in name or "lm_head" in name for name in graph.parameters)
    assert_planned(4, *overrides, rank=2)


@pytest.mark.parametrize(("schedule", "forward"), [("1f1b", 2), ("gpipe", 2), ("interleaved", 4)])
def test_schedules_send_what_their_chunks_need(schedule, forward):
    layers = 4 if schedule == "interleaved" else 2
    overrides = ["parallel.pp=2", f"model.num_layers={layers}", f"parallel.schedule={schedule}"]
    overrides += ["parallel.virtual_stages=2"] if schedule == "interleaved" else []
    graph = compiled(2, *overrides, "train.accumulation_steps=2").graph
    assert graph.number("Send", role="pipeline", phase="forward") == forward
    assert graph.number("Receive", role="pipeline", phase="backward") == forward
    returning = forward - 2
    assert graph.number("Receive", role="pipeline", phase="forward") == returning
    assert_planned(2, *overrides, "train.accumulation_steps=2")


def test_three_axes_at_once():
    overrides = ("parallel.pp=2", TP, SP, "model.num_layers=2", "train.accumulation_steps=2")
    graph = compiled(8, *overrides, "parallel.zero_stage=2", rank=7).graph
    mesh = mesh_of(8, *overrides, "parallel.zero_stage=2")
    spans = {axes_of(each, mesh, 7) for each in graph.operations if each.role != "norm"}
    assert spans == {"pp", "tp", "dp_shard", "dp_shard x tp"}
    assert graph.number("Receive", role="pipeline", phase="forward") == 2
    assert graph.number("ReduceScatter", role="gradient", ranks=(5, 7)) == 2 * 8
    assert any("lm_head" in name for name in graph.parameters)
    assert_planned(8, *overrides, "parallel.zero_stage=2", rank=7)


@pytest.mark.parametrize(("kind", "products", "attentions"), [("full", 6, 1), ("selective", 0, 1)])
def test_recompute_runs_again_what_is_asked(kind, products, attentions):
    graph = compiled(2, f"memory.recompute={kind}").graph
    assert graph.recomputed.get("MatMul", 0) == products  # all but the last of the block
    assert graph.recomputed.get("FlashAttentionScore", 0) == attentions


def test_no_deprecated_mindspore_api_is_used():
    for case in ((4, TP), (4, "parallel.zero_stage=2", K3)):
        assert compiled(*case).deprecations() == []


def test_the_report_names_axes_and_sums():
    text = "\n".join(render(compiled(4, TP).graph, mesh_of(4, TP), 0))
    assert "AllReduce  tp " in text and "sent by this rank in a step: tp" in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.tp=4"], "tp 4 does not divide 2 key-value heads"),
        (["parallel.cp=2", "train.micro_batch_size=2"], "one sample at a time"),
        (["parallel.cp=4", "parallel.context=ulysses"], "4 ranks do not divide 2"),
        (["memory.recompute=sqrt"], "recomputed one by one"),
    ],
)
def test_what_cannot_be_done_is_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        compiled(4, *overrides, "train.accumulation_steps=4")
