"""Reads the shape of a model from a Hugging Face ``config.json``.

Each architecture is a row of ``TRAITS``: what its code does and its file does not say. An unknown one whose
keys look like Llama's is read as Llama-like, and the shape's ``note`` says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from ms_zero.errors import UserError
from ms_zero.plan.shapes import Attention, Experts, Latent, LayerShape, Mlp, ModelShape, Norm

_UNSUPPORTED = ("linear_attention", "mamba", "recurrent", "conv", "hybrid")
_EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")
_GPT2_NAMES = MappingProxyType(
    {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
    }
)
_OPT_NAMES = MappingProxyType({"intermediate_size": "ffn_dim"})


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What the code of an architecture fixes.

    Args:
        norm: kind of norm.
        gated: whether the MLP has three matrices.
        norms: norms over hidden_size in a layer.
        qkv_bias: True or False, or the key that says so (with its default).
        out_bias: the same for attention's output.
        mlp_bias: the same for the MLP.
        qk_norm: norm of queries and keys.
        tied: whether the head is tied when the file does not say.
        experts: how experts are described; "" for none.
        positions: extra rows of a learned position embedding (OPT has two); None: no such embedding.
        names: our name of a key -> the name in the file.

    """

    norm: Norm = "rmsnorm"
    gated: bool = True
    norms: int = 2
    qkv_bias: bool | tuple[str, bool] = False
    out_bias: bool | tuple[str, bool] = False
    mlp_bias: bool | tuple[str, bool] = False
    qk_norm: Literal["none", "head", "full"] = "none"
    tied: bool = False
    experts: Literal["", "mixtral", "qwen", "deepseek"] = ""
    positions: int | None = None
    names: Mapping[str, str] = field(default_factory=dict)


_BIAS_KEY = ("attention_bias", False)
_LLAMA = Traits(qkv_bias=_BIAS_KEY, out_bias=_BIAS_KEY, mlp_bias=("mlp_bias", False))
_GPT2 = Traits(
    norm="layernorm",
    gated=False,
    qkv_bias=True,
    out_bias=True,
    mlp_bias=True,
    tied=True,
    positions=0,
    names=_GPT2_NAMES,
)
TRAITS: Mapping[str, Traits] = MappingProxyType(
    {
        "llama": _LLAMA,
        "mistral": Traits(),
        "qwen2": Traits(qkv_bias=True),
        "qwen3": Traits(qkv_bias=_BIAS_KEY, out_bias=_BIAS_KEY, qk_norm="head"),
        "mixtral": Traits(experts="mixtral"),
        "qwen2_moe": Traits(qkv_bias=("qkv_bias", True), experts="qwen"),
        "qwen3_moe": Traits(qkv_bias=_BIAS_KEY, out_bias=_BIAS_KEY, qk_norm="head", experts="qwen"),
        "deepseek_v2": Traits(experts="deepseek"),
        "deepseek_v3": Traits(experts="deepseek"),
        "kimi_k2": Traits(experts="deepseek"),
        "gpt2": _GPT2,
        "gpt_neox": Traits(
            norm="layernorm",
            gated=False,
            qkv_bias=("attention_bias", True),
            out_bias=("attention_bias", True),
            mlp_bias=True,
        ),
        "opt": Traits(
            norm="layernorm",
            gated=False,
            qkv_bias=("enable_bias", True),
            out_bias=("enable_bias", True),
            mlp_bias=("enable_bias", True),
            tied=True,
            positions=2,
            names=_OPT_NAMES,
        ),
        "phi3": Traits(),
        "gemma": Traits(qkv_bias=_BIAS_KEY, out_bias=_BIAS_KEY, tied=True),
        "gemma2": Traits(qkv_bias=_BIAS_KEY, out_bias=_BIAS_KEY, norms=4, tied=True),
        "gemma3_text": Traits(qkv_bias=_BIAS_KEY, out_bias=_BIAS_KEY, norms=4, qk_norm="head", tied=True),
        "olmo": Traits(qkv_bias=_BIAS_KEY, out_bias=_BIAS_KEY, norm="none"),
        "olmo2": Traits(qkv_bias=_BIAS_KEY, out_bias=_BIAS_KEY, qk_norm="full"),
        "starcoder2": Traits(
            norm="layernorm",
            gated=False,
            qkv_bias=("use_bias", True),
            out_bias=("use_bias", True),
            mlp_bias=("use_bias", True),
            tied=True,
        ),
        "granite": Traits(qkv_bias=_BIAS_KEY, out_bias=_BIAS_KEY, mlp_bias=("mlp_bias", False)),
        "smollm3": Traits(
            qkv_bias=_BIAS_KEY, out_bias=_BIAS_KEY, mlp_bias=("mlp_bias", False), tied=True
        ),
    }
)


def from_huggingface(raw: Mapping[str, Any], name: str = "") -> ModelShape:
    """The shape of a model from its ``config.json`` as a mapping.

    Raises UserError, naming the key, when something needed is missing or of the wrong type and for
    architectures that are no plain decoder-only transformers.
    """
    if isinstance(raw.get("text_config"), Mapping):
        raw = {"tie_word_embeddings": raw.get("tie_word_embeddings"), **raw["text_config"]}
    family = raw.get("model_type")
    if not isinstance(family, str):
        raise UserError("config.json: model_type is missing; expected the file of a Hugging Face model")
    _refuse_unsupported(raw, family)
    note = ""
    if family not in TRAITS:
        note = f"architecture {family} is not known and was read as Llama-like: check its parameter count"
    file = _File(raw, TRAITS.get(family, _LLAMA))
    return ModelShape(
        name=name or family,
        family=family,
        vocab_size=file.integer("vocab_size"),
        hidden_size=file.integer("hidden_size"),
        blocks=tuple(_blocks(file)),
        max_seq_len=file.integer("max_position_embeddings"),
        norm=file.traits.norm,
        learned_positions=file.learned_positions(),
        tie_embeddings=file.flag(("tie_word_embeddings", file.traits.tied)),
        note=note,
    )


def _refuse_unsupported(raw: Mapping[str, Any], family: str) -> None:
    kinds = raw.get("layer_types") or ()
    odd = [kind for kind in kinds if any(word in str(kind) for word in _UNSUPPORTED)]
    if odd or any(word in family for word in ("mamba", "rwkv", "t5", "bart", "bert", "jamba")):
        what = f"layer_types has {odd[0]}" if odd else f"model_type is {family}"
        raise UserError(f"config.json: {what}; only decoder-only transformers with attention can be planned")


class _File:
    """Typed access to a config.json under the names that an architecture uses."""

    def __init__(self, raw: Mapping[str, Any], traits: Traits) -> None:
        self.raw, self.traits = raw, traits

    def has(self, key: str) -> bool:
        return self.raw.get(self.traits.names.get(key, key)) is not None

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer, or ``default`` where the file has none."""
        name = self.traits.names.get(key, key)
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            found = "missing" if value is None else f"{value!r}, not a positive integer"
            raise UserError(f"config.json: {name} is {found}")
        return value

    def flag(self, trait: bool | tuple[str, bool]) -> bool:
        if isinstance(trait, bool):
            return trait
        value = self.raw.get(trait[0])
        return trait[1] if value is None else bool(value)

    def learned_positions(self) -> int:
        if self.traits.positions is None:
            return 0
        return self.integer("max_position_embeddings") + self.traits.positions


def _blocks(file: _File) -> Iterator[tuple[int, LayerShape]]:
    """Equal neighbouring layers together."""
    layers = [_layer(file, index) for index in range(file.integer("num_hidden_layers"))]
    start = 0
    for index in range(1, len(layers) + 1):
        if index == len(layers) or layers[index] != layers[start]:
            yield index - start, layers[start]
            start = index


def _layer(file: _File, index: int) -> LayerShape:
    attention, traits = _attention(file, index), file.traits
    if traits.experts and not _is_dense(file, index):
        return LayerShape(attention=attention, experts=_experts(file), norms=traits.norms)
    width = file.integer("intermediate_size", 4 * file.integer("hidden_size") if not traits.gated else None)
    mlp = Mlp(ffn_hidden_size=width, gated=traits.gated, bias=file.flag(traits.mlp_bias))
    return LayerShape(attention=attention, mlp=mlp, norms=traits.norms)


def _is_dense(file: _File, index: int) -> bool:
    """Whether a layer of a mixture of experts has a plain MLP."""
    if file.traits.experts == "deepseek":
        every = file.integer("moe_layer_freq", 1)
        return index < (file.raw.get("first_k_dense_replace") or 0) or index % every != 0
    if file.traits.experts == "qwen":
        step = file.integer("decoder_sparse_step", 1)
        return index in (file.raw.get("mlp_only_layers") or ()) or (index + 1) % step != 0
    return False


def _experts(file: _File) -> Experts:
    if file.traits.experts == "mixtral":
        return Experts(
            num_experts=file.integer("num_local_experts"),
            top_k=file.integer("num_experts_per_tok"),
            ffn_hidden_size=file.integer("intermediate_size"),
        )
    width, deepseek = file.integer("moe_intermediate_size"), file.traits.experts == "deepseek"
    shared = file.raw.get("shared_expert_intermediate_size") or 0
    count = next((key for key in _EXPERT_COUNTS if file.has(key)), "num_experts")
    return Experts(
        num_experts=file.integer(count),
        top_k=file.integer("num_experts_per_tok"),
        ffn_hidden_size=width,
        shared_ffn_hidden_size=(file.raw.get("n_shared_experts") or 0) * width if deepseek else shared,
        shared_gate=not deepseek and shared > 0,
        router_bias=file.raw.get("topk_method") == "noaux_tc" or file.raw["model_type"] == "deepseek_v3",
    )


def _attention(file: _File, index: int) -> Attention:
    heads = file.integer("num_attention_heads")
    if file.has("kv_lora_rank"):
        return _latent_attention(file, heads)
    hidden = file.integer("hidden_size")
    head_dim = file.integer("head_dim", max(1, hidden // heads))
    multi_query = file.raw.get("multi_query") is True
    return Attention(
        num_heads=heads,
        num_kv_heads=1 if multi_query else file.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        value_head_dim=head_dim,
        qkv_bias=file.flag(file.traits.qkv_bias),
        out_bias=file.flag(file.traits.out_bias),
        qk_norm=file.traits.qk_norm,
        window=_window(file, index),
        rotary=file.traits.positions is None,
    )


def _latent_attention(file: _File, heads: int) -> Attention:
    latent = Latent(
        q_rank=file.raw.get("q_lora_rank") or 0,
        kv_rank=file.integer("kv_lora_rank"),
        nope_head_dim=file.integer("qk_nope_head_dim"),
        rope_head_dim=file.integer("qk_rope_head_dim"),
    )
    return Attention(
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=latent.nope_head_dim + latent.rope_head_dim,
        value_head_dim=file.integer("v_head_dim"),
        latent=latent,
    )


def _window(file: _File, index: int) -> int | None:
    window = file.raw.get("sliding_window")
    if not isinstance(window, int) or isinstance(window, bool) or file.raw.get("use_sliding_window") is False:
        return None
    kinds = file.raw.get("layer_types")
    if isinstance(kinds, list) and index < len(kinds):
        return window if kinds[index] == "sliding_attention" else None
    return window
