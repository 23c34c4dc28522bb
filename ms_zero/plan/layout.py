"""A layout: how a model is spread over devices, and in which precision and order it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, TypeVar

from ms_zero.pipeline.balance import balance, refuse_counts
from ms_zero.pipeline.schedule import Schedule, held_by_stage, in_flight_bound, refuse, refuse_use
from ms_zero.plan.parameters import (
    device_head_parameters,
    embedding_parameters,
    layer_parameters,
)
from ms_zero.plan.recompute import RECOMPUTE_KINDS
from ms_zero.plan.shapes import ModelShape

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Precision:
    """Bytes per element of each kind of tensor.

    Args:
        weight: stored parameters.
        gathered: parameters while they are gathered for a unit that computes with them.
        gradient: accumulated gradients.
        master: the optimizer's own copy of the weights; 0 when ``weight`` is that copy.
        moments: all optimizer moments together.
        activation: activations and their gradients, also on the wire.
        reduce: gradients on the wire.
        logits: logits and their gradient.
        rounded: whether activations are fp32 rounded to the values of bf16 (bf16 on a CPU).

    """

    weight: int = 2
    gathered: int = 2
    gradient: int = 2
    master: int = 4
    moments: int = 8
    activation: int = 2
    reduce: int = 2
    logits: int = 4
    rounded: bool = False

    @property
    def bytes_per_parameter(self) -> int:
        """Weights, gradients and optimizer state without any sharding."""
        return self.weight + self.gradient + self.master + self.moments


MIXED = Precision()
"""The ZeRO paper's 16 bytes: 2 + 2 + 12."""
MIXED_FP32_GRADIENTS = Precision(gradient=4, reduce=4)
"""Megatron's 18 bytes: 2 + 4 + 12."""
FP32 = Precision(weight=4, gathered=4, gradient=4, master=0, activation=4, reduce=4)
"""All in fp32: 16 bytes, no second copy of the weights."""
MINDFORMERS = Precision(weight=4, gathered=2, gradient=2, master=0)
"""MindFormers: fp32 parameters cast to 16 bits where they are used, 16-bit gradients: 14 bytes."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to train a model.

    Args:
        seq_len: tokens of a sample.
        engine: what runs it. With graph, MindSpore's AutoParallel cuts it; see ``plan.compiled``.
        pp: pipeline-parallel degree.
        tp: tensor-parallel degree.
        cp: context-parallel degree.
        context: how attention reaches other ranks' tokens, ring or ulysses; no effect when ``cp`` is 1.
        ep: expert-parallel degree; folds into cp x dp_shard.
        dp_replicate: data-parallel ranks that replicate what ``dp_shard`` shards.
        dp_shard: data-parallel ranks that ZeRO shards over.
        zero_stage: 0 none, 1 optimizer state, 2 and gradients, 3 and weights.
        micro_batch_size: samples of one forward pass of one data-parallel rank.
        microbatches: forward passes per optimizer step of one data-parallel rank.
        schedule: one of SCHEDULES; without effect when ``pp`` is 1.
        virtual_stages: model chunks per pipeline rank.
        order: a schedule of one's own instead of ``schedule``; a stage of it is a model chunk.
        recompute: what is computed again in backward, one of RECOMPUTE_KINDS; see ``plan.recompute``.
        recompute_every: k of ``every_k``.
        recompute_budget: bytes that the layers may keep at the peak, of ``budget``.
        sequence_parallel: whether tp also splits norms and residuals along the sequence.
        flash_attention: whether scores are never stored.
        reshard_after_forward: whether stage 3 frees weights between forward and backward.
        hsdp_level: MindFormers' optimizer parallel instead of ``zero_stage``: 1 shards weights and optimizer
            state and keeps gathered weights until backward; 2 gradients as well; 3 gathers again in backward.
        optimizer_offload: share of the optimizer's state that lives in host memory or on disk, 0 to 1.
        offload_to: where it lives.
        parameter_offload: whether sharded weights live in host memory (stage 3).
        activation_offload: whether what layers keep for backward lives in host memory.
        activation_bits: bits of an element of what layers keep for backward; None: those of its dtype.
        dropout: whether dropout is on: its masks are kept as well.
        bucket_bytes: upper size of a gradient bucket.
        prefetch: units whose weights stage 3 gathers ahead.
        unit_elements: parameters that make a cell a unit of stage 3, bottom-up; None: blocks and ends are.
        sync_each_microbatch: whether gradients are reduced in every microbatch and kept as shards, or once a
            step and kept whole until then; None: in stages 2 and 3. See ``syncs``.
        precision: bytes per element.
        chunk_layers: layers of each model chunk; None: about equally many parameters (see ``split_layers``).

    """

    seq_len: int
    engine: Literal["eager", "graph"] = "eager"
    pp: int = 1
    tp: int = 1
    cp: int = 1
    context: Literal["ring", "ulysses"] = "ring"
    ep: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    zero_stage: int = 0
    micro_batch_size: int = 1
    microbatches: int = 1
    schedule: str = "1f1b"
    virtual_stages: int = 1
    order: Schedule | None = None
    recompute: str = "none"
    recompute_every: int = 1
    recompute_budget: float = 0.0
    sequence_parallel: bool = False
    flash_attention: bool = True
    reshard_after_forward: bool = True
    hsdp_level: int | None = None
    optimizer_offload: float = 0.0
    offload_to: Literal["cpu", "nvme"] = "cpu"
    parameter_offload: bool = False
    activation_offload: bool = False
    activation_bits: int | None = None
    dropout: bool = False
    bucket_bytes: float = 25 * 2**20
    prefetch: int = 1
    unit_elements: int | None = None
    sync_each_microbatch: bool | None = None
    precision: Precision = MIXED
    chunk_layers: tuple[int, ...] | None = None

    @property
    def devices(self) -> int:
        """All ranks."""
        return self.pp * self.tp * self.cp * self.dp_replicate * self.dp_shard

    @property
    def dp(self) -> int:
        """Ranks that see different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def shard_degree(self) -> int:
        """Ranks over which dense parameters are sharded."""
        return self.dp_shard * self.cp

    @property
    def expert_shard_degree(self) -> int:
        """Ranks over which a rank's experts are sharded."""
        return max(1, self.dp_shard * self.cp // self.ep)

    @property
    def syncs(self) -> bool:
        """Whether gradients are reduced in every microbatch and kept as shards."""
        if self.sync_each_microbatch is not None:
            return self.sync_each_microbatch
        return self.zero_stage >= 2 if self.hsdp_level is None else self.hsdp_level >= 2

    @property
    def passes_context(self) -> bool:
        """Whether keys and values go round a ring while attention computes."""
        return self.context == "ring"

    @property
    def chunks(self) -> int:
        """Model chunks."""
        return self.pp * self.virtual_stages if self.order is None else self.order.num_stages

    def rank_of(self, chunk: int) -> int:
        """The pipeline rank of a model chunk: with published schedules chunk c is on rank c % pp."""
        return chunk % self.pp if self.order is None else self.order.placement[chunk]

    def on_rank(self, of_chunks: Sequence[T], rank: int) -> Sequence[T]:
        """Of what each chunk has, that of the chunks of a pipeline rank."""
        if self.order is None:
            return of_chunks[rank :: self.pp]
        return tuple(of_chunks[chunk] for chunk in self.order.stages_of(rank))

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights wait, apart from those of inputs."""
        if self.pp == 1:
            return False
        return self.schedule == "zb-h1" if self.order is None else self.order.splits_backward()

    def in_flight(self, rank: int, *, until_weights: bool = True) -> tuple[int, ...]:
        """Microbatches whose activations a pipeline rank holds at its peak, for each of its chunks.

        ``until_weights``: what waits for the gradients of weights counts as held.
        """
        if self.order is not None:
            return held_by_stage(self.order, rank, "W" if until_weights else "B")
        if until_weights:
            return in_flight(self.schedule, self.pp, rank, self.microbatches, self.virtual_stages)
        return (in_flight_bound(self.schedule, rank, self.pp, self.microbatches),)

    @property
    def global_batch_size(self) -> int:
        """Samples of an optimizer step."""
        return self.micro_batch_size * self.microbatches * self.dp

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step."""
        return self.global_batch_size * self.seq_len

    def replace(self, **changes: Any) -> Layout:
        """A copy with some fields changed.

        The search makes many: this takes a tenth of the time of ``dataclasses.replace``.
        """
        assert changes.keys() <= vars(self).keys(), changes
        copy = object.__new__(Layout)
        vars(copy).update(vars(self), **changes)
        return copy

    def layers_of_chunks(self, shape: ModelShape) -> tuple[int, ...]:
        """Layers of each model chunk."""
        return self.chunk_layers or split_layers(shape, self.chunks)

    def violations(self, shape: ModelShape) -> list[str]:
        """Every reason why this layout cannot train this model; empty when it can."""
        found = [*self._bad_degrees(), *self._bad_splits(shape), *self._bad_pipeline(shape)]
        if self.seq_len > shape.max_seq_len:
            found.append(f"seq_len {self.seq_len} exceeds the model's max_seq_len {shape.max_seq_len}")
        return found

    def _bad_degrees(self) -> list[str]:
        degrees = ("pp", "tp", "cp", "ep", "dp_replicate", "dp_shard", "virtual_stages", "micro_batch_size")
        found = [f"{name} {getattr(self, name)} is below 1" for name in degrees if getattr(self, name) < 1]
        if self.microbatches < 1 or self.seq_len < 1:
            found.append("microbatches and seq_len must be at least 1")
        if not found and (self.dp_shard * self.cp) % self.ep:
            found.append(f"ep {self.ep} does not divide dp_shard x cp = {self.dp_shard * self.cp}")
        return found

    def _bad_splits(self, shape: ModelShape) -> list[str]:
        found = []
        for attention in {layer.attention for _, layer in shape.blocks}:
            if attention.num_heads % self.tp:
                found.append(f"tp {self.tp} does not divide {attention.num_heads} attention heads")
            elif attention.num_kv_heads % self.tp and self.tp % attention.num_kv_heads:
                found.append(f"tp {self.tp} and {attention.num_kv_heads} key-value heads do not divide")
        for mlp in {layer.mlp for _, layer in shape.blocks if layer.mlp is not None}:
            if mlp.ffn_hidden_size % self.tp:
                found.append(f"tp {self.tp} does not divide ffn_hidden_size {mlp.ffn_hidden_size}")
        found += self._bad_context(shape) if self.cp > 1 else []
        if self.sequence_parallel and self.seq_len // self.cp % self.tp:
            found.append(f"tp {self.tp} does not divide the {self.seq_len // self.cp} tokens of a cp rank")
        if self.ep > 1 and (not shape.is_moe or shape.num_experts % self.ep):
            found.append(f"ep {self.ep} does not divide {shape.num_experts} experts")
        return found

    def _bad_context(self, shape: ModelShape) -> list[str]:
        if self.context == "ring":
            rest = self.seq_len % (2 * self.cp)
            return [f"2 x cp = {2 * self.cp} does not divide seq_len {self.seq_len}"] if rest else []
        found = [f"cp {self.cp} does not divide seq_len {self.seq_len}"] if self.seq_len % self.cp else []
        for attention in {layer.attention for _, layer in shape.blocks}:
            heads = attention.num_heads // self.tp
            kv_heads = heads if attention.latent else max(1, attention.num_kv_heads // self.tp)
            if heads % self.cp or (kv_heads % self.cp and self.cp % kv_heads):
                found.append(f"cp {self.cp} cannot share {heads} heads and {kv_heads} key-value heads")
        return found

    def _bad_pipeline(self, shape: ModelShape) -> list[str]:
        if self.order is not None:
            refusal = refuse_use(self.order, self.pp, self.microbatches)
        else:
            refusal = refuse(self.schedule, self.pp, self.microbatches, self.virtual_stages)
        found = [refusal] if refusal and self.pp > 1 else []
        if self.virtual_stages > 1 and self.pp == 1:
            found.append("virtual stages need pp above 1")
        if self.recompute not in RECOMPUTE_KINDS:
            found.append(f"recompute {self.recompute} is not one of {', '.join(RECOMPUTE_KINDS)}")
        if self.chunks > shape.num_layers:
            found.append(f"{self.chunks} model chunks exceed the {shape.num_layers} layers")
        if self.chunk_layers is not None:
            found += filter(None, [refuse_counts(self.chunk_layers, shape.num_layers, self.chunks)])
        return found


@lru_cache(maxsize=4096)
def split_layers(shape: ModelShape, chunks: int) -> tuple[int, ...]:
    """Layers of each chunk, so that chunks have about equally many parameters, as training shares them out.

    The first chunk also holds the embeddings, the last one norm and head, with a copy of a tied matrix. A
    chunk has no layers where the ends weigh more.
    """
    costs = [
        layer_parameters(layer, shape.hidden_size, shape.norm).total
        for number, layer in shape.blocks
        for _ in range(number)
    ]
    first, last = embedding_parameters(shape), device_head_parameters(shape, tp=1, has_embedding=False)
    return tuple(len(part) for part in balance(costs, chunks, first=first, last=last))


def in_flight(schedule: str, pp: int, rank: int, microbatches: int, virtual_stages: int) -> tuple[int, ...]:
    """Microbatches whose activations pipeline rank ``rank`` holds at its peak, for each of its chunks.

    gpipe holds all; 1f1b min(pp - rank, microbatches); zb-h1 min(pp, microbatches) on every rank, because the
    gradients of the weights come later; interleaved the forwards before the first backward,
    2 (pp - rank - 1) + (v - 1) pp + 1, taken chunk by chunk in groups of pp.
    """
    assert 0 <= rank < pp, (rank, pp)
    if schedule == "zb-h1":
        return (min(pp, microbatches),) * virtual_stages
    if schedule != "interleaved":
        return (in_flight_bound(schedule, rank, pp, microbatches),) * virtual_stages
    total = in_flight_bound(schedule, rank, pp, microbatches, virtual_stages)
    rounds, rest = divmod(total, pp * virtual_stages)
    return tuple(rounds * pp + min(max(rest - chunk * pp, 0), pp) for chunk in range(virtual_stages))
