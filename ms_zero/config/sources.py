"""Gathers what the user wrote: the file, its includes, the overrides; later layers win key by key."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ms_zero import resources
from ms_zero.config import reader, schema
from ms_zero.config.findings import Finding, show
from ms_zero.config.reader import Node
from ms_zero.errors import UserError

MAX_FILES = 64
MAX_INCLUDE_DEPTH = 8

_INCLUDABLE = ("models", "runs")
_OVERRIDE_PATH = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")


@dataclass(frozen=True)
class Setting:
    """A value that is not a mapping, and the number of the layer that set it (higher wins)."""

    node: Node
    layer: int


@dataclass(frozen=True)
class Table:
    """Merged mapping: what all layers say about one section."""

    entries: dict[str, "Setting | Table"]
    where: str


@dataclass(frozen=True)
class Gathered:
    """All settings of one config before they are checked.

    Args:
        root: The merged top level.
        label: How messages name the main file.
        findings: What is wrong so far.
        complete: Whether every file could be read; if not, keys seem to be missing that are not.

    """

    root: Table
    label: str
    findings: list[Finding]
    complete: bool


def gather(path: str | Path, overrides: Sequence[str]) -> Gathered:
    """Read a config file with everything it includes, then apply the overrides.

    Args:
        path: A file, or the name of a preset (`runs/quickstart`) when no such file exists.
        overrides: `section.key=value` items; the value is YAML.
    """
    gatherer = _Gatherer()
    file = _locate(path, gatherer.findings)
    if file is None:
        gatherer.complete = False
    else:
        gatherer.add_file(file, ())
    for text in overrides:
        gatherer.add_override(text)
    label = str(path) if file is None else _label(file)
    return Gathered(gatherer.root, label, gatherer.findings, gatherer.complete)


def _locate(path: str | Path, findings: list[Finding]) -> Path | None:
    """Return the file of a path or preset name, or None after reporting that there is neither."""
    kind, _, name = str(path).partition("/")
    if kind not in _INCLUDABLE or name.endswith((".yaml", ".yml")) or _is_file(Path(path)):
        return Path(path)
    try:
        return resources.find_preset(kind, name)
    except UserError as error:
        findings.append(Finding("MZ001", "error", "", str(path), f"no such file, and {error}"))
        return None


def _label(file: Path) -> str:
    """Name a file in messages: as given, or relative to the working directory when below it."""
    try:
        return str(file.relative_to(Path.cwd()))
    except (ValueError, OSError):  # elsewhere, or the working directory is gone
        return str(file)


class _Gatherer:
    """Collects layers in increasing precedence."""

    def __init__(self) -> None:
        self.root = Table({}, "")
        self.findings: list[Finding] = []
        self.complete = True
        self._layers = 0
        self._files = 0

    def add_file(self, file: Path, parents: tuple[Path, ...]) -> None:
        """Merge the includes of `file`, then the file itself; `parents` are the files that include it."""
        self._files += 1
        node, findings = reader.read_file(file, _label(file))
        self.findings += findings
        if node is None:
            self.complete = False
            return
        entries = dict(node.value)
        include = entries.pop("include", None)
        if include is not None:
            self._add_includes(include, file, (*parents, _identity(file)))
        self._merge(self.root, entries, top=True)

    def add_override(self, text: str) -> None:
        """Merge one `section.key=value`."""
        where = f"override {show(text)}"
        path, equals, value = text.partition("=")
        if not equals or not _OVERRIDE_PATH.fullmatch(path):
            return self._report("MZ009", where, "expected section.key=value, such as train.steps=20")
        if path == "include":
            return self._report("MZ009", where, "a file can include others, the command line cannot")
        node, findings = reader.read_text(value, where, lines=False)
        self.findings += findings
        if node is None and not findings:
            return self._report("MZ009", where, f"no value after '='; write {path}=null for no value")
        if findings:
            return None
        keys = path.split(".")
        if len(keys) > reader.MAX_DEPTH:
            return self._report("MZ009", where, f"the key is nested deeper than {reader.MAX_DEPTH} levels")
        for key in reversed(keys):
            node = Node({key: node}, where)
        return self._merge(self.root, node.value, top=True)

    def _add_includes(self, include: Node, file: Path, chain: tuple[Path, ...]) -> None:
        items = include.value if isinstance(include.value, list) else [include]
        for item in items:
            if not isinstance(item.value, str):
                message = f"include: found {reader.kind_of(item.value)}; expected names of presets or files"
                self._report("MZ008", item.where, message)
                continue
            included = self._resolve_include(item, file)
            if included is not None and self._may_include(included, item, chain):
                self.add_file(included, chain)
            else:
                self.complete = False

    def _resolve_include(self, item: Node, file: Path) -> Path | None:
        """Return the file that an include names, or None after reporting why there is none."""
        name = item.value
        if "\0" in name or not name.strip():
            self._report("MZ008", item.where, f"include: {show(name)} is not a file name")
            return None
        if name.startswith((".", "/")) or name.endswith((".yaml", ".yml")):
            included = file.parent / name
            if not _is_file(included):
                self._report("MZ008", item.where, f"include: no file {show(name)} in {_label(file.parent)}")
                return None
            return included
        kind, _, preset = name.partition("/")
        if kind not in _INCLUDABLE:
            message = f"include: {show(name)}: expected models/NAME, runs/NAME or a file such as ./base.yaml"
            self._report("MZ008", item.where, message)
            return None
        try:
            return resources.find_preset(kind, preset)
        except UserError as error:
            self._report("MZ008", item.where, f"include: {error}")
            return None

    def _may_include(self, included: Path, item: Node, chain: tuple[Path, ...]) -> bool:
        if _identity(included) in chain:
            start = chain.index(_identity(included))
            names = " -> ".join(path.name for path in (*chain[start:], included))
            self._report("MZ008", item.where, f"include: a file includes itself: {names}")
        elif len(chain) >= MAX_INCLUDE_DEPTH:
            self._report("MZ008", item.where, f"include: nested deeper than {MAX_INCLUDE_DEPTH} files")
        elif self._files >= MAX_FILES:
            self._report("MZ008", item.where, f"include: more than {MAX_FILES} files in one config")
        else:
            return True
        return False

    def _merge(self, table: Table, entries: dict[str, Node], top: bool = False) -> None:
        if top:
            self._layers += 1
        for key, node in entries.items():
            # A section whose lines are all commented out reads as null and means: nothing said here.
            value = {} if top and node.value is None else node.value
            if top and key in schema.SHORTHANDS and not isinstance(value, dict):
                value = {schema.SHORTHANDS[key]: node}
            if not isinstance(value, dict):
                table.entries[key] = Setting(node, self._layers)
                continue
            below = table.entries.get(key)
            if not isinstance(below, Table):
                below = table.entries[key] = Table({}, node.where)
            self._merge(below, value)

    def _report(self, rule: str, where: str, message: str) -> None:
        self.findings.append(Finding(rule, "error", "", where, message))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long, a folder that may not be searched
        return False


def _identity(file: Path) -> Path:
    # Unlike Path.resolve, realpath does not raise on a loop of symbolic links.
    return Path(os.path.realpath(file))
