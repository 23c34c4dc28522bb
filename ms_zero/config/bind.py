"""Checks merged settings against the schema: keys, types, ranges. Nothing across keys; `rules` does that."""

import math
from collections.abc import Collection
from dataclasses import dataclass, is_dataclass
from typing import Any, Literal, get_args, get_origin

from ms_zero.config import schema
from ms_zero.config.findings import Finding, show
from ms_zero.config.reader import Node, kind_of
from ms_zero.config.schema import AUTO, REQUIRED, Key
from ms_zero.config.sources import Setting, Table
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

    """

    values: dict[str, Any]
    origins: dict[str, str]
    layers: dict[str, int]
    world_size: int
    label: str

    def known(self, *paths: str) -> bool:
        """Say whether all these keys have a concrete value."""
        return all(path in self.values and self.values[path] is not AUTO for path in paths)

    def layer(self, path: str) -> int:
        """Return the precedence of the layer that set a key; lower than all for a default."""
        return self.layers.get(path, _DEFAULT_LAYER)

    def where(self, path: str) -> str:
        """Return the place to name in a message about this key."""
        return self.origins[path] if path in self.layers else self.label


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


class _Binder:
    """Collects values and findings section by section."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.findings: list[Finding] = []
        self._suggested: dict[str, int] = {}

    def bind_model(self, entry: Setting | Table | None) -> None:
        """Bind the model section under the family that it names."""
        if isinstance(entry, Setting):
            self._report("MZ005", "model", entry.node.where, f"{_found(entry.node)}; expected a mapping")
            return
        family = entry.entries.get("family") if entry is not None else None
        expected = f"expected one of {', '.join(schema.MODEL_FAMILIES)}"
        if family is None:
            where = entry.where if entry is not None else self.facts.label
            message = "missing; set it or include a preset, such as include: [models/gpt-tiny]"
            self._report("MZ007", "model.family", where, message)
        elif isinstance(family, Table):
            self._report("MZ005", "model.family", family.where, f"it is a mapping; {expected}")
        elif not isinstance(family.node.value, str) or family.node.value not in schema.MODEL_FAMILIES:
            message = f"{show(_plain(family.node))} is not a model family; {expected}"
            self._report("MZ010", "model.family", family.node.where, message)
        else:
            self.bind_section("model", schema.MODEL_FAMILIES[family.node.value], entry)

    def bind_section(self, prefix: str, section: type, entry: Setting | Table | None) -> None:
        """Bind one section: `prefix` is its dotted name, `section` its class."""
        if isinstance(entry, Setting):
            self._report("MZ005", prefix, entry.node.where, f"{_found(entry.node)}; expected a mapping")
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
        nested = _nested_section(annotation)
        if isinstance(item, Table):
            if nested is None:
                message = f"it is a mapping; expected {_expected(spec, annotation)}"
                self._report("MZ005", path, item.where, message)
            else:
                self.bind_section(path, nested, item)
            return
        node = item.node
        try:
            value = _convert(spec, annotation, node)
        except _Refused as refused:
            self._report(refused.rule, path, refused.where or node.where, str(refused))
            return
        self._set(path, value, node.where)
        self.facts.layers[path] = item.layer

    def _set(self, path: str, value: Any, origin: str) -> None:
        self.facts.values[path] = value
        self.facts.origins[path] = origin

    def _report(self, rule: str, path: str, where: str, message: str) -> None:
        self.findings.append(Finding(rule, "error", path, where, message))


class _Refused(ValueError):
    """A value that does not fit its key."""

    def __init__(self, rule: str, message: str, where: str = "") -> None:
        self.rule = rule
        self.where = where
        super().__init__(message)


def _convert(spec: Key, annotation: Any, node: Node) -> Any:
    """Return the value of a key as its type, or raise _Refused."""
    value = node.value
    if spec.auto and value == AUTO.value:
        return AUTO
    base, optional = _unwrap(annotation)
    if value is None and optional:
        return None
    if get_origin(base) is Literal:
        return _convert_choice(get_args(base), node)
    if base is bool and isinstance(value, bool):
        return value
    if base in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
        return _convert_number(spec, base, value)
    if base is str and isinstance(value, str):
        return _convert_text(value)
    if get_origin(base) is tuple and isinstance(value, list):
        return tuple(_convert_item(item) for item in value)
    expected = _expected(spec, annotation) + _type_hint(base, value)
    raise _Refused("MZ005", f"{_found(node)}; expected {expected}")


def _convert_choice(choices: tuple[str, ...], node: Node) -> str:
    if isinstance(node.value, str) and node.value in choices:
        return node.value
    near = nearest(node.value, choices, 1) if isinstance(node.value, str) else []
    hint = f"; did you mean {near[0]}?" if near else ""
    shown = show(_plain(node))
    raise _Refused("MZ010", f"{shown} is not allowed; expected {_one_of(choices)}{hint}")


def _convert_number(spec: Key, base: type, value: float) -> float:
    if base is int and isinstance(value, float):
        whole = math.isfinite(value) and value.is_integer() and abs(value) < 1e15
        hint = f"; write {int(value)}" if whole else ""
        raise _Refused("MZ005", f"{show(value)} is not an integer; expected {_expected(spec, base)}{hint}")
    try:
        number = base(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        expected = f"a finite number {spec.range_text()}".rstrip()
        raise _Refused("MZ006", f"{show(value)} is not finite; expected {expected}")
    if not spec.allows(number):
        raise _Refused("MZ006", f"{show(value)} is out of range; expected {spec.range_text()}")
    return number


def _convert_text(value: str, where: str = "") -> str:
    if not value.strip():
        raise _Refused("MZ016", "the text is empty", where)
    if not value.isprintable():
        raise _Refused("MZ016", f"{show(value)} holds control characters", where)
    return value


def _convert_item(node: Node) -> str:
    if not isinstance(node.value, str):
        raise _Refused("MZ005", f"the item {_found(node)}; expected text", node.where)
    return _convert_text(node.value, node.where)


def _unwrap(annotation: Any) -> tuple[Any, bool]:
    """Return (type without None, whether None is allowed)."""
    options = get_args(annotation)
    if type(None) not in options:
        return annotation, False
    return next(option for option in options if option is not type(None)), True


def _nested_section(annotation: Any) -> type | None:
    base, _ = _unwrap(annotation)
    return base if is_dataclass(base) else None


def _expected(spec: Key, annotation: Any) -> str:
    """Describe what a key takes: `an integer at least 1, or auto`."""
    base, optional = _unwrap(annotation)
    if get_origin(base) is Literal:
        text = _one_of(get_args(base))
    elif get_origin(base) is tuple:
        text = "a list of texts, such as [a.txt, b.txt]"
    elif is_dataclass(base):
        text = "a mapping"
    else:
        names = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
        text = f"{names[base]} {spec.range_text()}".rstrip()
    text += ", or null" if optional else ""
    return text + (", or auto" if spec.auto else "")


def _type_hint(base: Any, value: Any) -> str:
    if base in (int, float) and isinstance(value, str) and any(char.isdigit() for char in value):
        return " (digits only, without quotes or units)"
    if base is str and isinstance(value, bool | int | float):
        return " (put it in quotes)"
    return ""


def _suggest(prefix: str, name: str, valid: tuple[str, ...]) -> str:
    """Say which key was meant: one that is near, the same name in another section, or list all."""
    dotted = f"{prefix}." if prefix else ""
    near = nearest(name, valid, 1)
    elsewhere = _same_name_elsewhere(prefix, name)
    if elsewhere and (not near or near[0].lower() != name.lower()):
        return f"; did you mean {' or '.join(elsewhere)}?"
    if near:
        return f"; did you mean {dotted}{near[0]}?"
    return f"; known keys: {', '.join(valid)}"


def _same_name_elsewhere(prefix: str, name: str) -> list[str]:
    places = []
    for section, classes in {**{k: [v] for k, v in schema.SECTIONS.items()}, "model": _families()}.items():
        for owner in classes:
            keys = schema.keys_of(owner)
            family = keys["family"][0].default if "family" in keys else ""
            path = f"{section}.{name}" + (f" (family {family} only)" if section == prefix else "")
            if name in keys and path not in places:
                places.append(path)
    return places


def _families() -> list[type]:
    return list(schema.MODEL_FAMILIES.values())


def _plain(node: Node) -> Any:
    """Return a node's value for a message."""
    if isinstance(node.value, list):
        return [_plain(item) for item in node.value[:8]]
    return "a mapping" if isinstance(node.value, dict) else node.value


def _found(node: Node) -> str:
    if isinstance(node.value, dict):
        return "it is a mapping"
    return "it is null" if node.value is None else f"{show(_plain(node))} is {kind_of(node.value)}"


def _one_of(choices: tuple[str, ...]) -> str:
    return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
