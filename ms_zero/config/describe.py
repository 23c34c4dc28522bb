"""Explains findings, sections and keys in words, from the rules and the schema."""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ms_zero.config import schema
from ms_zero.config.explanations import Explanation
from ms_zero.config.findings import show
from ms_zero.config.rules import EXPLANATIONS, RULES
from ms_zero.config.values import expected, item_section, nested_section
from ms_zero.errors import UserError, one_line
from ms_zero.resources import nearest

_WIDTH = 100


@dataclass(frozen=True)
class _Entry:
    """One key of one section class; `family` is the model family that it belongs to, or ""."""

    path: str
    family: str
    spec: schema.Key
    annotation: Any


def describe(topic: str) -> str:
    """Explain a rule id (`MZ012`), a section (`train`) or a key (`train.steps`), in several lines.

    Raises UserError with the nearest topics when there is no such thing.
    """
    explanation = EXPLANATIONS.get(topic.upper())
    if explanation is not None:
        return "\n".join(_rule_lines(explanation))
    keys: dict[str, list[_Entry]] = {}
    for entry in _entries():
        keys.setdefault(entry.path, []).append(entry)
    if topic in keys:
        return "\n".join(_key_lines(keys[topic]))
    below = [path for path in keys if path.startswith(f"{topic}.")]
    if topic and below:
        return "\n".join(_section_lines(topic, keys))
    raise UserError(f"nothing to explain about {one_line(show(topic))}{_hint(topic, keys)}")


def describe_all() -> str:
    """List every rule id with its severity and title, then the sections."""
    lines = [f"{entry.id}  {entry.severity:11s}  {entry.title}" for entry in EXPLANATIONS.values()]
    return "\n".join([*lines, f"sections: model, {', '.join(schema.SECTIONS)}"])


def _entries() -> Iterator[_Entry]:
    for family, section in schema.MODEL_FAMILIES.items():
        yield from _entries_of("model", section, family)
    for name, section in schema.SECTIONS.items():
        yield from _entries_of(name, section, "")


def _entries_of(prefix: str, section: type, family: str) -> Iterator[_Entry]:
    for name, (spec, annotation) in schema.keys_of(section).items():
        yield _Entry(f"{prefix}.{name}", family, spec, annotation)
        nested = nested_section(annotation) or item_section(annotation)
        if nested is not None:
            yield from _entries_of(f"{prefix}.{name}", nested, family)


def _hint(topic: str, keys: dict[str, list[_Entry]]) -> str:
    same_name = [path for path in keys if path.rpartition(".")[2] == topic]
    if same_name:
        return f"; did you mean {' or '.join(same_name)}?"
    near = [rule for rule in EXPLANATIONS if topic and rule.startswith(topic.upper())][:3]
    near = near or nearest(topic.upper(), EXPLANATIONS)
    near = near or nearest(topic, [*keys, *schema.SECTIONS, "model"])
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return "; name a rule id (MZ012), a section (train) or a key (train.steps), or give no name for a list"


def _rule_lines(entry: Explanation) -> list[str]:
    lines = [f"{entry.id} ({entry.severity}): {entry.title}"]
    lines += _paragraph("why", entry.explanation)
    return lines + _paragraph("fix", entry.fix)


def _section_lines(topic: str, keys: dict[str, list[_Entry]]) -> list[str]:
    lines = [f"{topic}: keys and their meaning"]
    for path, entries in keys.items():
        if path.startswith(f"{topic}."):
            lines.append(f"  {path + _families(entries):44s}  {entries[0].spec.doc}")
    return lines


def _key_lines(entries: list[_Entry]) -> list[str]:
    """Describe a key; twice when model families define it differently."""
    lines: list[str] = []
    alike: list[list[_Entry]] = []
    for entry in entries:
        if alike and alike[-1][0].spec == entry.spec and alike[-1][0].annotation == entry.annotation:
            alike[-1].append(entry)
        else:
            alike.append([entry])
    for group in alike:
        entry = group[0]
        lines.append(entry.path + _families(group))
        lines += _paragraph("meaning", entry.spec.doc)
        lines += _paragraph("takes", expected(entry.spec, entry.annotation))
        lines += _paragraph("default", _default(entry.spec))
        nested = nested_section(entry.annotation) or item_section(entry.annotation)
        if nested is not None:
            lines += _paragraph("keys", ", ".join(f"{entry.path}.{name}" for name in schema.keys_of(nested)))
        if entry.spec.used_when is not None:
            lines += _paragraph("used", _used(entry))
        checks = [f"{rule.id} ({rule.title})" for rule in RULES if entry.path in rule.reads]
        lines += _paragraph("rules", ", ".join(checks)) if checks else []
    return lines


def _families(entries: list[_Entry]) -> str:
    names = [entry.family for entry in entries if entry.family]
    return "" if not names or len(names) == len(schema.MODEL_FAMILIES) else f" ({', '.join(names)})"


def _default(spec: schema.Key) -> str:
    if spec.default is schema.REQUIRED:
        return "none: it has to be set"
    if spec.default is schema.AUTO:
        return f"auto: {spec.auto}"
    return "[]" if spec.default == () else show(spec.default).strip("'")


def _used(entry: _Entry) -> str:
    switch, values = entry.spec.used_when
    section = entry.path.rpartition(".")[0]
    if isinstance(values, range):
        return f"only when {section}.{switch} is at least {values.start}"
    return f"only when {section}.{switch} is {' or '.join(map(str, values))}"


def _paragraph(name: str, text: str) -> list[str]:
    indent = " " * 11
    return textwrap.wrap(text, _WIDTH, initial_indent=f"  {name:9s}", subsequent_indent=indent)
