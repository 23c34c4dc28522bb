"""What a translation is: the values in the other tool's terms, and what became of every key."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from ms_zero.config import schema
from ms_zero.config.findings import show
from ms_zero.config.reader import Node
from ms_zero.config.values import RefusedValue, convert
from ms_zero.errors import one_line

Fate = Literal["translated", "default", "same", "unavailable", "untranslatable", "ignored", "unknown"]
FATES: tuple[Fate, ...] = get_args(Fate)


@dataclass(frozen=True)
class Note:
    """What became of one key of the source.

    Args:
        source: The key as the source writes it.
        fate: `translated`: written as `target`. `default`: not in the source, but its default differs from
            the target's, so it is written out. `same`: holds in the target without a key. `unavailable`: this
            version has no such key yet. `untranslatable`: the target has no such thing. `ignored`: the source
            tool itself does not read it in this file. `unknown`: not a key of the source tool.
        reason: Why, and what to look after.
        target: Dotted key of the target, or "".
        where: `file:line` of the key, or "" when it is not in a file.

    """

    source: str
    fate: Fate
    reason: str
    target: str = ""
    where: str = ""

    def __str__(self) -> str:
        """Render as one line without the place."""
        text = f"{self.source} -> {self.target}" if self.target else self.source
        return one_line(f"{text}: {self.reason}" if self.reason else text)


@dataclass(frozen=True)
class Translation:
    """The result of a translation.

    Args:
        values: Nested mapping with only keys that the target knows; for a run file a partial one.
        notes: At least one for each key of the source, in its order; source defaults come last.

    """

    values: dict[str, Any]
    notes: tuple[Note, ...]

    def count(self, fate: Fate) -> int:
        """Return how many keys had this fate."""
        return sum(note.fate == fate for note in self.notes)


@dataclass(frozen=True)
class Source:
    """A file of another tool, flattened.

    Args:
        leaves: Dotted key -> plain value, in file order; lists are values.
        places: Dotted key -> `file:line`.
        label: Name of the file.
        workers: Number of workers that the run is meant for; None when the file alone has to tell.

    """

    leaves: Mapping[str, Any]
    places: Mapping[str, str]
    label: str
    workers: int | None = None


class Notes:
    """Collects values and notes; every key of the source ends up in exactly one list."""

    def __init__(self, leaves: Mapping[str, Any]) -> None:
        self.leaves = dict(leaves)
        self._left = dict.fromkeys(leaves)
        self._values: dict[str, Any] = {}
        self._from: dict[str, str] = {}
        self._notes: list[Note] = []

    def get(self, source: str, default: Any = None) -> Any:
        """Return the value of a source key."""
        return self.leaves.get(source, default)

    def has(self, source: str) -> bool:
        """Say whether a source key still waits for its fate."""
        return source in self._left

    def left(self) -> list[str]:
        """Return the source keys that still wait for their fate."""
        return list(self._left)

    def value(self, target: str) -> Any:
        """Return what has been written for a target key, or None."""
        return self._values.get(target)

    def put(self, source: str, target: str, value: Any, remark: str = "") -> bool:
        """Write a value; says why not when the target refuses it. Returns whether it was written."""
        refusal = self._refusal(target, value)
        if refusal is not None:
            self.note(source, *refusal, target)
            return False
        if target in self._values and self._values[target] != value:
            reason = f"contradicts {self._from[target]}, which sets {target} to {show(self._values[target])}"
            self.note(source, "untranslatable", reason, target)
            return False
        self._values[target] = value
        self._from[target] = source
        self.note(source, "translated", remark, target)
        return True

    def default(self, source: str, target: str, value: Any, reason: str) -> None:
        """Write a default of the source tool, unless the target has the same default or no such key."""
        if target in self._values or self._refusal(target, value) or self._is_default(target, value):
            return
        self._values[target] = value
        self._from[target] = source
        self._notes.append(Note(source, "default", reason, target))

    def same(self, source: str, reason: str) -> None:
        """Note that the target does so without a key."""
        self.note(source, "same", reason)

    def drop(self, source: str, reason: str) -> None:
        """Note that the target cannot do so."""
        self.note(source, "untranslatable", reason)

    def ignored(self, source: str, reason: str) -> None:
        """Note that the source tool does not read the key here."""
        self.note(source, "ignored", reason)

    def note(self, source: str, fate: Fate, reason: str, target: str = "") -> None:
        """Record what became of a key."""
        self._left.pop(source, None)
        self._notes.append(Note(source, fate, reason, target))

    def add(self, source: str) -> None:
        """Let a key wait for its fate that `leaves` got later, such as the new name of an old key."""
        self._left[source] = None

    def forget(self, source: str) -> None:
        """Leave out a key that only repeats another one."""
        self._left.pop(source)
        del self.leaves[source]

    def replace(self, source: str, target: str, fate: Fate, reason: str) -> None:
        """Take back what a source key has written, because another key decides."""
        self._values.pop(target, None)
        self._notes = [note for note in self._notes if (note.source, note.target) != (source, target)]
        self.note(source, fate, reason, target)

    def result(self) -> Translation:
        """Return everything, notes in the order of the source."""
        order = {name: number for number, name in enumerate(self.leaves)}
        notes = sorted(self._notes, key=lambda note: order.get(note.source, len(order)))
        return Translation(self._nested(self._values), tuple(notes))

    def _nested(self, values: Mapping[str, Any]) -> dict[str, Any]:
        nested: dict[str, Any] = {}
        for path, value in values.items():
            *sections, name = path.split(".")
            table = nested
            for section in sections:
                table = table.setdefault(section, {})
            table[name] = value
        return nested

    def _refusal(self, target: str, value: Any) -> tuple[Fate, str] | None:
        """Return fate and reason when the target does not take the value."""
        return None

    def _is_default(self, target: str, value: Any) -> bool:
        return False


class RunNotes(Notes):
    """Notes whose target is a run file: only keys and values that the schema takes are written.

    What the schema does not have is reported as unavailable, so tables may name keys of later versions.
    """

    def result(self) -> Translation:
        """Return everything, without keys that would have no effect."""
        for path, switch in self._without_effect().items():
            source = self._from[path]
            self._notes = [note for note in self._notes if (note.source, note.target) != (source, path)]
            reason = f"has no effect because {switch} is {self._switch(switch)}"
            self.note(source, "untranslatable", reason, path)
            del self._values[path]
        ordered = {path: self._values[path] for path in _schema_order(self._values)}
        self._values = ordered
        return super().result()

    def _refusal(self, target: str, value: Any) -> tuple[Fate, str] | None:
        found = self._key(target)
        if target == "model.family" and value in schema.MODEL_FAMILIES:
            return None
        if found is None:
            return "unavailable", f"{target} is not in this version"
        try:
            convert(*found, _node(value))
        except RefusedValue as refused:
            return "untranslatable", f"{target}: {refused}"
        return None

    def _is_default(self, target: str, value: Any) -> bool:
        return self._key(target)[0].default == value

    def _key(self, target: str) -> tuple[schema.Key, Any] | None:
        section, _, name = target.partition(".")
        owners = [schema.SECTIONS[section]] if section in schema.SECTIONS else []
        if section == "model":
            family = self._values.get("model.family")
            owners = [schema.MODEL_FAMILIES[family]] if family else list(schema.MODEL_FAMILIES.values())
        for owner in owners:
            if name in schema.keys_of(owner):
                return schema.keys_of(owner)[name]
        return None

    def _without_effect(self) -> dict[str, str]:
        """Return written key -> its switch, for keys that the choice made by the switch does not read."""
        found = {}
        for path in self._values:
            section = path.partition(".")[0]
            used_when = self._key(path)[0].used_when
            if used_when is None:
                continue
            switch = f"{section}.{used_when[0]}"
            value = self._switch(switch)
            if value is not schema.AUTO and value not in used_when[1]:
                found[path] = switch
        return found

    def _switch(self, path: str) -> Any:
        """The value that a run file with these values has for a key that decides about others."""
        return self._values.get(path, self._key(path)[0].default)


def _node(value: Any) -> Node:
    return Node([_node(item) for item in value] if isinstance(value, list) else value, "")


def _schema_order(paths: Iterable[str]) -> list[str]:
    sections = ["model", *schema.SECTIONS]
    return sorted(paths, key=lambda path: sections.index(path.partition(".")[0]))
