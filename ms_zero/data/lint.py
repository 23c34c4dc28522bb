"""Everything that is wrong with data, found by reading all of it: what a run would meet sooner or later."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from ms_zero.data.corpus import find_files, read_text
from ms_zero.data.indexed import IndexedTokens, chunks, strip_suffix
from ms_zero.data.jsonl import DEFAULT_FIELD, parse_line
from ms_zero.data.text import Source
from ms_zero.data.tokenizer import Tokenizer
from ms_zero.errors import UserError

MAX_LINES = 20  # bad lines of one file that are told one by one
_DOCUMENTS = 1 << 20  # documents that are looked at together


@dataclass(frozen=True)
class DataFinding:
    """Something wrong (error: a run would be refused or fail) or doubtful (warning) in the data."""

    severity: Literal["error", "warning"]
    message: str


def lint_source(
    source: Source, *, tokenizer: Tokenizer | None, vocab_size: int | None, base: Path | None = None
) -> Iterator[DataFinding]:
    """Findings of all files of a source; the standard library has none.

    Args:
        source: what to read.
        tokenizer: whose end-of-text id ends documents of token files; None when that is not known.
        vocab_size: ids of token files must be below it; None when that is not known.
        base: the folder that relative paths start from; default the working directory.
    """
    if source.kind == "stdlib":
        return
    indexed = source.kind == "megatron"
    patterns = [f"{strip_suffix(name)}.idx" for name in source.files] if indexed else source.files
    for pattern in patterns:
        try:
            paths = list(find_files([pattern], base).names)
        except UserError as error:
            yield DataFinding("error", str(error))
            continue
        for path in paths:
            if indexed:
                yield from lint_indexed(path, None if tokenizer is None else tokenizer.eot_id, vocab_size)
            elif source.kind == "jsonl":
                yield from lint_jsonl(path)
            else:
                yield from lint_text(path)


def lint_text(path: Path) -> Iterator[DataFinding]:
    """Whether a text file can be read and has text."""
    try:
        read_text(path)
    except UserError as error:
        yield DataFinding("error", str(error))


def lint_jsonl(path: Path, field: str = DEFAULT_FIELD) -> Iterator[DataFinding]:
    """Every line that is no JSON object with text, the first ones by number; and lines without text."""
    bad, blank, good = 0, [], 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    text = parse_line(line, f"{path}:{number}", field)
                except UserError as error:
                    bad += 1
                    if bad <= MAX_LINES:
                        yield DataFinding("error", str(error))
                    continue
                good += bool(text)
                if not text:
                    blank.append(number)
    except OSError as error:
        yield DataFinding("error", f"{path} cannot be read: {error.strerror}")
        return
    if bad > MAX_LINES:
        yield DataFinding("error", f"{path}: {bad - MAX_LINES:,} more bad lines")
    if blank:
        yield DataFinding("warning", f"{path}: {len(blank):,} lines without text, the first is {blank[0]}")
    if not good and not bad:
        yield DataFinding("error", f"{path}: no line has text")


def lint_indexed(path: Path, eot_id: int | None, vocab_size: int | None) -> Iterator[DataFinding]:
    """What is wrong with a ``.bin``/``.idx`` pair: its structure first; if that is sound, its ids."""
    try:
        indexed = IndexedTokens(path)
    except UserError as error:
        yield DataFinding("error", str(error))
        return
    name = f"{indexed.prefix}.bin"
    if indexed.header.dtype.kind == "f":
        dtype = indexed.header.dtype.name
        yield DataFinding("error", f"{name} holds numbers of {dtype}: token ids are integers")
        return
    if not indexed.tokens.size:
        yield DataFinding("error", f"{name} holds no ids")
        return
    yield from _lint_ids(indexed, name, vocab_size)
    yield from _lint_documents(indexed, name, eot_id)


def _lint_ids(indexed: IndexedTokens, name: str, vocab_size: int | None) -> Iterator[DataFinding]:
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    count, first = 0, -1
    for start, ids in chunks(indexed.tokens):
        wrong = (ids < 0) | (ids >= limit)
        found = int(np.count_nonzero(wrong))
        if found and not count:
            first = start + int(np.argmax(wrong))
        count += found
    if count:
        document = indexed.document_of(first)
        place = f"document {document}, id {first - indexed.start_of(document)}"
        what = "do not fit 31 bits" if vocab_size is None else f"are beyond the vocabulary of {vocab_size}"
        example = f"the first is {indexed.tokens[first]} in {place}"
        yield DataFinding("error", f"{name}: {count:,} ids {what}, {example}")


def _lint_documents(indexed: IndexedTokens, name: str, eot_id: int | None) -> Iterator[DataFinding]:
    """Empty documents, and documents that end otherwise than most."""
    empty, first_empty = 0, -1
    ended = {True: 0, False: 0}
    example = {True: -1, False: -1}
    for first in range(0, len(indexed), _DOCUMENTS):
        starts = indexed.starts(first, min(first + _DOCUMENTS, len(indexed)) + 1)
        lengths = np.diff(starts)
        (blank,) = np.nonzero(lengths == 0)
        if blank.size and not empty:
            first_empty = first + int(blank[0])
        empty += blank.size
        if eot_id is None:
            continue
        (filled,) = np.nonzero(lengths)
        ends = indexed.tokens[starts[filled + 1] - 1] == eot_id
        for kind in (True, False):
            (places,) = np.nonzero(ends == kind)
            if places.size and not ended[kind]:
                example[kind] = first + int(filled[places[0]])
            ended[kind] += places.size
    if empty:
        yield DataFinding("warning", f"{name}: {empty:,} empty documents, the first is {first_empty}")
    if ended[True] and ended[False]:
        yield DataFinding(
            "error",
            f"{name}: {ended[True]:,} documents end with the end-of-text id {eot_id} (as {example[True]}), "
            f"{ended[False]:,} do not (as {example[False]}): tokenize it again, or read it as it is with "
            "data.tokenizer=none",
        )
