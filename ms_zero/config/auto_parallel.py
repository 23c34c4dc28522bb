"""Combinations of keys that MindSpore's AutoParallel cannot do, or would silently do otherwise."""

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

SCHEDULES = MappingProxyType(
    {"gpipe": ("gpipe", True), "1f1b": ("1f1b", False), "interleaved": ("1f1b", True)}
)
"""Schedule of a config -> (scheduler of MindSpore, interleave)."""


def problems(value: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, message) for each.

    Args:
        value: the value of a dotted key; None where the chosen family has no such key.
    """
    yield from _pipeline_problems(value)
    yield from _expert_problems(value)
    yield from _context_problems(value)
    stage = value("parallel.zero_stage")
    if value("parallel.sync_each_microbatch") != (stage >= 2):
        message = f"hsdp reduces in every microbatch in stages 2 and 3 and once a step below ({stage} here)"
        yield "parallel.sync_each_microbatch", f"{message}; leave it on auto"
    if stage == 3 and not value("parallel.reshard_after_forward"):
        message = "hsdp frees weights after forward; use zero_stage 2 to keep them"
        yield "parallel.reshard_after_forward", message
    width = value("model.head_dim")
    if not isinstance(width, int):
        width = value("model.hidden_size") // value("model.num_heads")
    if value("precision.compute") != "fp32" and width % 16:
        message = f"FlashAttentionScore takes heads of multiples of 16, not {width}"
        yield "model.num_heads", f"{message}; change it, or compute in fp32"


def _expert_problems(value: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    if value("model.family") != "moe":
        return
    if value("parallel.cp") > 1:
        message = "routers see whole sequences in the graph engine: capacity and auxiliary loss are theirs"
        yield "parallel.cp", f"{message}; use 1"
    if value("parallel.pp") > 1:
        message = "stages send the auxiliary loss of routers and MindSpore 2.10.0 leaves out the receive"
        yield "parallel.pp", f"{message}; use 1"
    if value("model.router_bias"):
        message = "a bias that follows the load is moved by the host between graphs, and here a step is one"
        yield "model.router_bias", f"{message}; set it to false"


def _pipeline_problems(value: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    if value("parallel.pp") == 1:
        return
    schedule = value("parallel.schedule")
    if schedule not in SCHEDULES:
        message = f"MindSpore's compiler has no order {schedule}; use one of {', '.join(SCHEDULES)}"
        yield "parallel.schedule", message
    if value("model.tie_embeddings"):
        message = "MindSpore 2.10.0 counts the gradients of a table that stages share twice in the norm"
        yield "model.tie_embeddings", f"{message}, and does not sum them with hsdp; set it to false"


def _context_problems(value: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    degree = value("parallel.cp")
    if degree == 1:
        return
    if value("train.micro_batch_size") > 1:
        message = "with parallel.cp the graph engine takes one sample at a time on each rank; set it to 1"
        yield "train.micro_batch_size", message
    if value("precision.compute") == "fp32":
        yield "precision.compute", "attention over ranks takes 16 bits; use bf16 or fp16"
    kv_heads, tp = value("model.num_kv_heads"), value("parallel.tp")
    if value("parallel.context") == "ulysses" and isinstance(kv_heads, int) and kv_heads % (tp * degree):
        message = f"Ulysses of the graph engine gives each rank key-value heads of its own, and {tp * degree}"
        yield "parallel.cp", f"{message} ranks do not divide {kv_heads}; use a divisor, or the ring"
