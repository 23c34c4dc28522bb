"""Elements on the wire, and bytes of an optimizer step: the published figures."""

import pytest

from ms_zero.plan.layout import FP32, MIXED
from ms_zero.plan.traffic import context_parallel, data_parallel, expert_parallel, pipeline, tensor_parallel
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
    assert expert_parallel(tokens, hidden, 2, 8) == 4 * 2 * tokens * hidden * 7 / 8


def test_data_parallel_traffic_of_the_stages():
    ring = 7 / 8
    for stage in (0, 1, 2):
        assert data_parallel(PARAMETERS, 8, stage) == pytest.approx(2 * PARAMETERS * ring)
    assert data_parallel(PARAMETERS, 8, 3) == pytest.approx(3 * PARAMETERS * ring)


def test_microbatches_cost_only_who_reduces_in_each():
    share = PARAMETERS * 7 / 8
    assert data_parallel(PARAMETERS, 8, 1, microbatches=4) == pytest.approx(2 * share)
    assert data_parallel(PARAMETERS, 8, 2, microbatches=4) == pytest.approx(5 * share)
    assert data_parallel(PARAMETERS, 8, 3, microbatches=4) == pytest.approx(12 * share)
    assert data_parallel(PARAMETERS, 8, 3, microbatches=4, reshard=False) == pytest.approx(8 * share)


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
