"""The graph engine's step by formulas; tests/graph hold them against what MindSpore compiles."""

from dataclasses import replace

import pytest

from ms_zero.config import load_config
from ms_zero.plan.compiled import held_bytes, stage_bytes
from ms_zero.plan.explain import traffic_line
from ms_zero.plan.layout import Layout, Precision
from ms_zero.plan.models import load_model
from ms_zero.plan.parameters import count_parameters
from ms_zero.plan.run import layout_of

SHAPE = load_model("llama2-7b")
FP32 = Precision(weight=4, gathered=4, gradient=4, master=0, activation=4, reduce=4)


def layout(**changes):
    return Layout(seq_len=4096, engine="graph", precision=FP32, **changes)


@pytest.mark.parametrize(
    ("level", "units"),
    [(0, lambda k: 2), (1, lambda k: 2), (2, lambda k: 1 + k), (3, lambda k: 1 + k if k == 1 else 3 * k)],
)
@pytest.mark.parametrize("count", [1, 3])
def test_levels_send_what_the_table_of_the_docs_says(level, units, count):
    sent = stage_bytes(SHAPE, layout(dp_shard=8, hsdp_level=level or None, microbatches=count), 0)["dp"]
    expected = units(count) * 4 * 7 / 8 * count_parameters(SHAPE)
    if level == 3 and count > 1:  # the table of tokens is not gathered again
        expected -= count * 4 * 7 / 8 * SHAPE.vocab_size * SHAPE.hidden_size
    assert sent == pytest.approx(expected)


def test_level_2_scatters_the_gradient_of_a_tied_table_twice_in_fp32():
    tied = replace(load_model("gpt2-small"), vocab_size=50304)
    assert tied.tie_embeddings
    scatter = 4 * 3 / 4 * tied.vocab_size * tied.hidden_size
    for level, count, times in ((1, 3, 0), (2, 1, 0), (2, 3, 3), (3, 3, 0)):
        cut = layout(dp_shard=4, hsdp_level=level, microbatches=count)
        sent = [stage_bytes(shape, cut, 0)["dp"] for shape in (tied, replace(tied, tie_embeddings=False))]
        second_table = {1: 2, 2: 1 + count, 3: 2 * count}[level] * scatter
        assert sent[1] - sent[0] == pytest.approx(second_table - times * scatter), (level, count)


def test_levels_hold_what_the_table_of_the_docs_says():
    size = 4 * count_parameters(SHAPE)
    for level, shares in ((None, (1, 1, 1)), (1, (8, 1, 8)), (2, (8, 8, 8)), (3, (8, 8, 8))):
        held = held_bytes(SHAPE, layout(dp_shard=8, hsdp_level=level, microbatches=2), 0)
        weights, gradients, moments = (size / share for share in shares)
        assert held == {"weights": weights, "gradients": gradients, "moments": 2 * moments}


def test_the_ends_of_a_pipeline_send_less_and_their_tables():
    cut = layout(pp=4, tp=2, sequence_parallel=True, dp_shard=2, microbatches=4)
    first, middle, last = (stage_bytes(SHAPE, cut, stage) for stage in (0, 1, 3))
    border = 4 * 4 * 4096 / 2 * 4096  # four microbatches, fp32, half of the tokens
    assert (first["pp"], middle["pp"], last["pp"]) == (border, 2 * border, border)
    assert first["other"] == last["other"] > middle["other"] == 0
    loss = 4 * 5 * 2 / 2 * 4096 * 4  # three sums of the loss there and two back
    assert first["tp"] - middle["tp"] == last["tp"] - middle["tp"] - loss == 4 * 4 * 2 * 4096 * 4096 / 2


def test_a_run_of_the_graph_engine_is_planned_as_compiled():
    keys = ["engine=graph", "parallel.zero_stage=2", "train.accumulation_steps=4", "precision.policy=bf16"]
    keys += ["hardware.target=Ascend", "train.eval_interval=0", "train.global_batch_size=auto"]
    keys += ["train.micro_batch_size=1"]
    found = layout_of(load_config("runs/llama-tiny", keys, 8, to_run=False).config)
    assert (found.engine, found.hsdp_level, found.precision.gathered) == ("graph", 2, 2)
    assert (found.precision.weight, found.precision.master, found.precision.gradient) == (4, 0, 4)
    (line,) = traffic_line(SHAPE, found, 0.0)
    assert line.startswith("a device sends in a step: dp ")
