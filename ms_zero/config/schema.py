"""The sections of a run config: frozen, typed, concrete.

A loaded config holds only usable values: `auto` exists in files, never here. What a key means is said once,
in its `key(...)`; loading, `explain` and the checks all read it from there.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, Final, Literal, get_type_hints


class _Mark(Enum):
    AUTO = "auto"
    REQUIRED = "required"


AUTO: Final = _Mark.AUTO
"""Stands for `auto` while a config is being loaded, so that it cannot be mixed up with a text."""
REQUIRED: Final = _Mark.REQUIRED
"""The default of a key that has none."""

_INT_MAX = 2**31 - 1


@dataclass(frozen=True)
class Key:
    """What a config file may say for one field.

    Args:
        doc: Meaning and unit, one sentence or two.
        default: Value when no layer sets the key; AUTO when it is derived, or REQUIRED.
        auto: How `auto` is derived; "" when the key cannot be `auto`.
        minimum: Smallest number allowed.
        maximum: Largest number allowed.
        above: The number must be greater than this.
        below: The number must be less than this.
        used_when: (key of the same section, tuple or range of its values for which this key has an effect),
            or None when it always has one.

    """

    doc: str
    default: Any = REQUIRED
    auto: str = ""
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    used_when: tuple[str, tuple[Any, ...] | range] | None = None

    def allows(self, number: float) -> bool:
        """Say whether a number lies in the range."""
        return (
            (self.minimum is None or number >= self.minimum)
            and (self.maximum is None or number <= self.maximum)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )

    def range_text(self, brief: bool = False) -> str:
        """Describe the range: `at least 1 and at most 8`; `brief` leaves out a maximum of billions."""
        maximum = None if brief and self.maximum is not None and self.maximum >= _INT_MAX else self.maximum
        bounds = (
            ("at least", self.minimum),
            ("greater than", self.above),
            ("at most", maximum),
            ("less than", self.below),
        )
        return " and ".join(f"{word} {bound}" for word, bound in bounds if bound is not None)


def key(doc: str, **limits: Any) -> Any:
    """Declare a config field; see Key. Without a concrete default the constructor requires the field."""
    spec = Key(doc, **limits)
    default = {} if spec.default is REQUIRED or spec.auto else {"default": spec.default}
    return field(metadata={"key": spec}, **default)


def _count(doc: str, **limits: Any) -> Any:
    """Declare an integer of at least 1."""
    return key(doc, **{"minimum": 1, "maximum": _INT_MAX, **limits})


def _dropout() -> Any:
    """Declare the rate that all families have."""
    doc = "Rate of dropout after the embeddings, attention and MLP; none on attention probabilities."
    return key(doc, default=0.0, minimum=0, below=1)


def _vocab_size() -> Any:
    return _count("Rows of the embedding.", default=AUTO, auto="the tokenizer's vocabulary")


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """GPT: learned positions, LayerNorm, GELU."""

    family: Literal["gpt"] = key("Model family; decides which other keys there are.", default="gpt")
    vocab_size: int = _vocab_size()
    hidden_size: int = _count("Width of the residual stream.", maximum=2**20)
    num_layers: int = _count("Number of transformer blocks.", maximum=100_000)
    num_heads: int = _count("Attention heads; must divide hidden_size.", maximum=2**16)
    ffn_hidden_size: int = _count(
        "Width inside the MLP.", default=AUTO, auto="4 x hidden_size", maximum=2**22
    )
    max_seq_len: int = _count("Rows of the position embedding: the longest sequence in tokens.")
    norm_eps: float = key("Epsilon of LayerNorm.", default=1e-5, above=0, below=1)
    init_std: float = key("Standard deviation of the initial weights.", default=0.02, above=0, maximum=10)
    tie_embeddings: bool = key("Whether the output head shares the token embedding.", default=True)
    dropout: float = _dropout()


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama-3 scaling of rotary frequencies."""

    factor: float = key("Slow-down of the low frequencies.", minimum=1, maximum=1e6)
    low_freq_factor: float = key("Wavelengths over original_max_seq_len / this scale.", above=0, maximum=1e6)
    high_freq_factor: float = key("Wavelengths below original_max_seq_len / this stay.", above=0, maximum=1e6)
    original_max_seq_len: int = _count("Context length before scaling, in tokens.")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """Llama family: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    family: Literal["llama"] = key("Model family; decides which other keys there are.", default="llama")
    vocab_size: int = _vocab_size()
    hidden_size: int = _count("Width of the residual stream.", maximum=2**20)
    num_layers: int = _count("Number of transformer blocks.", maximum=100_000)
    num_heads: int = _count("Query heads.", maximum=2**16)
    num_kv_heads: int = _count("Key and value heads; must divide num_heads.", default=AUTO, auto="num_heads")
    head_dim: int = _count(
        "Width of a head; even.", default=AUTO, auto="hidden_size / num_heads", maximum=2**16
    )
    ffn_hidden_size: int = _count("Width inside the gated MLP.", maximum=2**22)
    max_seq_len: int = _count("Longest sequence in tokens.")
    norm_eps: float = key("Epsilon of RMSNorm.", default=1e-5, above=0, below=1)
    init_std: float = key("Standard deviation of the initial weights.", default=0.02, above=0, maximum=10)
    tie_embeddings: bool = key("Whether the output head shares the token embedding.", default=False)
    dropout: float = _dropout()
    rope_theta: float = key("Base of the rotary frequencies.", default=10000.0, minimum=1, maximum=1e12)
    rope_scaling: RopeScaling | None = key("Llama-3 scaling of rotary frequencies, or null.", default=None)  # noqa: RUF009
    qkv_bias: bool = key("Whether query, key and value projections have a bias (Qwen2).", default=False)
    qk_norm: bool = key("Whether queries and keys are RMS-normalised per head (Qwen3).", default=False)


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention (DeepSeek-V2)."""

    q_rank: int = key(
        "Width of the compressed query; 0: not compressed.", default=0, minimum=0, maximum=2**20
    )
    kv_rank: int = _count("Width of the compressed key and value.", maximum=2**20)
    nope_head_dim: int = _count("Part of a query or key head without positions.", maximum=2**16)
    rope_head_dim: int = _count("Part with rotary positions; even.", maximum=2**16)
    value_head_dim: int = _count("Width of a value head.", maximum=2**16)


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Llama-like with experts in place of the MLP: Mixtral, Qwen-MoE, DeepSeek."""

    family: Literal["moe"] = key("Model family; decides which other keys there are.", default="moe")
    vocab_size: int = _vocab_size()
    hidden_size: int = _count("Width of the residual stream.", maximum=2**20)
    num_layers: int = _count("Number of transformer blocks.", maximum=100_000)
    num_heads: int = _count("Query heads.", maximum=2**16)
    num_kv_heads: int = _count("Key and value heads; must divide num_heads.", default=AUTO, auto="num_heads")
    head_dim: int = _count(
        "Width of a query or key head; even.",
        default=AUTO,
        auto="hidden_size / num_heads, or what latent says",
        maximum=2**17,
    )
    max_seq_len: int = _count("Longest sequence in tokens.")
    norm_eps: float = key("Epsilon of RMSNorm.", default=1e-5, above=0, below=1)
    init_std: float = key("Standard deviation of the initial weights.", default=0.02, above=0, maximum=10)
    tie_embeddings: bool = key("Whether the output head shares the token embedding.", default=False)
    dropout: float = _dropout()
    rope_theta: float = key("Base of the rotary frequencies.", default=10000.0, minimum=1, maximum=1e12)
    qkv_bias: bool = key(
        "Whether query, key and value projections have a bias (Qwen2-MoE).", default=False
    )
    qk_norm: bool = key("Whether queries and keys are RMS-normalised per head (Qwen3-MoE).", default=False)
    latent: LatentConfig | None = key("Multi-head latent attention (DeepSeek), or null.", default=None)  # noqa: RUF009
    dense_layers: int = key(
        "First layers that have a plain gated MLP in place of experts.", default=0, minimum=0, maximum=100_000
    )
    ffn_hidden_size: int | None = _count("Width inside that MLP.", default=None, maximum=2**22)
    num_experts: int = _count("Routed experts of each other layer.", maximum=2**16)
    experts_per_token: int = _count("Experts that each token visits.", maximum=2**16)
    expert_ffn_hidden_size: int = _count("Width inside one routed expert.", maximum=2**22)
    shared_ffn_hidden_size: int = key(
        "Width inside all shared experts together, which every token visits.",
        default=0,
        minimum=0,
        maximum=2**22,
    )
    shared_gate: bool = key("Whether a vector gates the shared experts (Qwen2-MoE).", default=False)
    router: Literal["softmax", "sigmoid"] = key(
        "Scores of the experts: of the softmax over all (Mixtral), or each by itself (DeepSeek-V3).",
        default="softmax",
    )
    renormalise: bool = key(
        "Whether the weights of the chosen experts are divided by their sum.", default=True
    )
    routed_scaling: float = key("Factor on these weights.", default=1.0, above=0, maximum=1e6)
    expert_groups: int = _count(
        "Equal groups of experts, of which a token visits some.", default=1, maximum=2**16
    )
    groups_per_token: int = _count(
        "Groups that a token may visit: those with the best expert (softmax) or pair of them (sigmoid).",
        default=1,
        maximum=2**16,
    )
    capacity_factor: float | None = key(
        "Tokens of a sequence that an expert takes at most, over the even share; null: all that choose it.",
        default=None,
        above=0,
        maximum=1e6,
    )
    balance_coefficient: float = key(
        "Factor of the loss that evens out how often experts are visited in a sequence.",
        default=0.01,
        minimum=0,
        maximum=1000,
    )
    z_coefficient: float = key(
        "Factor of the loss that keeps the router's logits small.", default=0.0, minimum=0, maximum=1000
    )
    router_bias: bool = key(
        "Whether a bias for each expert, which follows the load, takes part in the choice (DeepSeek-V3).",
        default=False,
    )
    router_bias_speed: float = key(
        "What a step adds to the bias of an expert with little load, or takes from it.",
        default=0.001,
        above=0,
        maximum=1,
    )


ModelConfig = GPTConfig | LlamaConfig | MoEConfig


@dataclass(frozen=True, kw_only=True)
class DataPart:
    """One part of a mixture."""

    source: Literal["stdlib", "files", "jsonl", "megatron"] = key("Kind of data, as in data.source.")
    files: tuple[str, ...] = key(
        "Files of this part, as in data.files.",
        default=(),
        used_when=("source", ("files", "jsonl", "megatron")),
    )
    weight: float = key("Share of the samples, relative to the other parts.", above=0, maximum=1e9)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is trained on."""

    source: Literal["stdlib", "files", "jsonl", "megatron", "mixture"] = key(
        "stdlib: the source text of Python's standard library; files: text files; jsonl: JSON objects with a "
        "text field on each line; megatron: .bin/.idx pairs of token ids; mixture: parts of these by weight.",
        default="stdlib",
    )
    files: tuple[str, ...] = key(
        "Files or glob patterns, relative to the working directory; for megatron prefixes of the pairs.",
        default=(),
        used_when=("source", ("files", "jsonl", "megatron")),
    )
    parts: tuple[DataPart, ...] = key(
        "What is mixed, and how much of each.", default=(), used_when=("source", ("mixture",))
    )
    tokenizer: Literal["byte", "file", "none"] = key(
        "byte: 256 bytes and one end-of-text token; file: tokenizer_file; none: megatron data as it is.",
        default="byte",
    )
    tokenizer_file: str | None = key(
        "A tokenizer.json of Hugging Face tokenizers, relative to the working directory.",
        default=None,
        used_when=("tokenizer", ("file",)),
    )
    eot_token: str | None = key(
        "Token of tokenizer_file that ends a document; null: find it by its usual names.",
        default=None,
        used_when=("tokenizer", ("file",)),
    )
    seq_len: int = _count("Tokens in a training sample.")
    validation_fraction: float = key("Share of the documents held out.", default=0.05, minimum=0, below=1)
    reset_attention: bool = key("Whether tokens attend only within their own document.", default=False)
    reset_positions: bool = key("Whether positions count from the start of each document.", default=False)


_TRIPLE = "the batch algebra: global = micro x accumulation x data-parallel degree"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, in what batches, and where results go."""

    steps: int = _count("Optimizer steps in all.")
    global_batch_size: int = _count("Samples per optimizer step, over all ranks.", default=AUTO, auto=_TRIPLE)
    micro_batch_size: int = _count("Samples per forward pass on one rank.", default=AUTO, auto=_TRIPLE)
    accumulation_steps: int = _count("Forward passes per optimizer step.", default=AUTO, auto=_TRIPLE)
    rampup_samples: int = key(
        "Samples over which the global batch grows to its size; 0: full size at once.",
        default=0,
        minimum=0,
        maximum=_INT_MAX,
    )
    rampup_start: int | None = _count(
        "Global batch of the first steps; a multiple of micro_batch_size x dp.",
        default=None,
        used_when=("rampup_samples", range(1, _INT_MAX + 1)),
    )
    rampup_increment: int | None = _count(
        "Samples by which the global batch grows each time; a multiple of micro_batch_size x dp.",
        default=None,
        used_when=("rampup_samples", range(1, _INT_MAX + 1)),
    )
    seed: int = key("Seed of weights and data order.", default=1234, minimum=0, maximum=2**63 - 1)
    eval_interval: int = key("Steps between evaluations; 0: never.", default=0, minimum=0, maximum=_INT_MAX)
    eval_samples: int = _count(
        "Held-out samples per evaluation (fewer if there are fewer).",
        default=256,
        used_when=("eval_interval", range(1, _INT_MAX + 1)),
    )
    log_interval: int = _count("Steps between log lines.", default=1)
    output_dir: str = key("Folder for checkpoints and logs, relative to the working directory.")
    debug_collectives: bool = key(
        "Whether ranks compare each collective before they issue it (slow); a disagreement names rank, "
        "operation and line.",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and the learning-rate schedule."""

    kind: Literal["adamw", "sgd"] = key("adamw: decoupled decay; sgd: plain, for parity.", default="adamw")
    lr: float = key("Peak learning rate.", default=3e-4, above=0, maximum=1000)
    min_lr: float = key(
        "Learning rate at the end of the decay.",
        default=0.0,
        minimum=0,
        maximum=1000,
        used_when=("schedule", ("cosine", "linear", "wsd")),
    )
    beta1: float = key(
        "Decay of the first moment.", default=0.9, minimum=0, below=1, used_when=("kind", ("adamw",))
    )
    beta2: float = key(
        "Decay of the second moment.", default=0.95, minimum=0, below=1, used_when=("kind", ("adamw",))
    )
    eps: float = key(
        "Added to the root of the second moment.",
        default=1e-8,
        above=0,
        maximum=1,
        used_when=("kind", ("adamw",)),
    )
    weight_decay: float = key(
        "Decay of matrices; norms, biases and embeddings have none.", default=0.1, minimum=0, maximum=10
    )
    clip_norm: float = key("Limit of the global gradient norm; 0: off.", default=1.0, minimum=0)
    schedule: Literal["cosine", "linear", "constant", "wsd"] = key(
        "Shape of the learning rate after warm-up; wsd: constant, then linear decay.", default="cosine"
    )
    warmup_steps: int = key("Steps of linear warm-up from zero.", default=2000, minimum=0, maximum=_INT_MAX)
    decay_steps: int | None = _count(
        "Steps of the final decay.", default=None, used_when=("schedule", ("wsd",))
    )


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Degrees of the mesh; their product is the number of workers."""

    pp: int = _count("Pipeline stages.", default=1)
    schedule: str = key(
        "Order of the microbatches on the stages: gpipe, 1f1b, interleaved, zb-h1, with engine graph also "
        "zb-v and seqpipe, or the path of a .csv file with one row a rank and cells such as 0F3 (stage, F B "
        "or W, microbatch). Without stages a named one has no effect, so that a run file keeps it whatever "
        "pp is.",
        default="1f1b",
    )
    virtual_stages: int = _count(
        "Stages of each pipeline rank.", default=1, used_when=("schedule", ("interleaved",)), maximum=1000
    )
    sequence_parts: int = _count(
        "Parts of a sequence that go through the stages one after the other.",
        default=2,
        minimum=2,
        maximum=1024,
        used_when=("schedule", ("seqpipe",)),
    )
    stage_layers: tuple[int, ...] = key(
        "Blocks of each stage, in model order, 0 included; []: share them out by stage_balance.",
        default=(),
        minimum=0,
        maximum=_INT_MAX,
        used_when=("pp", range(2, _INT_MAX + 1)),
    )
    stage_balance: Literal["parameters", "time"] = key(
        "What stages have about equally much of: parameters, or time as the planner predicts it for the "
        "device (by arithmetic where the catalogue has no rates for it).",
        default="parameters",
        used_when=("pp", range(2, _INT_MAX + 1)),
    )
    dp_replicate: int = _count("Data-parallel replicas of the sharded groups.", default=1)
    dp_shard: int = _count(
        "Data-parallel ranks that share states.", default=AUTO, auto="workers / all other degrees"
    )
    cp: int = _count("Context-parallel ranks.", default=1)
    context: Literal["ring", "ulysses"] = key(
        "How attention reaches the tokens of other context-parallel ranks. ring: blocks of keys and values "
        "pass from rank to rank; ulysses: all-to-all exchanges give each rank some of the heads.",
        default="ring",
        used_when=("cp", range(2, _INT_MAX + 1)),
    )
    tp: int = _count("Tensor-parallel ranks.", default=1)
    ep: int = _count(
        "Expert-parallel ranks, among dp_shard x cp: each holds some of the experts.", default=1
    )
    micro_batch_interleave: int = _count(
        "Parts into which engine graph cuts a microbatch on Ascend, so that the sums of tensor parallelism "
        "of one part overlap with the computation of another.",
        default=1,
        maximum=1024,
    )
    sequence_parallel: bool = key(
        "Whether tensor-parallel ranks also cut norms, dropout and residuals along the sequence: the same "
        "traffic, less memory.",
        default=False,
    )
    zero_stage: int = key(
        "What data-parallel ranks shard: 0 nothing, 1 optimizer, 2 + gradients, 3 + weights.",
        default=0,
        minimum=0,
        maximum=3,
    )
    bucket_mb: float = key(
        "Bucket of parameters that are reduced and updated together, in MiB (2^20 bytes) of their stored "
        "dtype; stage 3 has a bucket per unit instead.",
        default=25.0,
        above=0,
        maximum=1e6,
        used_when=("zero_stage", (0, 1, 2)),
    )
    sync_each_microbatch: bool = key(
        "Whether gradients are reduced in every microbatch and kept as shards, or once per step and kept "
        "whole until then (less traffic).",
        default=AUTO,
        auto="whether zero_stage is 2 or 3",
    )
    reshard_after_forward: bool = key(
        "Whether weights are freed between forward and backward (less memory) or kept (less traffic).",
        default=True,
        used_when=("zero_stage", (3,)),
    )
    prefetch: int = key(
        "Units whose weights are gathered ahead of their use.",
        default=1,
        minimum=0,
        maximum=1000,
        used_when=("zero_stage", (3,)),
    )
    wrap: Literal["block", "size"] = key(
        "Units that are gathered together: block: a transformer block, an embedding, a head; size: cells "
        "bottom-up by wrap_elements.",
        default="block",
        used_when=("zero_stage", (3,)),
    )
    wrap_elements: int = _count(
        "Parameters that make a unit.", default=100_000_000, used_when=("wrap", ("size",))
    )


_BY_POLICY = "the policy"


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    """Dtypes, and the loss scale that fp16 needs."""

    policy: Literal["fp32", "bf16", "fp16"] = key(
        "fp32: everything in fp32; bf16 or fp16: weights and computation in 16 bits, gradients reduced and "
        "kept in fp32, fp32 master weights.",
        default="fp32",
    )
    param: Literal["fp32", "bf16", "fp16"] = key(
        "Stored weights, and what stage 3 gathers.", default=AUTO, auto=_BY_POLICY
    )
    compute: Literal["fp32", "bf16", "fp16"] = key(
        "Matrix products and activations.", default=AUTO, auto=_BY_POLICY
    )
    reduce: Literal["fp32", "bf16", "fp16"] = key("Gradients on the wire.", default="fp32")
    accumulate: Literal["fp32", "bf16", "fp16"] = key(
        "Gradients that are kept until the update.", default="fp32"
    )
    master: Literal["fp32", "param"] = key(
        "fp32: 16-bit weights have an fp32 copy that the optimizer updates; param: they have none, and small "
        "updates are lost.",
        default="fp32",
    )
    loss_scale: Literal["none", "static", "dynamic"] = key(
        "Factor on the loss that keeps fp16 gradients from vanishing.",
        default=AUTO,
        auto="dynamic if any dtype is fp16, else none",
    )
    loss_scale_convention: Literal["deepspeed", "megatron", "torch"] = key(
        "Whose rules a dynamic scale follows; `torch` halves on every overflow.",
        default="deepspeed",
        used_when=("loss_scale", ("dynamic",)),
    )
    initial_scale: float = key(
        "Loss scale of the first step (static: of all).",
        default=AUTO,
        auto="65536; dynamic with convention megatron: 2^32",
        above=0,
        maximum=2.0**126,
        used_when=("loss_scale", ("static", "dynamic")),
    )
    growth_interval: int = _count(
        "Steps without overflow after which the scale doubles.",
        default=AUTO,
        auto="1000; with convention torch 2000",
        used_when=("loss_scale", ("dynamic",)),
    )
    hysteresis: int = _count(
        "Overflows until the scale halves; with convention `torch` every one halves it.",
        default=2,
        used_when=("loss_scale", ("dynamic",)),
    )
    min_scale: float = key(
        "The scale never falls below.",
        default=1.0,
        above=0,
        maximum=2.0**126,
        used_when=("loss_scale", ("dynamic",)),
    )


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What is kept between forward and backward."""

    recompute: Literal["none", "full", "every_k", "sqrt", "selective", "budget"] = key(
        "Blocks that run forward again in backward: full: all; every_k: each recompute_every-th; sqrt: all, "
        "in segments; selective: their attention only; budget: as few as fit budget_gb.",
        default="none",
    )
    recompute_every: int = _count(
        "Recompute one block of this many.", default=2, used_when=("recompute", ("every_k",))
    )
    budget_gb: float | None = key(
        "Activations that the blocks of a rank may keep, in GB (1e9 bytes).",
        default=None,
        above=0,
        maximum=1e6,
        used_when=("recompute", ("budget",)),
    )
    activations: Literal["device", "host", "int8", "int8_host"] = key(
        "Where and how what is kept waits for backward: in host memory, in 8 bits (inexact), or both.",
        default="device",
    )
    cells: str = key(
        "Cells whose activations wait that way: a pattern of paths with * and ?; `blocks` means every block.",
        default="blocks",
        used_when=("activations", ("host", "int8", "int8_host")),
    )


@dataclass(frozen=True, kw_only=True)
class OffloadConfig:
    """What leaves the device."""

    optimizer: Literal["none", "cpu", "nvme"] = key(
        "Where optimizer state is kept: none: on the device; cpu: in host memory; nvme: in files.",
        default="none",
    )
    fraction: float = key(
        "Share of the optimizer state that leaves the device.",
        default=1.0,
        minimum=0,
        maximum=1,
        used_when=("optimizer", ("cpu", "nvme")),
    )
    nvme_path: str | None = key(
        "Folder for the files of optimizer state, one a rank and without a name; on a local disk.",
        default=None,
        used_when=("optimizer", ("nvme",)),
    )
    params: Literal["none", "cpu"] = key(
        "Where stage 3 keeps the shards of the weights: none: on the device; cpu: in host memory.",
        default="none",
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, kept and resumed from."""

    interval: int = key(
        "Steps between checkpoints; 0: only at the end.", default=0, minimum=0, maximum=_INT_MAX
    )
    keep: int = key("Newest checkpoints that are kept; 0: all.", default=0, minimum=0, maximum=_INT_MAX)
    resume: str = key(
        "auto: from the newest checkpoint of output_dir if there is one; never: start fresh; else the path "
        "of a checkpoint.",
        default="auto",
    )


@dataclass(frozen=True, kw_only=True)
class MonitorConfig:
    """Where progress is reported."""

    console: bool = key("Whether progress lines are printed.", default=True)
    jsonl: bool = key("Whether metrics.jsonl is written to output_dir.", default=True)


@dataclass(frozen=True, kw_only=True)
class HardwareConfig:
    """The device that the run is meant for."""

    target: Literal["CPU", "Ascend", "GPU"] = key("MindSpore device target.", default="CPU")
    device: str | None = key(
        "Name in the device catalogue, for utilisation; null when not known.",
        default=AUTO,
        auto="cpu on CPU, else not known",
    )
    kernels: Literal["native", "portable", "custom"] = key(
        "On CPU native: the C++ library, built at first use with the compiler that is found; portable: numpy "
        "and MindSpore's operators, slower, for machines without a compiler. On Ascend and GPU native: "
        "MindSpore's operators; custom: the optimizer's update and the norm of the gradients by this "
        "project's AscendC or CUDA kernels, built at install time; no device has run them yet.",
        default="native",
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What executes the steps of a run."""

    kind: Literal["eager", "graph"] = key(
        "eager: operation by operation, with every technique; graph: steps compiled by MindSpore. May be "
        "written as engine: graph.",
        default="eager",
    )


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run."""

    model: GPTConfig | LlamaConfig | MoEConfig
    data: DataConfig
    train: TrainConfig
    optim: OptimConfig
    parallel: ParallelConfig
    precision: PrecisionConfig
    memory: MemoryConfig
    offload: OffloadConfig
    checkpoint: CheckpointConfig
    monitor: MonitorConfig
    hardware: HardwareConfig
    engine: EngineConfig


MODEL_FAMILIES: Final[Mapping[str, type]] = {"gpt": GPTConfig, "llama": LlamaConfig, "moe": MoEConfig}
SECTIONS: Final[Mapping[str, type]] = {
    "data": DataConfig,
    "train": TrainConfig,
    "optim": OptimConfig,
    "parallel": ParallelConfig,
    "precision": PrecisionConfig,
    "memory": MemoryConfig,
    "offload": OffloadConfig,
    "checkpoint": CheckpointConfig,
    "monitor": MonitorConfig,
    "hardware": HardwareConfig,
    "engine": EngineConfig,
}
SHORTHANDS: Final[Mapping[str, str]] = {"engine": "kind"}
"""Sections that may be written as one value, and the key that it sets."""


def keys_of(section: type) -> dict[str, tuple[Key, Any]]:
    """Return name -> (Key, annotation) for each field of a section class."""
    hints = get_type_hints(section)
    return {item.name: (item.metadata["key"], hints[item.name]) for item in fields(section)}
