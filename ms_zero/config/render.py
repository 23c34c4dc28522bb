"""Shows a loaded config: as plain data for checkpoints, as YAML with origins for people."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from ms_zero.config.load import Loaded
from ms_zero.config.reader import scalar
from ms_zero.config.rules import ignored_keys
from ms_zero.config.schema import RunConfig

_PLAIN = re.compile(r"[A-Za-z.][A-Za-z0-9_./-]*")
_COMMENT_COLUMN = 44


def dump(config: RunConfig) -> dict[str, Any]:
    """Return the config as nested dicts of JSON values."""
    return json.loads(json.dumps(asdict(config)))


def render_effective(loaded: Loaded) -> str:
    """Return the effective config as YAML, each value with its origin in a comment.

    Loading the text again for the same number of workers gives an equal config: keys without effect are
    commented out.
    """
    workers = "1 worker" if loaded.world_size == 1 else f"{loaded.world_size} workers"
    lines = [f"# {loaded.label} for {workers}"]
    values = dump(loaded.config)
    ignored = ignored_keys(dict(_leaves(values, "")))
    lines += _render(values, "", loaded.origins, ignored)
    return "\n".join(lines) + "\n"


def _render(
    values: Mapping[str, Any], prefix: str, origins: Mapping[str, str], ignored: Mapping[str, str]
) -> list[str]:
    indent = "  " * prefix.count(".")
    lines = []
    for name, value in values.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict):
            lines += [f"{indent}{name}:", *_render(value, f"{path}.", origins, ignored)]
            continue
        comment, mark = origins[path], ""
        if path in ignored:
            comment, mark = f"no effect: {ignored[path]}", "# "
        lines.append(f"{indent + mark + name + ': ' + yaml_value(value):<{_COMMENT_COLUMN}}  # {comment}")
    return lines


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def yaml_value(value: Any) -> str:
    """Return a plain value as one line of YAML that reads back as the same value."""
    if isinstance(value, list):
        return f"[{', '.join(yaml_value(item) for item in value)}]"
    if isinstance(value, str) and _PLAIN.fullmatch(value) and scalar(value) == value:
        return value
    return json.dumps(value, ensure_ascii=False)
