"""Whether this version can run a config that is already loaded."""

from dataclasses import fields, is_dataclass
from typing import Any

from ms_zero.config.bind import Facts
from ms_zero.config.findings import ConfigError, Finding
from ms_zero.config.rules import RULES
from ms_zero.config.schema import RunConfig
from ms_zero.mesh import AXES


def require_runnable(config: RunConfig) -> None:
    """Raise ConfigError, with every reason, when this version cannot run a config; see `Finding.severity`.

    Loading for a run does this already. It is for configs that were loaded for something else, or built.
    """
    values = _values(config, "")
    workers = 1
    for axis in AXES:
        workers *= values[f"parallel.{axis}"]
    facts = Facts(values, {}, {}, workers, "the config")
    reasons = [
        Finding(rule.id, rule.severity, path, facts.label, message)
        for rule in RULES
        if rule.severity == "unavailable" and rule.check is not None and facts.known(*rule.reads)
        for path, message in rule.check(facts)
    ]
    if reasons:
        raise ConfigError(reasons)


def _values(section: Any, prefix: str) -> dict[str, Any]:
    found = {}
    for item in fields(section):
        value = getattr(section, item.name)
        path = f"{prefix}{item.name}"
        found |= _values(value, f"{path}.") if is_dataclass(value) else {path: value}
    return found
