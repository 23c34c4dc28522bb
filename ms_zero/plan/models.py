"""Loads the shape of a model: a preset, a config file of ours, or a Hugging Face ``config.json``.

Presets of the families gpt and llama are training configs, read by the same code as for training. The family
moe describes mixtures of experts and latent attention; this version plans such models but cannot train them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ms_zero import resources
from ms_zero.config import schema
from ms_zero.config.bind import Facts, bind, bind_alone, section_values
from ms_zero.config.derive import derive
from ms_zero.config.findings import ConfigError, Finding
from ms_zero.config.schema import RopeScaling, key
from ms_zero.config.sources import Gathered, Table, gather
from ms_zero.errors import UserError
from ms_zero.plan.huggingface import from_huggingface
from ms_zero.plan.shapes import Attention, Experts, Latent, LayerShape, Mlp, ModelShape, from_config

_MAX_BYTES = 2**20


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Multi-head latent attention."""

    q_rank: int = key("Width of the compressed query; 0: not compressed.", default=0, minimum=0)
    kv_rank: int = key("Width of the compressed key and value.", minimum=1)
    nope_head_dim: int = key("Part of a head without positions.", minimum=1)
    rope_head_dim: int = key("Part of a head with rotary positions.", minimum=1)
    value_head_dim: int = key("Width of a value head.", minimum=1)


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """A Llama-like model whose layers may have experts or latent attention."""

    family: Literal["moe"] = key("Model family.", default="moe")
    vocab_size: int = key("Rows of the embedding.", minimum=1)
    hidden_size: int = key("Width of the residual stream.", minimum=1)
    num_layers: int = key("Number of transformer blocks.", minimum=1, maximum=100_000)
    num_heads: int = key("Query heads.", minimum=1)
    num_kv_heads: int | None = key("Key and value heads; null: num_heads.", default=None, minimum=1)
    head_dim: int | None = key(
        "Width of a head; null: hidden_size / num_heads.", default=None, minimum=1
    )
    max_seq_len: int = key("Longest sequence in tokens.", minimum=1)
    tie_embeddings: bool = key("Whether the output head shares the token embedding.", default=False)
    qkv_bias: bool = key("Whether query, key and value projections have a bias.", default=False)
    qk_norm: bool = key("Whether queries and keys are RMS-normalised per head.", default=False)
    latent: LatentConfig | None = key("Multi-head latent attention, or null.", default=None)  # noqa: RUF009
    dense_layers: int = key("First layers that have a plain gated MLP.", default=0, minimum=0)
    ffn_hidden_size: int | None = key("Width inside that MLP.", default=None, minimum=1)
    num_experts: int = key("Routed experts of each other layer.", minimum=1)
    experts_per_token: int = key("Experts that each token visits.", minimum=1)
    expert_ffn_hidden_size: int = key("Width inside one routed expert.", minimum=1)
    shared_ffn_hidden_size: int = key("Width inside all shared experts together.", default=0, minimum=0)
    shared_gate: bool = key("Whether a vector gates the shared experts.", default=False)
    router_bias: bool = key("Whether the router has a bias per expert.", default=False)


def model_names() -> tuple[str, ...]:
    """Names of all model presets."""
    return resources.list_presets("models")


def trainable_names() -> tuple[str, ...]:
    """Names of the presets that the training config can build."""
    return tuple(name for name in model_names() if load_model(name).family in schema.MODEL_FAMILIES)


def load_model(name: str) -> ModelShape:
    """The shape of a model.

    Args:
        name: a preset of ``configs/models`` (``llama-70b`` or ``models/llama-70b``), a YAML file with a
            ``model:`` section, a Hugging Face ``config.json`` or the folder that holds one.

    Raises:
        UserError: there is no such model, or its description is wrong.

    """
    path = Path(name)
    if name and path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json":
        return _read_json(path)
    if path.suffix in (".yaml", ".yml"):
        return _read_yaml(path, path.stem)
    preset = name.removeprefix("models/")
    return _read_yaml(resources.find_preset("models", preset), preset)


def _read_json(path: Path) -> ModelShape:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        raw = json.loads(data) if len(data) <= _MAX_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot read this model: {' '.join(str(error).split())}") from None
    if not isinstance(raw, dict):
        raise UserError(f"{path}: expected the JSON object of a Hugging Face config of at most 1 MiB")
    name = path.parent.name if path.stem == "config" and path.parent.name else path.stem
    try:
        return from_huggingface(raw, name)
    except UserError as error:
        raise UserError(f"{path}: {str(error).removeprefix('config.json: ')}") from None


def _read_yaml(path: Path, name: str) -> ModelShape:
    gathered = gather(path, [])
    _raise_errors(gathered.findings)
    entry = gathered.root.entries.get("model")
    if _family(entry) in schema.PLANNED_FAMILIES:
        facts, findings = bind_alone("model", MoEConfig, entry, gathered.label)
        _raise_errors(findings)
        return _from_moe(_section(facts, MoEConfig, "latent", LatentConfig), name)
    return from_config(_trainable(gathered), name)


def _family(entry: Any) -> Any:
    family = entry.entries.get("family") if isinstance(entry, Table) else None
    return None if family is None or isinstance(family, Table) else family.node.value


def _trainable(gathered: Gathered) -> schema.ModelConfig:
    """The model section alone: what a run still needs is not asked for."""
    root = Table({key: value for key, value in gathered.root.entries.items() if key in ("model", "data")}, "")
    facts, findings = bind(root, gathered.label, 1)
    _raise_errors([finding for finding in findings if finding.path.split(".")[0] == "model"])
    problems = [problem for problem in derive(facts) if problem.path.startswith("model.")]
    _raise_errors([Finding(rule, "error", path, facts.where(path), text) for rule, path, text in problems])
    family = schema.MODEL_FAMILIES[facts.values["model.family"]]
    return _section(facts, family, "rope_scaling", RopeScaling)


def _section(facts: Facts, section: type, nested: str, nested_section: type) -> Any:
    """Make a section from values that are all present; ``nested`` is its field that may be a mapping."""
    values = section_values(facts, "model")
    inner = section_values(facts, f"model.{nested}")
    if inner:
        values[nested] = nested_section(**inner)
    return section(**values)


def _raise_errors(findings: list[Finding]) -> None:
    if findings:
        raise ConfigError(findings)


def _from_moe(model: MoEConfig, name: str) -> ModelShape:
    if model.dense_layers > model.num_layers or (model.dense_layers and model.ffn_hidden_size is None):
        raise UserError(f"{name}: model.dense_layers: at most num_layers, and ffn_hidden_size must be given")
    attention = _attention(model, name)
    experts = Experts(
        num_experts=model.num_experts,
        top_k=model.experts_per_token,
        ffn_hidden_size=model.expert_ffn_hidden_size,
        shared_ffn_hidden_size=model.shared_ffn_hidden_size,
        shared_gate=model.shared_gate,
        router_bias=model.router_bias,
    )
    blocks = [(model.num_layers - model.dense_layers, LayerShape(attention=attention, experts=experts))]
    if model.dense_layers:
        mlp = Mlp(ffn_hidden_size=model.ffn_hidden_size, gated=True)
        blocks.insert(0, (model.dense_layers, LayerShape(attention=attention, mlp=mlp)))
    return ModelShape(
        name=name,
        family="moe",
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        blocks=tuple(block for block in blocks if block[0]),
        max_seq_len=model.max_seq_len,
        norm="rmsnorm",
        tie_embeddings=model.tie_embeddings,
    )


def _attention(model: MoEConfig, name: str) -> Attention:
    if model.latent is not None:
        latent = model.latent
        return Attention(
            num_heads=model.num_heads,
            num_kv_heads=model.num_heads,
            head_dim=latent.nope_head_dim + latent.rope_head_dim,
            value_head_dim=latent.value_head_dim,
            latent=Latent(
                q_rank=latent.q_rank,
                kv_rank=latent.kv_rank,
                nope_head_dim=latent.nope_head_dim,
                rope_head_dim=latent.rope_head_dim,
            ),
        )
    if model.head_dim is None and model.hidden_size % model.num_heads:
        raise UserError(f"{name}: model.num_heads does not divide model.hidden_size; give model.head_dim")
    head_dim = model.head_dim or model.hidden_size // model.num_heads
    return Attention(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads or model.num_heads,
        head_dim=head_dim,
        value_head_dim=head_dim,
        qkv_bias=model.qkv_bias,
        qk_norm="head" if model.qk_norm else "none",
    )
