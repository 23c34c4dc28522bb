"""Elements on the wire, and bytes of an optimizer step: the published figures."""

import pytest

from ms_zero.plan.layout import FP32, MIXED, Layout
from ms_zero.plan.models import load_model
from ms_zero.plan.traffic import (
    context_parallel,
    expert_parallel,
    pipeline,
    step_bytes,
    tensor_parallel,
    ulysses,
)
from ms_zero.plan.update import update_bytes, update_seconds, without_master

PARAMETERS = 175e9


def test_traffic_by_axis():
    tokens, hidden = 4 * 2048, 1024
    assert tensor_parallel(tokens, hidden, 4) == 8 * tokens * hidden * 3 / 4
    assert tensor_parallel(tokens, hidden, 1) == 0
    assert pipeline(tokens, hidden) == tokens * hidden
    assert pipeline(tokens, hidden, 8) == tokens * hidden / 8
    # K and V once forward, K, V and their gradients backward
    assert context_parallel(tokens, 2 * 128, 4) == (2 + 4) * 128 * tokens * 3 / 4
    # Q, K, V and the result once forward, their gradients backward: 1/c of each, of which (c-1)/c leave
    assert ulysses(tokens, 2 * 1024 + 2 * 128, 4) == 2 * (2 * 1024 + 2 * 128) * tokens / 4 * 3 / 4
    assert expert_parallel(tokens, hidden, 2, 8) == 4 * 2 * tokens * hidden * 7 / 8


def test_bytes_of_a_step_follow_the_formulas():
    shape = load_model("llama2-7b")
    parameters = 6_738_415_616
    layout = Layout(seq_len=4096, tp=2, cp=2, pp=2, dp_shard=2, zero_stage=1, microbatches=4)
    sent = step_bytes(shape, layout, parameters / 4)
    tokens = 4 * 4096 / 2
    assert sent["tp"] == 2 * 16 * 8 * tokens * 4096 / 2
    # K and V twice in 2 bytes, their gradients in 4
    assert sent["cp"] == 16 * 2 * (2 * 2 + 4) * (4096 / 2) * (4 * 4096) / 2
    assert sent["pp"] == 2 * 2 * tokens * 4096
    assert sent["dp"] == pytest.approx(parameters / 4 * 3 / 4 * (2 + 2))
    assert sent["ep"] == 0
    assert step_bytes(shape, layout.replace(recompute="full"), 1.0)["tp"] == 1.5 * sent["tp"]


def test_recompute_repeats_the_exchanges_of_attention():
    shape = load_model("llama2-70b")  # 64 heads, 8 key-value heads of 128
    for method, forward in (("ring", 4 * 2 * 8 * 128 * 3 / 4), ("ulysses", (2 * 64 + 2 * 8) * 128 * 3 / 4)):
        layout = Layout(seq_len=4096, cp=4, context=method)
        once = step_bytes(shape, layout, 1.0)["cp"]
        for kind in ("selective", "full"):
            again = step_bytes(shape, layout.replace(recompute=kind), 1.0)["cp"]
            assert again - once == 80 * 1024 * 2 * forward


def test_ulysses_sends_a_copy_to_every_rank_without_a_key_head_of_its_own():
    shape = load_model("llama2-70b")
    layout = Layout(seq_len=4096, cp=4, tp=4, context="ulysses")
    assert step_bytes(shape, layout, 1.0)["cp"] == 80 * 2 * 1024 * (2 * 16 + 2 * 4) * 128 * 3 / 4 * 2
    assert layout.violations(shape) == []
    assert "cp 3 cannot share 16 heads" in layout.replace(cp=3, seq_len=4095).violations(shape)[0]


def test_nothing_is_sent_alone():
    assert set(step_bytes(load_model("llama2-7b"), Layout(seq_len=4096), 7e9).values()) == {0.0}


def test_copies_of_tokens_go_to_experts_and_back():
    shape = load_model("mixtral-8x7b")
    layout = Layout(seq_len=4096, dp_shard=8, ep=8)
    assert step_bytes(shape, layout, 1.0)["ep"] == 2 * 32 * 4 * 4096 * 4096 * 2 * 7 / 8


def test_bytes_of_an_optimizer_step():
    assert update_bytes(MIXED, fused=False).update == 32
    assert update_bytes(MIXED, fused=False).passes == 4 + 2
    assert update_bytes(MIXED).update == 28
    assert update_bytes(MIXED).passes == 2
    assert update_bytes(FP32).update == 28
    assert without_master(MIXED) == 20


def test_the_founding_figures_for_175b():
    assert PARAMETERS * without_master(MIXED) == pytest.approx(3.5e12)
    assert update_seconds(PARAMETERS, without_master(MIXED), 1.6e12) == pytest.approx(2.19, abs=0.01)
    assert PARAMETERS * update_bytes(MIXED).update == pytest.approx(4.9e12)
    alone = update_seconds(PARAMETERS, update_bytes(MIXED).update, 1.6e12)
    assert alone == pytest.approx(3.06, abs=0.01)
    assert update_seconds(PARAMETERS / 64, update_bytes(MIXED).update, 1.6e12) == pytest.approx(alone / 64)
