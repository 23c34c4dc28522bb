"""Loads the shape of a model: a preset, a config file of ours, or a Hugging Face ``config.json``.

Presets are parts of training configs, read by the same code as for training.
"""

from __future__ import annotations

import json
from pathlib import Path

from ms_zero import resources
from ms_zero.config import schema
from ms_zero.config.bind import Facts, bind, model_config
from ms_zero.config.derive import derive
from ms_zero.config.findings import ConfigError, Finding
from ms_zero.config.rules import RULES
from ms_zero.config.sources import Gathered, Table, gather
from ms_zero.errors import UserError
from ms_zero.plan.huggingface import from_huggingface
from ms_zero.plan.shapes import ModelShape, from_config

_MAX_BYTES = 2**20


def model_names() -> tuple[str, ...]:
    """Names of all model presets."""
    return resources.list_presets("models")


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
    return from_config(_model_section(gathered), name)


def _model_section(gathered: Gathered) -> schema.ModelConfig:
    """The model section alone: what a run still needs is not asked for."""
    root = Table({key: value for key, value in gathered.root.entries.items() if key in ("model", "data")}, "")
    facts, findings = bind(root, gathered.label, 1)
    _raise_errors([finding for finding in findings if finding.path.split(".")[0] == "model"])
    problems = [problem for problem in derive(facts) if problem.path.startswith("model.")]
    problems += _broken_rules(facts)
    _raise_errors([Finding(rule, "error", path, facts.where(path), text) for rule, path, text in problems])
    return model_config(facts)


def _broken_rules(facts: Facts) -> list[tuple[str, str, str]]:
    """What is wrong by the rules that are about the model alone."""
    return [
        (rule.id, path, text)
        for rule in RULES
        if rule.severity == "error" and rule.check is not None and facts.known(*rule.reads)
        if rule.reads and all(path.startswith("model.") for path in rule.reads)
        for path, text in rule.check(facts)
    ]


def _raise_errors(findings: list[Finding]) -> None:
    if findings:
        raise ConfigError(findings)
