"""From a file and overrides to a checked, concrete config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from ms_zero.config import schema
from ms_zero.config.bind import Facts, bind, model_config, section_values
from ms_zero.config.derive import derive, fitting_world_size
from ms_zero.config.findings import ConfigError, Finding
from ms_zero.config.rules import run_rules
from ms_zero.config.schema import RunConfig
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
        unavailable: Why this version cannot run the config; empty unless it was loaded with `to_run` false.

    """

    config: RunConfig
    origins: Mapping[str, str]
    warnings: tuple[Finding, ...]
    label: str
    world_size: int
    unavailable: tuple[Finding, ...] = ()

    def require_runnable(self) -> None:
        """Raise ConfigError, with every reason, when this version cannot run the config."""
        if self.unavailable:
            raise ConfigError(self.unavailable)


@dataclass(frozen=True)
class Checked:
    """What checking a config has found.

    Args:
        findings: Every violation and warning; empty when there is nothing to say.
        label: Name of the config file.
        world_size: Number of workers that it was checked for.

    """

    findings: tuple[Finding, ...]
    label: str
    world_size: int


def check_config(
    path: str | Path, overrides: Sequence[str] = (), world_size: int | None = None
) -> Checked:
    """Find everything that is wrong or doubtful in a run config, without refusing it; see `load_config`."""
    facts, findings = _examine(path, overrides, world_size)
    return Checked(tuple(findings), facts.label, facts.world_size)


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    world_size: int | None = 1,
    *,
    to_run: bool = True,
) -> Loaded:
    """Load a run config.

    Args:
        path: A YAML file, or the name of a preset such as `runs/quickstart`.
        overrides: `section.key=value` items, applied last and in order; values are YAML.
        world_size: Number of workers; data-parallel degree and batch sizes follow from it. None: the smallest
            number that the degrees and batch sizes of the config allow.
        to_run: Whether the config is going to be run. If not (to plan, translate or show it), what this
            version cannot run is returned in `Loaded.unavailable` instead of being refused.

    Raises:
        ConfigError: The config is refused; holds every violation, one line each.

    """
    facts, findings = _examine(path, overrides, world_size)
    unavailable = [finding for finding in findings if finding.severity == "unavailable"]
    if any(finding.severity == "error" for finding in findings) or (to_run and unavailable):
        raise ConfigError([finding for finding in findings if finding.severity != "warning"])
    return Loaded(
        config=_build(facts),
        origins=MappingProxyType(facts.origins),
        warnings=tuple(finding for finding in findings if finding.severity == "warning"),
        label=facts.label,
        world_size=facts.world_size,
        unavailable=tuple(unavailable),
    )


def _examine(
    path: str | Path, overrides: Sequence[str], world_size: int | None
) -> tuple[Facts, list[Finding]]:
    """Gather, bind, derive and run the rules; the values are all concrete when no finding is an error."""
    given = isinstance(world_size, int) and not isinstance(world_size, bool) and world_size >= 1
    if world_size is not None and not given:
        raise UserError(f"number of workers: {world_size!r} is not an integer of at least 1")
    gathered = gather(path, overrides)
    facts, findings = bind(gathered.root, gathered.label, world_size or 1)
    if world_size is None:
        facts.world_size = fitting_world_size(facts)
    if gathered.complete:
        findings += run_rules(facts, derive(facts))
    else:
        findings = [finding for finding in findings if finding.rule != "MZ007"]
    return facts, list(dict.fromkeys(gathered.findings + findings))


def _build(facts: Facts) -> RunConfig:
    """Make the sections from values that are all present and concrete."""
    sections = {name: section(**section_values(facts, name)) for name, section in schema.SECTIONS.items()}
    return RunConfig(model=model_config(facts), **sections)
