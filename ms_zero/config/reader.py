"""Reads YAML strictly: plain values only, every value with its place, everything wrong reported.

Stricter than `yaml.safe_load` on purpose: duplicate keys, explicit tags, unbounded aliases, deep nesting and
several documents are refused. Scalars follow YAML 1.2: `1e-3` is a number, `yes` and `010` are text.
Works on the event stream, so nesting and aliases cost neither stack nor memory before they are refused.
"""

import os
import re
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ms_zero.config.findings import Finding, show

MAX_BYTES = 128 * 1024
MAX_DEPTH = 16
MAX_NODES = 20_000

_MAX_DIGITS = 4000  # Python refuses to convert longer integers; as a float they are out of range all the same

_INT = re.compile(r"[-+]?(0|[1-9][0-9]*(_[0-9]+)*)")
_FLOAT = re.compile(r"[-+]?([0-9]+(_[0-9]+)*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
_SPECIAL_FLOAT = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_CONSTANTS = {"": None, "~": None, "null": None, "Null": None, "NULL": None}
_CONSTANTS |= {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}


@dataclass(frozen=True)
class Node:
    """A value and the place where it was written.

    `value` is a scalar (None, bool, int, float, str), a `list[Node]` or a `dict[str, Node]`. `size` counts
    the nodes below and including this one, with every alias expanded.
    """

    value: Any
    where: str
    size: int = 1


@dataclass
class _Frame:
    """A collection that is being read."""

    node: Node
    anchor: str | None
    is_mapping: bool
    key: str | None = None
    key_where: str = ""
    keyed: bool = False
    size: int = 1
    seen: dict[str, str] = field(default_factory=dict)


def read_file(path: Path, label: str) -> tuple[Node | None, list[Finding]]:
    """Read a config file.

    Args:
        path: The file.
        label: How messages name it.

    Returns:
        The top-level mapping, or None when there is none to work with, and what is wrong with it.

    """
    text, findings = read_characters(path, label)
    if text is None:
        return None, findings
    node, findings = read_text(text, label)
    if node is None and not findings:
        message = "the file is empty; expected sections such as train:"
        return None, [Finding("MZ002", "error", "", label, message)]
    if node is not None and not isinstance(node.value, dict):
        message = f"the top level is {kind_of(node.value)}; expected sections such as train:"
        findings.append(Finding("MZ002", "error", "", node.where, message))
        node = None
    return node, findings


def read_characters(path: Path, label: str) -> tuple[str | None, list[Finding]]:
    """Read a small UTF-8 file; None, with the reason, when it is none."""
    try:
        data = _read_bytes(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return None, [Finding("MZ001", "error", "", label, f"cannot read this file: {reason}")]
    if len(data) > MAX_BYTES:
        message = f"the file is larger than {MAX_BYTES // 1024} KiB; is this a config?"
        return None, [Finding("MZ001", "error", "", label, message)]
    try:
        return data.decode("utf-8-sig"), []
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        message = f"byte {data[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        return None, [Finding("MZ001", "error", "", f"{label}:{line}", message)]


def _read_bytes(path: Path) -> bytes:
    """Read at most one byte more than is allowed; never blocks on a pipe or reads a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise ValueError("it is a folder")
        if not stat.S_ISREG(mode):
            raise ValueError("it is not a regular file")
        return file.read(MAX_BYTES + 1)


def read_text(text: str, label: str, lines: bool = True) -> tuple[Node | None, list[Finding]]:
    """Read one YAML document from text; (None, []) means that it is empty.

    With `lines` false places are the bare label (for a value typed on the command line).
    """
    builder = _Builder(label, lines)
    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.feed(event)
    except _Stop:
        return None, builder.findings
    except yaml.YAMLError as error:
        builder.report_syntax(error, text)
        return None, builder.findings
    return builder.root, builder.findings


def scalar(text: str) -> Any:
    """Return the value of an unquoted YAML scalar: None, bool, int, float or str."""
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if _INT.fullmatch(text):
        return int(text) if len(text) <= _MAX_DIGITS else float(text)
    if _FLOAT.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9_]+", text):
        return float(text)
    if _SPECIAL_FLOAT.fullmatch(text):
        return float(text.replace(".", "").lower())
    return text


def kind_of(value: Any) -> str:
    """Name the kind of a value in the words of a YAML user."""
    if value is None:
        return "null"
    names = {bool: "a truth value", int: "an integer", float: "a number", str: "text", list: "a list"}
    return names.get(type(value), "a mapping")


class _Stop(Exception):
    """Nothing more can be read; the reason is among the findings."""


class _Builder:
    """Builds nodes from YAML events."""

    def __init__(self, label: str, lines: bool) -> None:
        self.root: Node | None = None
        self.findings: list[Finding] = []
        self._label = label
        self._lines = lines
        self._stack: list[_Frame] = []
        self._anchors: dict[str, Node | None] = {}
        self._nodes = 0
        self._documents = 0

    def feed(self, event: yaml.Event) -> None:
        """Take the next event."""
        where = self._place(event.start_mark)
        if isinstance(event, yaml.DocumentStartEvent):
            self._documents += 1
            if self._documents > 1:
                self._stop("MZ002", where, "a second document starts here; a config is one document")
        elif isinstance(event, yaml.AliasEvent):
            self._take_alias(event.anchor, where)
        elif isinstance(event, yaml.ScalarEvent):
            self._refuse_tag(event.tag, where)
            value = scalar(event.value) if event.style is None else event.value
            self._add(Node(value, where), event.anchor, raw=event.value)
        elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
            self._refuse_tag(event.tag, where)
            self._open(event, where)
        elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
            frame = self._stack.pop()
            self._add(replace(frame.node, size=frame.size), frame.anchor)

    def report_syntax(self, error: yaml.YAMLError, text: str) -> None:
        """Report what PyYAML says about the syntax, in one line."""
        if isinstance(error, yaml.reader.ReaderError):
            place = f":{text.count(chr(10), 0, error.position) + 1}" if self._lines else ""
            character = chr(error.character) if isinstance(error.character, int) else error.character
            message = f"the character {show(character)} is not allowed in YAML"
            self._report("MZ002", self._label + place, message)
            return
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        problem = getattr(error, "problem", None) or getattr(error, "context", None) or str(error)
        if "'\\t'" in problem:
            problem = "a tab cannot indent or start a value in YAML; use spaces"
        elif getattr(error, "context", None) == "while scanning an alias":
            problem = "'*' starts an alias; put a text such as \"*.txt\" in quotes"
        message = f"not valid YAML: {' '.join(problem.split())}"
        self._report("MZ002", self._place(mark) if mark else self._label, message)

    def _open(self, event: yaml.CollectionStartEvent, where: str) -> None:
        if len(self._stack) >= MAX_DEPTH:
            self._stop("MZ013", where, f"nested deeper than {MAX_DEPTH} levels")
        is_mapping = isinstance(event, yaml.MappingStartEvent)
        if event.anchor:
            self._anchors[event.anchor] = None
        self._stack.append(_Frame(Node({} if is_mapping else [], where), event.anchor, is_mapping))

    def _take_alias(self, anchor: str, where: str) -> None:
        if anchor not in self._anchors:
            self._stop("MZ002", where, f"alias *{anchor} has no anchor &{anchor} before it")
        node = self._anchors[anchor]
        if node is None:
            self._stop("MZ012", where, f"alias *{anchor} contains itself")
        self._add(replace(node, where=where), None, raw=node.value if isinstance(node.value, str) else None)

    def _add(self, node: Node, anchor: str | None, raw: str | None = None) -> None:
        """Put a complete node where it belongs: top level, list item, key or value."""
        self._nodes += 1 if node.size == 1 else 0
        if anchor:
            self._anchors[anchor] = node
        if not self._stack:
            self.root = node
            return
        frame = self._stack[-1]
        frame.size += node.size
        if max(frame.size, self._nodes) > MAX_NODES:
            self._stop("MZ012", node.where, f"more than {MAX_NODES} values, aliases counted each time")
        if not frame.is_mapping:
            frame.node.value.append(node)
        elif not frame.keyed:
            self._take_key(frame, node, raw)
        else:
            frame.keyed = False
            if frame.key is not None:
                frame.node.value[frame.key] = replace(node, where=frame.key_where)

    def _take_key(self, frame: _Frame, node: Node, raw: str | None) -> None:
        frame.keyed, frame.key, frame.key_where = True, raw, node.where
        if raw is None:
            self._report("MZ002", node.where, f"a key is {kind_of(node.value)}; expected a name")
        elif raw == "<<":
            self._report("MZ011", node.where, "merge keys (<<) are not supported; use include: [file]")
            frame.key = None
        elif raw in frame.seen:
            first = frame.seen[raw]
            self._report("MZ003", node.where, f"key {show(raw)} is already set at {first}; keep one of them")
        else:
            frame.seen[raw] = node.where

    def _refuse_tag(self, tag: str | None, where: str) -> None:
        if tag is not None:
            name = tag.replace("tag:yaml.org,2002:", "!!")
            self._report("MZ011", where, f"tag {show(name)} is not allowed; a config holds plain values only")

    def _place(self, mark: yaml.Mark) -> str:
        return f"{self._label}:{mark.line + 1}" if self._lines else self._label

    def _report(self, rule: str, where: str, message: str) -> None:
        self.findings.append(Finding(rule, "error", "", where, message))

    def _stop(self, rule: str, where: str, message: str) -> None:
        self._report(rule, where, message)
        raise _Stop
