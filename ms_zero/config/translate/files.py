"""Reads other tools' files: JSON, YAML and command lines, strictly, every key with its place."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ms_zero.config.findings import ConfigError, Finding
from ms_zero.config.reader import Node, read_characters, read_text
from ms_zero.config.translate.result import Source
from ms_zero.errors import UserError, one_line

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_][A-Za-z0-9_]*)\}|([A-Za-z_][A-Za-z0-9_]*))")
_OPTION = re.compile(r"--?[A-Za-z][A-Za-z0-9_-]*")


def read_mapping(path: str | Path, workers: int | None = None) -> Source:
    """Read a JSON or YAML file whose top level is a mapping.

    Duplicate keys, several documents, tags and unbounded aliases are refused, with the line. Raises
    UserError.
    """
    label = str(path)
    text, findings = read_characters(Path(path), label)
    if text is None:
        raise ConfigError(findings)
    if Path(path).suffix == ".json":
        text = _checked_json(text, label)
    node, findings = read_text(text, label)
    if findings:
        raise ConfigError(findings)
    if node is None or not isinstance(node.value, dict):
        found = "empty" if node is None else "not a mapping of keys"
        raise ConfigError(
            [Finding("MZ002", "error", "", label, f"the file is {found}; is it the right one?")]
        )
    leaves, places = {}, {}
    for name, value, where in _leaves(node, ""):
        leaves[name], places[name] = value, where
    return Source(leaves, places, label, workers)


def read_arguments(path: str | Path, workers: int | None = None) -> Source:
    """Read a command line, or a shell script with one: every `--name value ...` of it.

    Variables that the script sets to a literal are filled in; `#` starts a comment and a backslash joins
    lines. Arguments before the first `--name` (the program) are passed over. Raises UserError.
    """
    label = str(path)
    text, findings = read_characters(Path(path), label)
    if text is None:
        raise ConfigError(findings)
    leaves: dict[str, Any] = {}
    places: dict[str, str] = {}
    variables: dict[str, str] = {}
    name, last_line = None, 0
    for line, word in _words(text, label):
        name, last_line = name if line == last_line else None, line
        assignment = _ASSIGNMENT.fullmatch(word)
        if _OPTION.fullmatch(word.partition("=")[0]) and word.startswith("--"):
            name, equals, value = word.partition("=")
            if name in leaves:
                message = f"{name} is already set at {places[name]}; keep one of them"
                raise UserError(f"{label}:{line}: {message}")
            leaves[name], places[name] = [_filled(value, variables)] if equals else [], f"{label}:{line}"
        elif assignment and name is None:
            variables[assignment[1]] = _filled(assignment[2], variables)
        elif word in ("(", ")") or word.endswith("=("):
            name = None
        elif name is not None:
            leaves[name].append(_filled(word, variables))
    if not leaves:
        raise UserError(f"{label}: no --arguments in this file; expected such as --num-layers 24")
    return Source(leaves, places, label, workers)


def _checked_json(text: str, label: str) -> str:
    """Refuse what is not JSON; return it as the YAML that it is as well."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{label}:{error.lineno}: not valid JSON: {one_line(error.msg)}") from None
    except (RecursionError, ValueError):
        raise UserError(
            f"{label}: not valid JSON: nested too deeply, or a number of too many digits"
        ) from None
    return text.replace("\t", " ")


def _leaves(node: Node, prefix: str) -> Iterator[tuple[str, Any, str]]:
    for name, child in node.value.items():
        path = f"{prefix}{name}"
        if isinstance(child.value, dict) and child.value:
            yield from _leaves(child, f"{path}.")
        else:
            yield path, _plain(child), child.where


def _plain(node: Node) -> Any:
    if isinstance(node.value, list):
        return [_plain(item) for item in node.value]
    if isinstance(node.value, dict):
        return {name: _plain(child) for name, child in node.value.items()}
    return node.value


def _words(text: str, label: str) -> Iterator[tuple[int, str]]:
    """Yield (line, word) of shell text; an array's parentheses become words of their own."""
    joined = text.replace("\\\r\n", "\\\n")
    lines = joined.split("\n")
    number = 0
    while number < len(lines):
        first, line = number + 1, lines[number]
        while line.endswith("\\") and number + 1 < len(lines):
            number += 1
            line = f"{line[:-1]} {lines[number]}"
        number += 1
        try:
            words = shlex.split(line.rstrip("\\"), comments=True)
        except ValueError as error:
            raise UserError(f"{label}:{first}: not a command line: {str(error).lower()}") from None
        for word in words:
            yield from ((first, part) for part in _parts(word))


def _parts(word: str) -> Iterator[str]:
    if word.endswith("=("):
        yield word
        return
    if word.startswith("(") and len(word) > 1:
        yield "("
        word = word[1:]
    closing = word.endswith(")") and "(" not in word and len(word) > 1
    yield word[:-1] if closing else word
    if closing:
        yield ")"


def _filled(word: str, variables: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0]), word)
