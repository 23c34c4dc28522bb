"""The three graphs of the engine as MindSpore's front end for Ascend leaves them, on one of eight ranks."""

import re
from math import prod
from pathlib import Path

import pytest

from ms_zero.graph.frontend import Case, FrontEndUnavailable, compile_case

BUILDER = f"{Path(__file__).with_name('step_cases.py')}:build"


def compiled(graph, preset="runs/quickstart", keep=None, overrides=()):
    overrides = ["model.num_layers=2", *overrides]
    arguments = {"graph": graph, "preset": preset, "overrides": overrides, "size": 8}
    try:
        found = compile_case(Case(BUILDER, arguments, rank=0, size=8), timeout_s=900.0, keep=keep)
    except FrontEndUnavailable as reason:
        pytest.skip(str(reason))
    assert found.deprecations() == []
    return found


@pytest.mark.parametrize("preset", ["runs/quickstart", "runs/llama-tiny"])
def test_a_microbatch_computes_in_bf16_and_does_not_communicate(preset):
    found = compiled("microbatch", preset, overrides=["model.dropout=0.1"])
    assert found.graph.operations == ()
    assert found.graph.counts["FlashAttentionScore"] == found.graph.counts["FlashAttentionScoreGrad"] == 2
    masks = [kind for name, kind in found.graph.parameters.items() if name.endswith(".mask")]
    assert [kind.dtype for kind in masks] == ["UInt8"] * 5  # after the embeddings, and twice a block
    others = [kind for kind in found.graph.parameters.values() if kind not in masks]
    assert {kind.dtype for kind in others} <= {"Float32", "F32"}


def test_the_end_of_a_step_sums_every_gradient_once_in_buckets(tmp_path):
    found = compiled("end", keep=tmp_path / "graph.ir")
    sums = found.graph.select("AllReduce")
    assert len(sums) == len(found.graph.operations) > 1
    lines = re.findall(r"= PrimFunc_AllReduce\(.*|= AllReduce\(.*", (tmp_path / "graph.ir").read_text())
    assert len(lines) == len(sums) and all('group: "hccl_world_group"' in line for line in lines)
    total = sum(prod(shape) for shape in found.notes.values())
    assert sum(prod(operation.sent.shape) for operation in sums) == total + 1  # and the loss
    largest = max(prod(shape) for shape in found.notes.values())
    assert all(prod(operation.sent.shape) <= max(2**18, largest) for operation in sums)


def test_the_update_writes_every_parameter_and_does_not_communicate():
    found = compiled("update")
    assert found.graph.operations == ()
    # Weight, two moments, and the gradient back to zero; and the loss.
    assert found.graph.counts["Assign"] == 4 * len(found.notes) + 1
