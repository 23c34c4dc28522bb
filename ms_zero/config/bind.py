"""Checks merged settings against the schema: keys, types, ranges. Nothing across keys; `rules` does that."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from ms_zero.config import schema
from ms_zero.config.findings import Finding, show
from ms_zero.config.schema import AUTO, REQUIRED, Key
from ms_zero.config.sources import Setting, Table
from ms_zero.config.values import (
    RefusedValue,
    convert,
    expected,
    found,
    item_section,
    nested_section,
    plain,
)
from ms_zero.resources import nearest

_MAX_SUGGESTIONS = 20  # per section: finding the nearest of many unknown keys takes time, a few help as much
_DEFAULT_LAYER = -1


@dataclass
class Facts:
    """All values of a config by dotted key, while it is being checked.

    A key is absent when its value is missing or wrong, so that later checks pass over it.

    Args:
        values: Dotted key -> value; may be AUTO until it is derived.
        origins: Dotted key -> where the value comes from.
        layers: Dotted key -> precedence of the layer that set it; absent for defaults.
        world_size: Number of workers.
        label: Name of the config file.
        tokenizer_vocab: Number of the tokenizer's ids once that is derived; None when there is no tokenizer.

    """

    values: dict[str, Any]
    origins: dict[str, str]
    layers: dict[str, int]
    world_size: int
    label: str
    tokenizer_vocab: int | None = None

    def known(self, *paths: str) -> bool:
        """Say whether all these keys have a concrete value."""
        return all(path in self.values and self.values[path] is not AUTO for path in paths)

    def layer(self, path: str) -> int:
        """Return the precedence of the layer that set a key; lower than all for a default."""
        return self.layers.get(path, _DEFAULT_LAYER)

    def where(self, path: str) -> str:
        """Return the place to name in a message about this key."""
        return self.origins.get(path, self.label) if path in self.layers else self.label


def bind(root: Table, label: str, world_size: int) -> tuple[Facts, list[Finding]]:
    """Check every setting against the schema and fill in defaults."""
    binder = _Binder(Facts({}, {}, {}, world_size, label))
    for name, entry in root.entries.items():
        if name != "model" and name not in schema.SECTIONS:
            binder.refuse_unknown("", name, entry, ("model", *schema.SECTIONS))
    binder.bind_model(root.entries.get("model"))
    for name, section in schema.SECTIONS.items():
        binder.bind_section(name, section, root.entries.get(name))
    return binder.facts, binder.findings


def section_values(facts: Facts, prefix: str) -> dict[str, Any]:
    """Return the values directly below `prefix` by field name."""
    skip = len(prefix) + 1
    return {
        path[skip:]: value
        for path, value in facts.values.items()
        if path.startswith(f"{prefix}.") and "." not in path[skip:]
    }


def model_config(facts: Facts) -> schema.ModelConfig:
    """Make the model section from values that are all present and concrete."""
    values = section_values(facts, "model")
    family = schema.MODEL_FAMILIES[values["family"]]
    for name, (_, annotation) in schema.keys_of(family).items():
        inner = section_values(facts, f"model.{name}")
        if inner:
            values[name] = nested_section(annotation)(**inner)
    return family(**values)


class _Binder:
    """Collects values and findings section by section."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.findings: list[Finding] = []
        self._suggested: dict[str, int] = {}

    def bind_model(self, entry: Setting | Table | None) -> None:
        """Bind the model section under the family that it names."""
        if isinstance(entry, Setting):
            self._report("MZ005", "model", entry.node.where, f"{found(entry.node)}; expected a mapping")
            return
        family = entry.entries.get("family") if entry is not None else None
        choices = f"expected one of {', '.join(schema.MODEL_FAMILIES)}"
        if family is None:
            where = entry.where if entry is not None else self.facts.label
            message = "missing; set it or include a preset, such as include: [models/gpt-tiny]"
            self._report("MZ007", "model.family", where, message)
        elif isinstance(family, Table):
            self._report("MZ005", "model.family", family.where, f"it is a mapping; {choices}")
        elif not isinstance(family.node.value, str) or family.node.value not in schema.MODEL_FAMILIES:
            message = f"{show(plain(family.node))} is not a model family; {choices}"
            self._report("MZ010", "model.family", family.node.where, message)
        else:
            self.bind_section("model", schema.MODEL_FAMILIES[family.node.value], entry)

    def bind_section(self, prefix: str, section: type, entry: Setting | Table | None) -> None:
        """Bind one section: `prefix` is its dotted name, `section` its class."""
        if isinstance(entry, Setting):
            self._report("MZ005", prefix, entry.node.where, f"{found(entry.node)}; expected a mapping")
            return
        keys = schema.keys_of(section)
        given = {} if entry is None else entry.entries
        for name, item in given.items():
            if name not in keys:
                self.refuse_unknown(prefix, name, item, keys)
        for name, (spec, annotation) in keys.items():
            path = f"{prefix}.{name}"
            if name in given:
                self._bind_key(path, spec, annotation, given[name])
            elif spec.default is REQUIRED:
                where = self.facts.label if entry is None else entry.where
                self._report("MZ007", path, where, f"missing; {_lower_first(spec.doc)}")
            else:
                self._set(path, spec.default, "default")

    def refuse_unknown(self, prefix: str, name: str, item: Setting | Table, valid: Collection[str]) -> None:
        """Report an unknown key with the nearest valid one."""
        where = item.where if isinstance(item, Table) else item.node.where
        count = self._suggested[prefix] = self._suggested.get(prefix, 0) + 1
        hint = _suggest(prefix, name, tuple(valid)) if count <= _MAX_SUGGESTIONS else ""
        shown = name if name.isidentifier() and len(name) <= 60 else show(name)
        self._report("MZ004", f"{prefix}.{shown}" if prefix else shown, where, f"unknown key{hint}")

    def _bind_key(self, path: str, spec: Key, annotation: Any, item: Setting | Table) -> None:
        nested = nested_section(annotation)
        if isinstance(item, Table):
            if nested is None:
                message = f"it is a mapping; expected {expected(spec, annotation)}"
                self._report("MZ005", path, item.where, message)
            else:
                self.bind_section(path, nested, item)
            return
        node = item.node
        if item_section(annotation) is not None and isinstance(node.value, list):
            self._bind_items(path, item_section(annotation), item)
            return
        try:
            value = convert(spec, annotation, node)
        except RefusedValue as refused:
            self._report(refused.rule, path, refused.where or node.where, str(refused))
            return
        self._set(path, value, node.where)
        self.facts.layers[path] = item.layer

    def _bind_items(self, path: str, section: type, item: Setting) -> None:
        """Bind a list of sections; its value is known only when every item is right."""
        values = []
        for number, node in enumerate(item.node.value):
            name = f"{path}[{number}]"
            if isinstance(node.value, dict):
                settings = {key: Setting(value, item.layer) for key, value in node.value.items()}
                self.bind_section(name, section, Table(settings, node.where))
            else:
                self._report("MZ005", name, node.where, f"{found(node)}; expected a mapping")
            given = section_values(self.facts, name)
            if given.keys() == schema.keys_of(section).keys():
                values.append(section(**given))
        if len(values) == len(item.node.value):
            self._set(path, tuple(values), item.node.where)
            self.facts.layers[path] = item.layer

    def _set(self, path: str, value: Any, origin: str) -> None:
        self.facts.values[path] = value
        self.facts.origins[path] = origin

    def _report(self, rule: str, path: str, where: str, message: str) -> None:
        self.findings.append(Finding(rule, "error", path, where, message))


def _suggest(prefix: str, name: str, valid: tuple[str, ...]) -> str:
    """Say which key was meant: one that is near, the same name in another section, or list all."""
    if prefix == "model" and any(name in schema.keys_of(family) for family in schema.MODEL_FAMILIES.values()):
        return " of this family; remove it or change model.family"
    near = nearest(name, valid, 1)
    elsewhere = [
        f"{section}.{name}"
        for section, owners in _owners()
        if any(name in schema.keys_of(owner) for owner in owners)
    ]
    if elsewhere and (not near or near[0].lower() != name.lower()):
        return f"; did you mean {' or '.join(elsewhere)}?"
    if near:
        return f"; did you mean {f'{prefix}.' if prefix else ''}{near[0]}?"
    return f"; known keys: {', '.join(valid)}"


def _owners() -> Iterator[tuple[str, list[type]]]:
    """Yield (section name, classes that it can have)."""
    yield "model", list(schema.MODEL_FAMILIES.values())
    for name, section in schema.SECTIONS.items():
        yield name, [section]


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
