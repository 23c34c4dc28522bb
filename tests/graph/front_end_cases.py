"""Cases of the front end for the tests: a small model under a layout, compiled once for each question."""

import functools
import tempfile
from pathlib import Path

import pytest

from ms_zero.config import load_config
from ms_zero.graph.frontend import Case, FrontEndUnavailable, compile_case
from ms_zero.mesh import AXES, Mesh

BUILD_RUN = "ms_zero.graph.inspected:build_run"
TIMEOUT_S = 1500.0  # many times what it takes; machines may be busy

_RUN = """
include: [models/llama-tiny]
model: {num_layers: 1, hidden_size: 64, num_heads: 4, num_kv_heads: 2, ffn_hidden_size: 128, vocab_size: 512,
  max_seq_len: 64}
data: {source: stdlib, seq_len: 32}
train: {steps: 10, micro_batch_size: 1, accumulation_steps: 1, output_dir: /tmp/unused}
optim: {warmup_steps: 1, kind: sgd, clip_norm: 0}
precision: {policy: bf16}
hardware: {target: Ascend}
"""
# What only Llama has a key for.
_OF_LLAMA = {"llama": "", "gpt": " num_kv_heads: 2,"}
HIDDEN, TOKENS, PARAMETERS = 64, 32, 12


@functools.cache
def run_file(family="llama") -> str:
    """Path of the run file that the cases change."""
    path = Path(tempfile.mkdtemp(prefix="ms-zero-graph-tests-"), "run.yaml")
    path.write_text(_RUN.replace("llama-tiny", f"{family}-tiny").replace(_OF_LLAMA[family], ""))
    return str(path)


def config_of(workers, *overrides):
    """The config of a case."""
    return load_config(run_file(), list(overrides), workers, to_run=False).config


def mesh_of(workers, *overrides):
    """Its mesh."""
    parallel = config_of(workers, *overrides).parallel
    return Mesh(**{axis: getattr(parallel, axis) for axis in AXES})


def text_of(workers, *overrides, rank=0):
    """MindSpore's text of the graph of a case."""
    compiled(workers, *overrides, rank=rank)
    return kept_at(workers, overrides, rank).read_text()


def kept_at(workers, overrides, rank):
    """Where that text is kept."""
    name = "_".join([str(workers), *overrides, str(rank)])
    return Path(run_file()).parent / f"{name}.ir"


@functools.cache
def compiled(workers, *overrides, rank=0, family="llama"):
    """What the front end makes of a case; skips the test where MindSpore is another version."""
    arguments = {"run": run_file(family), "overrides": list(overrides), "workers": workers}
    case, keep = Case(BUILD_RUN, arguments, rank=rank, size=workers), kept_at(workers, overrides, rank)
    try:
        return compile_case(case, timeout_s=TIMEOUT_S, keep=keep)
    except FrontEndUnavailable as reason:
        pytest.skip(str(reason))
