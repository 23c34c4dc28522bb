"""One value against one key: its type, its range, and the words to refuse it."""

import math
from dataclasses import fields, is_dataclass
from typing import Any, Literal, get_args, get_origin

from ms_zero.config.findings import show
from ms_zero.config.reader import Node, kind_of
from ms_zero.config.schema import AUTO, Key
from ms_zero.resources import nearest


class RefusedValue(ValueError):
    """A value that does not fit its key."""

    def __init__(self, rule: str, message: str, where: str = "") -> None:
        self.rule = rule
        self.where = where
        super().__init__(message)


def convert(spec: Key, annotation: Any, node: Node) -> Any:
    """Return the value of a key as its type, or AUTO; raises RefusedValue."""
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
        return tuple(_convert_item(spec, get_args(base)[0], item) for item in value)
    wanted = expected(spec, annotation) + _type_hint(base, value)
    raise RefusedValue("MZ005", f"{found(node)}; expected {wanted}")


def _convert_choice(choices: tuple[str, ...], node: Node) -> str:
    if isinstance(node.value, str) and node.value in choices:
        return node.value
    near = nearest(node.value, choices, 1) if isinstance(node.value, str) else []
    hint = f"; did you mean {near[0]}?" if near else ""
    shown = show(plain(node))
    raise RefusedValue("MZ010", f"{shown} is not allowed; expected {_one_of(choices)}{hint}")


def _convert_number(spec: Key, base: type, value: float) -> float:
    if base is int and isinstance(value, float):
        whole = math.isfinite(value) and value.is_integer() and abs(value) < 1e15
        hint = f"; write {int(value)}" if whole else ""
        raise RefusedValue("MZ005", f"{show(value)} is not an integer; expected {expected(spec, base)}{hint}")
    try:
        number = base(value)
    except OverflowError:
        number = math.inf
    if isinstance(number, float) and not math.isfinite(number):
        wanted = f"a finite number {spec.range_text()}".rstrip()
        raise RefusedValue("MZ006", f"{show(value)} is not finite; expected {wanted}")
    if not spec.allows(number):
        raise RefusedValue("MZ006", f"{show(value)} is out of range; expected {spec.range_text()}")
    return number


def _convert_text(value: str, where: str = "") -> str:
    if not value.strip():
        raise RefusedValue("MZ016", "the text is empty", where)
    if not value.isprintable():
        raise RefusedValue("MZ016", f"{show(value)} holds control characters", where)
    return value


def _convert_item(spec: Key, kind: type, node: Node) -> str | int:
    if kind is int:
        if not isinstance(node.value, int) or isinstance(node.value, bool):
            raise RefusedValue("MZ005", f"the item {found(node)}; expected an integer", node.where)
        if not spec.allows(node.value):
            message = f"the item {show(node.value)} is out of range; expected {spec.range_text(brief=True)}"
            raise RefusedValue("MZ006", message, node.where)
        return node.value
    if not isinstance(node.value, str):
        raise RefusedValue("MZ005", f"the item {found(node)}; expected text", node.where)
    return _convert_text(node.value, node.where)


def _unwrap(annotation: Any) -> tuple[Any, bool]:
    """Return (type without None, whether None is allowed)."""
    options = get_args(annotation)
    if type(None) not in options:
        return annotation, False
    return next(option for option in options if option is not type(None)), True


def nested_section(annotation: Any) -> type | None:
    """Return the section class that a key holds, or None when it holds a value."""
    base, _ = _unwrap(annotation)
    return base if is_dataclass(base) else None


def item_section(annotation: Any) -> type | None:
    """Return the section class that each item of a list is, or None when the key is no such list."""
    base, _ = _unwrap(annotation)
    item = get_args(base)[0] if get_origin(base) is tuple else None
    return item if is_dataclass(item) else None


def expected(spec: Key, annotation: Any) -> str:
    """Describe what a key takes: `an integer at least 1, or auto`."""
    base, optional = _unwrap(annotation)
    if get_origin(base) is Literal:
        text = _one_of(get_args(base))
    elif item_section(annotation) is not None:
        names = ", ".join(field.name for field in fields(item_section(annotation)))
        text = f"a list of mappings with {names}"
    elif get_origin(base) is tuple and get_args(base)[0] is int:
        text = f"a list of integers {spec.range_text(brief=True)}, such as [3, 2, 3]"
    elif get_origin(base) is tuple:
        text = "a list of texts, such as [a.txt, b.txt]"
    elif is_dataclass(base):
        text = "a mapping"
    else:
        names = {bool: "true or false", int: "an integer", float: "a number", str: "text"}
        text = f"{names[base]} {spec.range_text(brief=True)}".rstrip()
    text += ", or null" if optional else ""
    return text + (", or auto" if spec.auto else "")


def _type_hint(base: Any, value: Any) -> str:
    if base in (int, float) and isinstance(value, str) and any(char.isdigit() for char in value):
        return " (digits only, without quotes or units)"
    if base is str and isinstance(value, bool | int | float):
        return " (put it in quotes)"
    return ""


def plain(node: Node) -> Any:
    """Return a node's value for a message."""
    if isinstance(node.value, list):
        return [plain(item) for item in node.value[:8]]
    return "a mapping" if isinstance(node.value, dict) else node.value


def found(node: Node) -> str:
    """Describe what was found in place of the expected: `3 is an integer`."""
    if isinstance(node.value, dict):
        return "it is a mapping"
    return "it is null" if node.value is None else f"{show(plain(node))} is {kind_of(node.value)}"


def _one_of(choices: tuple[str, ...]) -> str:
    return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
