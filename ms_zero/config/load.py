"""From a file and overrides to a checked, concrete config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ms_zero.config import schema
from ms_zero.config.bind import Facts, bind, section_values
from ms_zero.config.derive import derive
from ms_zero.config.findings import ConfigError, Finding
from ms_zero.config.rules import run_rules
from ms_zero.config.schema import RopeScaling, RunConfig
from ms_zero.config.sources import gather
from ms_zero.errors import UserError


@dataclass(frozen=True)
class Loaded:
    """A config that passed all checks.

    Args:
        config: The effective values.
        origins: Dotted key -> `file:line`, `override '...'`, `default` or `derived: how`.
        warnings: Findings that do not refuse the config.
        label: Name of the config file.
        world_size: Number of workers that it was resolved for.

    """

    config: RunConfig
    origins: Mapping[str, str]
    warnings: tuple[Finding, ...]
    label: str
    world_size: int


def load_config(path: str | Path, overrides: Sequence[str] = (), world_size: int = 1) -> Loaded:
    """Load a run config.

    Args:
        path: A YAML file, or the name of a preset such as `runs/quickstart`.
        overrides: `section.key=value` items, applied last and in order; values are YAML.
        world_size: Number of workers; data-parallel degree and batch sizes follow from it.

    Raises:
        ConfigError: The config is refused; holds every violation, one line each.

    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise UserError(f"number of workers: {world_size!r} is not an integer of at least 1")
    gathered = gather(path, overrides)
    facts, findings = bind(gathered.root, gathered.label, world_size)
    if gathered.complete:
        findings += run_rules(facts, derive(facts))
    else:
        findings = [finding for finding in findings if finding.rule != "MZ007"]
    findings = list(dict.fromkeys(gathered.findings + findings))
    if any(finding.severity == "error" for finding in findings):
        raise ConfigError([finding for finding in findings if finding.severity == "error"])
    return Loaded(
        config=_build(facts),
        origins=MappingProxyType(facts.origins),
        warnings=tuple(findings),
        label=gathered.label,
        world_size=world_size,
    )


def _build(facts: Facts) -> RunConfig:
    """Make the sections from values that are all present and concrete."""
    model = section_values(facts, "model")
    rope_scaling = section_values(facts, "model.rope_scaling")
    if rope_scaling:
        model["rope_scaling"] = RopeScaling(**rope_scaling)
    sections = {name: section(**section_values(facts, name)) for name, section in schema.SECTIONS.items()}
    return RunConfig(model=schema.MODEL_FAMILIES[model["family"]](**model), **sections)
