"""JSON lines: one JSON object on each line, whose text field is a document."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from ms_zero.data.corpus import Corpus, Document, Omission, find_files
from ms_zero.errors import UserError

DEFAULT_FIELD = "text"
_MAX_SHOWN = 40


def jsonl_corpus(patterns: Sequence[str], base: Path | None = None) -> Corpus:
    """One document for each line of JSON-lines files, named ``file:line``; see `file_corpus` for the files.

    Raises:
        UserError: a file is missing or unreadable, a line is not what it should be, or there is no text.
    """
    files = find_files(patterns, base)
    documents: list[Document] = []
    omitted = list(files.omitted)
    for path, name in files.names.items():
        for found in read_jsonl(path, name):
            (documents if isinstance(found, Document) else omitted).append(found)
    if not documents:
        raise UserError(f"{files.describe('JSON-lines')}: no line has text")
    return Corpus(files.describe("JSON-lines"), tuple(documents), tuple(omitted))


def read_jsonl(path: Path, name: str, field: str = DEFAULT_FIELD) -> Iterator[Document | Omission]:
    """The documents of a file, one line at a time, named ``name:line``; lines without text are omissions.

    Raises:
        UserError: the file cannot be read, or a line is not what it should be; names file and line.
    """
    try:
        with path.open("rb") as file:
            for number, text in lines_of(file, str(path), field):
                place = f"{name}:{number}"
                yield Document(place, text) if text else Omission(place, "no text")
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror}") from error


def lines_of(
    file: BinaryIO, label: str, field: str, first: int = 1, stop: int | None = None
) -> Iterator[tuple[int, str]]:
    """(line number, text) of each line from where `file` stands to byte `stop`; blank lines have no text."""
    number = first
    while stop is None or file.tell() < stop:
        line = file.readline()
        if not line:
            return
        yield number, parse_line(line, f"{label}:{number}", field)
        number += 1


def parse_line(line: bytes, where: str, field: str) -> str:
    """The text of one line; "" when it is blank.

    Raises:
        UserError: it is not UTF-8, no JSON object, or has no such field of text.
    """
    if not line.strip():
        return ""
    try:
        value = json.loads(line.rstrip().decode())
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise UserError(f"{where}: byte 0x{byte:02x} at column {error.start + 1} is not UTF-8") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: no JSON: {_reason(error)}; expected an object on each line") from error
    if not isinstance(value, dict):
        raise UserError(f"{where}: {_shown(value)} is no object; expected {{{json.dumps(field)}: ...}}")
    if field not in value:
        raise UserError(f"{where}: no field {field!r}; the object has {_names(value)}")
    text = value[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: field {field!r} is {_shown(text)}, expected text")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            message = f"{where}: field {field!r} holds half a surrogate pair at character {error.start}"
            raise UserError(message) from error
    return text


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at column {error.pos + 1}"
    return "nested too deeply" if isinstance(error, RecursionError) else "a number with too many digits"


def _names(value: dict[str, Any]) -> str:
    names = [_shown(name) for name in list(value)[:5]]
    more = ", ..." if len(value) > 5 else ""
    return f"{', '.join(names)}{more}" if names else "none"


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."
