"""Tensors within nested tuples, lists, dicts and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

from mindspore import Tensor


@dataclass(frozen=True)
class Slot:
    """Stands for the next tensor of a flattened value."""


def flatten(
    value: Any, *, leave: Callable[[Tensor], bool] = lambda tensor: False
) -> tuple[list[Tensor], Any]:
    """The tensors of `value` in order, and `value` with a :class:`Slot` in place of each.

    Those for which `leave` is true stay where they are.
    """
    tensors: list[Tensor] = []

    def strip(part: Any) -> Any:
        if isinstance(part, Tensor) and not leave(part):
            tensors.append(part)
            return Slot()
        return _rebuild(part, strip)

    return tensors, strip(value)


def unflatten(tensors: Iterator[Tensor], spec: Any) -> Any:
    """The inverse of :func:`flatten`."""
    if isinstance(spec, Slot):
        return next(tensors)
    return _rebuild(spec, lambda part: unflatten(tensors, part))


def _rebuild(value: Any, change: Any) -> Any:
    """`value` with `change` applied to its direct parts, itself when it is no container."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*[change(part) for part in value])
    if isinstance(value, tuple | list):
        return type(value)(change(part) for part in value)
    if isinstance(value, dict):
        return {key: change(part) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return _with_parts(value, change)
    return value


def _with_parts(value: Any, change: Any) -> Any:
    """A copy of a dataclass with other fields; itself when they stay, for it may be more than its fields."""
    parts = {field.name: getattr(value, field.name) for field in fields(value)}
    changed = {name: change(part) for name, part in parts.items()}
    if all(changed[name] is part for name, part in parts.items()):
        return value
    result = copy(value)
    for name, part in changed.items():
        object.__setattr__(result, name, part)  # it may be frozen
    return result
