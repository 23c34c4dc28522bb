"""What the operators of a transformer keep for backward, tensor by tensor.

Each implementation is a list of operators, and each operator a list of the tensors that it alone keeps, as
data: names of the dims whose product is the number of elements, bytes per element, and how tensor parallelism
splits it. A tensor that several operators read is listed once, with the first that keeps it.

Implementations:

- ``published``: unfused attention with dropout on its probabilities, as counted by Korthikanti et al. (2022,
  arXiv:2205.05198). With 2-byte activations and dropout the sum over a block is, over s b h: 34 + 5 a s / h;
  tensor parallel 10 + 24/t + 5 a s / (h t); with sequence parallelism all over t; selective recompute drops
  5 a s / h; full recompute 2.
- ``native``: the C++ kernels of this project on CPU.
- ``portable``: the kernels composed of MindSpore's operators, on CPU. An operator that reads a view (a
  reshaped tensor) keeps a copy of its own, hence three inputs of q, k and v.
- ``ascend``: fused norms, activations and attention. From the documentation of the operators: not measured.
- ``mindformers``: the same, but selective recompute also runs norms and activation functions again, as its
  model cards configure it.

Experts keep each copy of a token that an expert gets, before and after, and the inner tensors of its MLP. The
copies that a capacity drops are counted too. Latent attention keeps its compressed vectors; the kernels of
this project fill its heads up to one width, and `native` and `portable` count that.

A count is of one microbatch on one rank, from a block's forward until its backward. Left out are weights,
inputs of the model, constants, and what all blocks share (rotary tables, a document mask).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType
from typing import Literal

from ms_zero.plan.shapes import LayerShape, ModelShape

Recompute = Literal["none", "selective", "full"]

_FP32, _INT32, _BYTE = 4, 4, 1
_ACTIVATION = 0  # stands for Split.activation_bytes


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """The experts of a block.

    Attributes:
        num_experts: routed experts.
        copies: copies of a token that experts of this rank get: top-k times the busiest rank's imbalance.
        ffn_hidden_size: inner width of a routed expert.
        shared_ffn_hidden_size: inner width of all shared experts.
        top_k: experts that a token visits; None: `copies`.
        shared_gate: whether a number for each token multiplies the shared experts.
    """

    num_experts: int
    copies: float
    ffn_hidden_size: int
    shared_ffn_hidden_size: int = 0
    top_k: int | None = None
    shared_gate: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """What the count needs to know of one transformer block.

    Attributes:
        value_head_dim: width of a value head; None: head_dim.
        compressed_size: elements per token that latent attention keeps of its compressed vectors.
        latent_ranks: widths of these vectors, each of which has a norm.
        extra_norms: norms over hidden_size beyond two.
        experts: in place of the MLP.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    gated: bool = False
    rotary: bool = False
    qk_norm: bool = False
    value_head_dim: int | None = None
    compressed_size: int = 0
    latent_ranks: tuple[int, ...] = ()
    extra_norms: int = 0
    experts: ExpertShape | None = None


@dataclass(frozen=True, kw_only=True)
class Split:
    """One microbatch on one rank.

    Attributes:
        batch: samples.
        seq_len: tokens that this rank computes (of a sample, or of its part under context parallelism).
        keys: keys that a query meets; None: seq_len (more under context parallelism, fewer with a window).
        tp: tensor-parallel degree; with fewer key-value heads than that each rank has one.
        sequence_parallel: whether what tensor parallelism leaves whole is split along the sequence.
        activation_bytes: per element of the activation dtype.
        dropout: whether dropout is on.
        rounded: whether fp32 tensors are rounded to the values of bf16 (bf16 on CPU; activation_bytes is 4).
    """

    batch: int
    seq_len: float
    keys: int | None = None
    tp: int = 1
    sequence_parallel: bool = False
    activation_bytes: int = 2
    dropout: bool = False
    rounded: bool = False


@dataclass(frozen=True)
class Saves:
    """One tensor that an operator keeps.

    Attributes:
        tensor: what it is.
        dims: names whose product is the number of elements.
        copies: how many equal ones.
        width: bytes per element; 0: that of the activation dtype.
        whole: whether tensor parallelism alone leaves it whole.
        when: "dropout", "rounded", "qk_norm", "rotary", "latent", "plain" (not latent), "norms" (more than
            two), "tables" (rotary, not in plain fp32), "filled" (heads of two widths), "rounded output" (not
            filled), "apart" (the router reads a copy), "together" (more than that copy is read), "shared" or
            "shared_gate" (of experts): only then.
    """

    tensor: str
    dims: tuple[str, ...]
    copies: int = 1
    width: int = _ACTIVATION
    whole: bool = False
    when: str = ""


@dataclass(frozen=True)
class Operator:
    """One operator and what it keeps.

    Attributes:
        name: where it stands in the block.
        saves: its tensors.
        core: whether it is part of softmax(Q K^T) V, which selective recompute runs again.
    """

    name: str
    saves: tuple[Saves, ...]
    core: bool = False


@dataclass(frozen=True)
class Implementation:
    """All operators of a model.

    Attributes:
        plain: a block with LayerNorm and an MLP of two matrices.
        gated: a block with RMSNorm and a gated MLP.
        experts: one with RMSNorm and experts.
        core_inputs: what selective recompute keeps in place of the core's tensors.
        block_input: what full recompute keeps.
        embedding, plain_norm, gated_norm, head, loss: outside of the blocks.
    """

    plain: tuple[Operator, ...]
    gated: tuple[Operator, ...]
    experts: tuple[Operator, ...]
    core_inputs: Operator
    block_input: Operator
    embedding: Operator
    plain_norm: Operator
    gated_norm: Operator
    head: Operator
    loss: Operator


@dataclass(frozen=True)
class SavedBytes:
    """One kept tensor with its size on this rank."""

    operator: str
    tensor: str
    bytes: float


@dataclass(frozen=True)
class EdgeBytes:
    """What is kept outside of the blocks."""

    embedding: float
    final_norm: float
    head: float
    loss: float


def block_of(shape: ModelShape, layer: LayerShape, imbalance: float = 1.0) -> BlockShape:
    """The block of a layer; ``imbalance``: tokens of the busiest expert rank over the mean."""
    attention, latent, experts = layer.attention, layer.attention.latent, layer.experts
    return BlockShape(
        hidden_size=shape.hidden_size,
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        head_dim=attention.head_dim,
        value_head_dim=None if latent is None else attention.value_head_dim,
        ffn_hidden_size=0 if layer.mlp is None else layer.mlp.ffn_hidden_size,
        gated=layer.mlp is None or layer.mlp.gated,
        rotary=attention.rotary,
        qk_norm=attention.qk_norm != "none",
        compressed_size=2 * (latent.q_rank + latent.kv_rank) + latent.rope_head_dim if latent else 0,
        latent_ranks=tuple(rank for rank in (latent.q_rank, latent.kv_rank) if rank) if latent else (),
        extra_norms=max(0, layer.norms - 2),
        experts=None
        if experts is None
        else ExpertShape(
            num_experts=experts.num_experts,
            copies=experts.top_k * imbalance,
            ffn_hidden_size=experts.ffn_hidden_size,
            shared_ffn_hidden_size=experts.shared_ffn_hidden_size,
            top_k=experts.top_k,
            shared_gate=experts.shared_gate,
        ),
    )


def block_tensors(
    block: BlockShape, split: Split, *, implementation: str = "native", recompute: Recompute = "none"
) -> tuple[SavedBytes, ...]:
    """Every tensor that one block keeps of one microbatch.

    Args:
        block: the block.
        split: what this rank computes.
        implementation: one of IMPLEMENTATIONS.
        recompute: "none", "selective" (the attention core is run again) or "full" (the block is).
    """
    found = IMPLEMENTATIONS[implementation]
    if recompute == "full":
        operators: Sequence[Operator] = (found.block_input,)
    else:
        operators = found.experts if block.experts else found.gated if block.gated else found.plain
        if recompute == "selective":
            operators = (*(op for op in operators if not op.core), found.core_inputs)
    dims, flags = _block_dims(block, split), _flags(block, split)
    return tuple(tensor for op in operators for tensor in _sizes(op, dims, flags, split))


def block_bytes(
    block: BlockShape, split: Split, *, implementation: str = "native", recompute: Recompute = "none"
) -> float:
    """The sum of :func:`block_tensors`."""
    tensors = block_tensors(block, split, implementation=implementation, recompute=recompute)
    return sum(tensor.bytes for tensor in tensors)


def bytes_by_kind(block: BlockShape, split: Split, *, implementation: str = "native") -> dict[str, float]:
    """:func:`block_bytes` of each kind; its ``__getitem__`` is the ``bytes_of`` of ``plan.recompute``."""
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    return {kind: block_bytes(block, split, implementation=implementation, recompute=kind) for kind in kinds}


def edge_bytes(
    block: BlockShape, vocab_size: int, split: Split, *, implementation: str = "native"
) -> EdgeBytes:
    """What embedding, final norm, head and loss keep of one microbatch; `block` is any of the model's.

    The head counts its input, the loss what it keeps of the logits (the logits too where it keeps them).
    """
    found = IMPLEMENTATIONS[implementation]
    dims, flags = {**_block_dims(block, split), "vocab": vocab_size}, _flags(block, split)

    def total(operator: Operator) -> float:
        return sum(tensor.bytes for tensor in _sizes(operator, dims, flags, split))

    norm = found.gated_norm if block.gated else found.plain_norm
    return EdgeBytes(total(found.embedding), total(norm), total(found.head), total(found.loss))


def _flags(block: BlockShape, split: Split) -> dict[str, bool]:
    is_latent = block.compressed_size > 0
    is_filled = block.value_head_dim not in (None, block.head_dim)
    is_half = split.activation_bytes < _FP32
    has_shared = block.experts is not None and block.experts.shared_ffn_hidden_size > 0
    return {
        "dropout": split.dropout,
        "rounded": split.rounded,
        "rotary": block.rotary and not is_latent,
        "qk_norm": block.qk_norm,
        "latent": is_latent,
        "plain": not is_latent,
        "norms": block.extra_norms > 0,
        "tables": block.rotary and not is_latent and (split.rounded or is_half),
        "filled": is_filled,
        "rounded output": split.rounded and not is_filled,
        "apart": is_half or split.rounded,
        "together": not (is_half or split.rounded) or has_shared,
        "shared": has_shared,
        "shared_gate": block.experts is not None and block.experts.shared_gate,
    }


def _block_dims(block: BlockShape, split: Split) -> dict[str, float]:
    experts = block.experts or ExpertShape(num_experts=0, copies=0, ffn_hidden_size=0)
    value_head_dim = block.value_head_dim or block.head_dim
    kv_heads = max(block.num_kv_heads, split.tp)
    width = max(block.head_dim, value_head_dim)
    missing = 2 * (width - block.head_dim) + width - value_head_dim
    return {
        "tokens": split.batch * split.seq_len,
        "seq": split.seq_len,
        "keys": split.keys or split.seq_len,
        "hidden": block.hidden_size,
        "heads": block.num_heads,
        "q_size": block.num_heads * block.head_dim,
        "k_size": kv_heads * block.head_dim,
        "v_size": kv_heads * value_head_dim,
        "context": block.num_heads * value_head_dim,
        "kv_heads": kv_heads,
        "head_dim": block.head_dim,
        "ffn": block.ffn_hidden_size,
        "compressed": block.compressed_size,
        "ranks": sum(block.latent_ranks),
        "latent_norms": len(block.latent_ranks),
        "filling": block.num_heads * missing,
        "filled": block.num_heads * width if value_head_dim < width else 0,
        "norms": block.extra_norms,
        "experts": experts.num_experts,
        "copies": experts.copies,
        "top_k": experts.copies if experts.top_k is None else experts.top_k,
        "expert_ffn": experts.copies * experts.ffn_hidden_size + experts.shared_ffn_hidden_size,
        "eight": 8,
    }


def _sizes(
    operator: Operator, dims: dict[str, float], flags: dict[str, bool], split: Split
) -> list[SavedBytes]:
    found = []
    for saves in operator.saves:
        if saves.when and not flags[saves.when]:
            continue
        elements = saves.copies * prod(dims[name] for name in saves.dims)
        divided = split.tp if not saves.whole or split.sequence_parallel else 1
        size = elements * (saves.width or split.activation_bytes) / divided
        found.append(SavedBytes(operator.name, saves.tensor, size))
    return found


_HIDDEN = ("tokens", "hidden")
_QUERY = ("tokens", "q_size")
_KEY = ("tokens", "k_size")
_VALUE = ("tokens", "v_size")
_CONTEXT = ("tokens", "context")
_INNER = ("tokens", "ffn")
_SCORES = ("tokens", "heads", "keys")
_LOGITS = ("tokens", "vocab")


def _whole(
    tensor: str, dims: tuple[str, ...] = _HIDDEN, copies: int = 1, width: int = _ACTIVATION, when: str = ""
) -> Saves:
    return Saves(tensor, dims, copies, width, whole=True, when=when)


def _reads(name: str, dims: tuple[str, ...] = _HIDDEN, copies: int = 1) -> Operator:
    """An operator that keeps its input; one of the residual stream's width is whole."""
    return Operator(name, (Saves("input", dims, copies, whole=dims is _HIDDEN),))


def _mask(name: str) -> Operator:
    return Operator(name, (Saves("mask", _HIDDEN, width=_BYTE, whole=True, when="dropout"),))


def _norm(name: str, numbers: int) -> Operator:
    """A fused norm and the fp32 numbers that it keeps of each token."""
    return Operator(name, (_whole("input"), _whole("statistics", ("tokens",), numbers, _FP32)))


def _head_norms(numbers: int) -> Operator:
    """Norms of the queries and the keys of each head."""
    return Operator(
        "query and key norms",
        (
            Saves("queries", _QUERY, when="qk_norm"),
            Saves("statistics", ("tokens", "heads"), numbers, _FP32, when="qk_norm"),
            Saves("keys", _KEY, when="qk_norm"),
            Saves("statistics", ("tokens", "kv_heads"), numbers, _FP32, when="qk_norm"),
        ),
    )


_QKV_TENSORS = (Saves("query", _QUERY), Saves("key", _KEY), Saves("value", _VALUE))
_CORE_INPUTS = Operator("attention core", _QKV_TENSORS)
_OUTPUT = (_reads("output projection", _CONTEXT), _mask("attention dropout"))
_PLAIN_MLP = (_reads("mlp first"), _reads("gelu", _INNER), _reads("mlp second", _INNER), _mask("mlp dropout"))
_GATED_MLP = (
    _reads("mlp first"),
    Operator("swiglu", (Saves("gate", _INNER), Saves("up", _INNER))),
    _reads("mlp second", _INNER),
    _mask("mlp dropout"),
)
_EXPERT_MLP = (
    _reads("mlp first"),
    Operator("router", (_whole("probabilities", ("tokens", "experts"), 2, _FP32),)),
    Operator(
        "experts",
        (
            _whole("tokens in and out", ("tokens", "copies", "hidden"), 2),
            Saves("gate, up and product", ("tokens", "expert_ffn"), 3),
        ),
    ),
    _mask("mlp dropout"),
)
_FIRST = Operator("mlp first", (_whole("input", when="together"),))
_ROUTER = Operator(
    "router",
    (
        _whole("input in fp32", width=_FP32, when="apart"),
        _whole("logits", ("tokens", "experts"), 1, _FP32),
        _whole("experts, places and weights", ("tokens", "top_k"), 3, _FP32),
        _whole("tokens of the rows", ("tokens", "copies"), 1, _INT32),
    ),
)
_SHARED_GATE = Operator(
    "shared gate",
    (_whole("shared experts", when="shared_gate"), _whole("gate", ("tokens",), when="shared_gate")),
)
_OWN_EXPERT_MLP = (_FIRST, _ROUTER, _EXPERT_MLP[2], _SHARED_GATE, _EXPERT_MLP[3])
_OUTSIDE = {
    "core_inputs": _CORE_INPUTS,
    "block_input": _reads("block"),
    "embedding": _mask("embedding dropout"),
    "head": _reads("head"),
}

_LATENT = Operator("latent attention", (_whole("compressed", ("tokens", "compressed"), when="latent"),))
# Heads of two widths are filled up to one, and the output is cut.
_FILLING = Saves("zeros", ("tokens", "filling"), when="filled")
_FILLED_OUTPUT = Saves("output before it is cut", ("tokens", "filled"), when="filled")
_OWN_OUTSIDE = {**_OUTSIDE, "core_inputs": Operator("attention core", (*_QKV_TENSORS, _FILLING))}
_MORE_NORMS = Operator(
    "further norms", (_whole("input and output", ("tokens", "norms", "hidden"), 2, when="norms"),)
)

_PUBLISHED_ATTENTION = (
    _reads("qkv"),
    _LATENT,
    _MORE_NORMS,
    Operator("scores and values", _QKV_TENSORS),
    Operator("softmax", (Saves("output", _SCORES),), core=True),
    Operator(
        "softmax dropout",
        (Saves("mask", _SCORES, width=_BYTE, when="dropout"), Saves("output", _SCORES, when="dropout")),
        core=True,
    ),
    *_OUTPUT,
)
_PUBLISHED = Implementation(
    plain=(_reads("first norm"), *_PUBLISHED_ATTENTION, _reads("second norm"), *_PLAIN_MLP),
    gated=(_reads("first norm"), *_PUBLISHED_ATTENTION, _reads("second norm"), *_GATED_MLP),
    experts=(_reads("first norm"), *_PUBLISHED_ATTENTION, _reads("second norm"), *_EXPERT_MLP),
    plain_norm=_reads("final norm"),
    gated_norm=_reads("final norm"),
    loss=Operator("loss", (Saves("logits", _LOGITS, width=_FP32),)),
    **{**_OUTSIDE, "core_inputs": Operator("attention core", ())},
)

_NATIVE_ATTENTION = (
    _reads("qkv"),
    Operator(
        "latent attention",
        (
            _whole("compressed and normalised", ("tokens", "ranks"), 2, when="latent"),
            _whole("statistics", ("tokens", "latent_norms"), 2, _FP32, when="latent"),
        ),
    ),
    _MORE_NORMS,
    Operator(
        "attention core",
        (*_QKV_TENSORS, _FILLING, Saves("log sums", ("tokens", "heads"), width=_FP32), _FILLED_OUTPUT),
        core=True,
    ),
    Operator("rounding", (Saves("weighted values", _CONTEXT, when="rounded output"),), core=True),
    *_OUTPUT,
)
_NATIVE_TABLES = Operator("rotary", (_whole("tables", ("seq", "head_dim"), 4, _FP32, when="tables"),))
_NATIVE_GATED = (
    _norm("first norm", 2),
    _head_norms(2),
    _NATIVE_TABLES,
    *_NATIVE_ATTENTION,
    _norm("second norm", 2),
)
_NATIVE = Implementation(
    plain=(_norm("first norm", 2), *_NATIVE_ATTENTION, _norm("second norm", 2), *_PLAIN_MLP),
    gated=(*_NATIVE_GATED, *_GATED_MLP),
    experts=(*_NATIVE_GATED, *_OWN_EXPERT_MLP),
    plain_norm=_norm("final norm", 2),
    gated_norm=_norm("final norm", 2),
    loss=Operator(
        "loss", (Saves("logits", _LOGITS, width=_FP32), Saves("log sums", ("tokens",), width=_FP32))
    ),
    **_OWN_OUTSIDE,
)


def _composed_norm(name: str) -> Operator:
    """The input is centred for LayerNorm; the scale is spread over the whole tensor."""
    return Operator(
        name,
        (
            _whole("input", width=_FP32),
            _whole("scale", width=_FP32),
            _whole("reciprocal deviation", ("tokens",), width=_FP32),
            _whole("copy of the weight", ("hidden",), width=_FP32),
        ),
    )


_PORTABLE_QUERIES = (
    Operator(
        "query and key norms",
        (
            Saves("queries and their scale", _QUERY, 2, _FP32, when="qk_norm"),
            Saves("reciprocal deviations", ("tokens", "heads"), 1, _FP32, when="qk_norm"),
            Saves("keys and their scale", _KEY, 2, _FP32, when="qk_norm"),
            Saves("reciprocal deviations", ("tokens", "kv_heads"), 1, _FP32, when="qk_norm"),
            Saves("copies of the weights", ("head_dim",), 2, _FP32, when="qk_norm"),
        ),
    ),
    Operator(
        "rotary",
        (
            Saves("cos and sin of the queries", _QUERY, 2, when="rotary"),
            Saves("cos and sin of the keys", _KEY, 2, when="rotary"),
        ),
    ),
)
_PORTABLE_ATTENTION = (
    Operator("qkv", (_whole("input", copies=3, when="plain"), _whole("input", copies=2, when="latent"))),
    Operator(
        "latent attention",
        (
            _whole("compressed, scale and normalised", ("tokens", "ranks"), 3, _FP32, when="latent"),
            _whole("reciprocal deviations", ("tokens", "latent_norms"), 1, _FP32, when="latent"),
            _whole("copies of the weights", ("ranks",), 1, _FP32, when="latent"),
        ),
    ),
    _MORE_NORMS,
    Operator(
        "attention core",
        (*_QKV_TENSORS, _FILLING, Saves("probabilities", _SCORES)),
        core=True,
    ),
    *_OUTPUT,
)
_PORTABLE_GATED = (
    _composed_norm("first norm"),
    *_PORTABLE_QUERIES,
    *_PORTABLE_ATTENTION,
    _composed_norm("second norm"),
)
_PORTABLE = Implementation(
    plain=(
        _composed_norm("first norm"),
        *_PORTABLE_ATTENTION,
        _composed_norm("second norm"),
        _reads("mlp first"),
        Operator("gelu", (Saves("factors", _INNER, 6),)),
        *_PLAIN_MLP[2:],
    ),
    gated=(
        *_PORTABLE_GATED,
        _reads("mlp first", copies=2),
        Operator("swiglu", (Saves("factors", _INNER, 4),)),
        *_GATED_MLP[2:],
    ),
    experts=(
        *_PORTABLE_GATED,
        *_OWN_EXPERT_MLP,
        Operator(
            "shared first",
            (_whole("input", copies=2, when="shared"), _whole("input of the gate", when="shared_gate")),
        ),
        Operator("expert factors", (Saves("factors", ("tokens", "expert_ffn"), 2),)),
    ),
    plain_norm=_composed_norm("final norm"),
    gated_norm=_composed_norm("final norm"),
    loss=Operator(
        "loss",
        (
            Saves("log probabilities", _LOGITS, width=_FP32),
            Saves("columns", ("tokens",), width=_INT32),
            Saves("valid", ("tokens",), width=_FP32),
        ),
    ),
    **_OWN_OUTSIDE,
)

_ASCEND_ATTENTION = (
    _reads("qkv"),
    _LATENT,
    _MORE_NORMS,
    # FlashAttentionScore gives maximum and sum of each row eight times.
    Operator(
        "attention core",
        (*_QKV_TENSORS, Saves("maximum and sum", ("tokens", "heads", "eight"), 2, _FP32)),
        core=True,
    ),
    *_OUTPUT,
)
_ASCEND_GATED = (_norm("first norm", 1), _head_norms(1), *_ASCEND_ATTENTION, _norm("second norm", 1))
_ASCEND = Implementation(
    plain=(_norm("first norm", 2), *_ASCEND_ATTENTION, _norm("second norm", 2), *_PLAIN_MLP),
    gated=(*_ASCEND_GATED, *_GATED_MLP),
    experts=(*_ASCEND_GATED, *_EXPERT_MLP),
    plain_norm=_norm("final norm", 2),
    gated_norm=_norm("final norm", 1),
    loss=Operator("loss", (Saves("log probabilities", _LOGITS, width=_FP32),)),
    **_OUTSIDE,
)


def _again(operators: tuple[Operator, ...], names: tuple[str, ...]) -> tuple[Operator, ...]:
    """The same operators, those of these names run again by selective recompute as well."""
    return tuple(replace(op, core=True) if op.name in names else op for op in operators)


_CHEAP = ("qkv", "mlp first", "mlp second")  # what norms and activation functions give to matrices
_MINDFORMERS = replace(
    _ASCEND,
    plain=_again(_ASCEND.plain, _CHEAP),
    gated=_again(_ASCEND.gated, _CHEAP),
    experts=_again(_ASCEND.experts, _CHEAP),
)

IMPLEMENTATIONS = MappingProxyType(
    {
        "published": _PUBLISHED,
        "native": _NATIVE,
        "portable": _PORTABLE,
        "ascend": _ASCEND,
        "mindformers": _MINDFORMERS,
    }
)
