"""Combinations of keys that MindSpore's AutoParallel cannot do, or would silently do otherwise."""

from collections.abc import Callable, Iterator
from types import MappingProxyType
from typing import Any

SCHEDULES = MappingProxyType(
    {"gpipe": ("gpipe", True), "1f1b": ("1f1b", False), "interleaved": ("1f1b", True)}
)
"""Schedule of a config -> (scheduler of MindSpore, interleave)."""

COMPILED = MappingProxyType({"zb-v": ("zero_bubble_v", True), "seqpipe": ("seqpipe", True)})
"""The same for schedules that only MindSpore's compiler has."""


def stages_per_rank(schedule: str, virtual_stages: int) -> int:
    """Model chunks on each pipeline rank; zb-v goes through the ranks once forth and once back."""
    return 2 if schedule == "zb-v" else virtual_stages


def problems(value: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, message) for each.

    Args:
        value: the value of a dotted key; None where the chosen family has no such key.
    """
    yield from _pipeline_problems(value)
    yield from _expert_problems(value)
    yield from _context_problems(value)
    yield from _interleave_problems(value)
    stage = value("parallel.zero_stage")
    if value("parallel.sync_each_microbatch") != (stage >= 2):
        message = f"hsdp reduces in every microbatch in stages 2 and 3 and once a step below ({stage} here)"
        yield "parallel.sync_each_microbatch", f"{message}; leave it on auto"
    shards = value("parallel.dp_shard") * value("parallel.cp")
    if stage > 0 and value("parallel.dp_replicate") > 1 and shards == 1:
        message = "replicas of one rank have nothing to shard, and MindSpore would shard over the replicas"
        yield "parallel.zero_stage", f"{message}; set it to 0, or parallel.dp_shard above 1"
    recomputes = value("memory.recompute") in ("full", "every_k")
    if stage == 3 and recomputes and value("model.family") == "gpt" and value("train.accumulation_steps") > 1:
        message = "MindSpore 2.10.0 does not compile gpt with it in zero_stage 3 and several microbatches"
        yield "memory.recompute", f"{message}; use selective, or zero_stage 2"
    if stage == 3 and not value("parallel.reshard_after_forward"):
        message = "hsdp frees weights after forward; use zero_stage 2 to keep them"
        yield "parallel.reshard_after_forward", message
    if value("offload.optimizer") == "cpu" and value("optim.kind") == "sgd":
        message = "optim.kind sgd has no state that could leave the device"
        yield "offload.optimizer", f"{message}; use none"
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
    schedule = value("parallel.schedule")
    if value("parallel.pp") > 1 and schedule in ("interleaved", "zb-v"):
        yield "parallel.schedule", f"{schedule} is not tried with experts; use 1f1b"
    if min(value("parallel.ep"), value("parallel.dp_replicate")) > 1 and value("parallel.zero_stage") > 0:
        message = "with parallel.ep hsdp would shard experts over the replicas as well"
        yield "parallel.dp_replicate", f"{message}; use 1, or zero_stage 0"
    if value("model.router_bias"):
        message = "a bias that follows the load is moved by the host between graphs, and here a step is one"
        yield "model.router_bias", f"{message}; set it to false"


def _pipeline_problems(value: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    ranks, schedule = value("parallel.pp"), value("parallel.schedule")
    if ranks == 1:
        return
    known = {**SCHEDULES, **COMPILED}
    if schedule not in known:
        message = f"MindSpore's compiler has no order {schedule}; use one of {', '.join(known)}"
        yield "parallel.schedule", message
    count = value("train.accumulation_steps")
    if schedule == "zb-v" and count < 2 * ranks:
        message = f"zb-v needs two microbatches a pipeline rank, {2 * ranks}, not {count}"
        yield "train.accumulation_steps", f"{message}; raise it, or use 1f1b"
    elif count < ranks:
        message = f"MindSpore's Pipeline takes as many microbatches as stages or more, {ranks}, not {count}"
        yield "train.accumulation_steps", f"{message}; raise it, or lower parallel.pp"
    if schedule == "seqpipe":
        yield from _parts_problems(value)
    layers = value("parallel.stage_layers")
    if 0 in (layers if schedule == "seqpipe" else layers[1:-1]):
        message = "the compiler needs a block on each stage, but for the ends without seqpipe"
        yield "parallel.stage_layers", f"{message}; give each at least one"


def _parts_problems(value: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    parts, length = value("parallel.sequence_parts"), value("data.seq_len")
    if value("model.family") == "moe":
        yield "parallel.schedule", "seqpipe: routers see whole sequences; use 1f1b"
    if length % parts:
        message = f"{parts} does not divide the {length} tokens of a sequence"
        yield "parallel.sequence_parts", f"{message}; change it, or data.seq_len"
    if value("precision.compute") == "fp32":
        message = "seqpipe: attention of a part of a sequence takes 16 bits"
        yield "precision.compute", f"{message}; use bf16 or fp16"
    if value("memory.recompute") != "none":
        message = "seqpipe: what attention keeps of the parts before cannot be computed again"
        yield "memory.recompute", f"{message}; set it to none"
    for path in ("data.reset_attention", "data.reset_positions"):
        if value(path):
            yield path, "seqpipe: parts know nothing of the documents of parts before; set it to false"
    for path in ("parallel.cp", "parallel.micro_batch_interleave"):
        if value(path) > 1:
            yield path, f"seqpipe cuts sequences itself, {value(path)} times more is not done; set it to 1"


def _interleave_problems(value: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    parts, samples = value("parallel.micro_batch_interleave"), value("train.micro_batch_size")
    if parts == 1:
        return
    if value("model.family") == "moe":
        yield "parallel.micro_batch_interleave", "not tried with experts; set it to 1"
    if value("parallel.tp") == 1:
        message = f"{parts} parts of a microbatch overlap the sums of tensor parallelism, and there are none"
        yield "parallel.micro_batch_interleave", f"{message}; set it to 1, or parallel.tp above 1"
    if samples % parts:
        message = f"{parts} does not divide the {samples} samples of a microbatch"
        yield "parallel.micro_batch_interleave", f"{message}; change it, or train.micro_batch_size"


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
