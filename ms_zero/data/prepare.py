"""From text files to a ``.bin``/``.idx`` pair, with several processes.

The input is cut into units that do not depend on the number of processes, and units are written in order: so
neither do the bytes of the output. Text travels by file name and range, ids by pipe; at most a few units for
each process are in memory.
"""

import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ms_zero.data.corpus import find_files, read_text
from ms_zero.data.indexed import IndexedWriter, strip_suffix
from ms_zero.data.jsonl import lines_of
from ms_zero.data.tokenizer import Tokenizer, token_dtype
from ms_zero.errors import UserError

JSONL_SUFFIXES = (".jsonl", ".ndjson")
_UNIT_BYTES = 1 << 22
_AHEAD = 2  # units that each process has been given and not yet returned


@dataclass(frozen=True)
class Unit:
    """A part of the input that is encoded at once: a text file, or whole lines of a JSON-lines file.

    Attributes:
        path: the file.
        start: first byte.
        stop: byte after the last.
        field: field of the text in JSON lines; None for a text file.
    """

    path: Path
    start: int
    stop: int
    field: str | None


@dataclass(frozen=True)
class Encoded:
    """The documents of a unit: ids one after the other, and int64 lengths, ends of text included."""

    tokens: np.ndarray
    lengths: np.ndarray
    empty: int


@dataclass(frozen=True)
class Written:
    """What was written, and how many empty documents were left out."""

    documents: int
    tokens: int
    empty: int
    dtype: str


def is_jsonl(path: Path) -> bool:
    """Whether the name of a file says that it holds JSON lines."""
    return path.suffix.lower() in JSONL_SUFFIXES


def tokenize_files(
    inputs: Sequence[str],
    output: str | Path,
    tokenizer: Tokenizer,
    *,
    workers: int,
    field: str,
    overwrite: bool = False,
    on_progress: Callable[[int, int, int], None] = lambda done, total, tokens: None,
) -> Written:
    """Encode files to ``output.bin`` and ``output.idx``, which appear when they are complete.

    Args:
        inputs: paths and globs; ``*.jsonl`` and ``*.ndjson`` hold a document on each line, others are one.
        output: prefix of the pair.
        tokenizer: makes the ids; each document ends with its end-of-text id.
        workers: number of processes that encode.
        field: field of the text in JSON lines.
        overwrite: replace an existing pair.
        on_progress: called with bytes of input done, bytes in all, and ids so far.

    Raises:
        UserError: an input is unusable or has no text, or the output exists or cannot be written.
    """
    output = _checked_prefix(output)
    if not overwrite:
        _refuse_existing(output)
    units = plan_units(list(find_files(inputs).names), field)
    total, done, documents, empty = sum(unit.stop - unit.start for unit in units), 0, 0, 0
    dtype = token_dtype(tokenizer.vocab_size)
    with IndexedWriter(output, dtype) as writer, closing(_encode(units, tokenizer, workers)) as results:
        for unit, encoded in zip(units, results, strict=True):
            writer.add(encoded.tokens, encoded.lengths)
            done += unit.stop - unit.start
            documents, empty = documents + encoded.lengths.size, empty + encoded.empty
            on_progress(done, total, writer.num_tokens)
        if not documents:
            raise UserError(f"no text in {len(units)} inputs: nothing to write to {output}.bin")
    return Written(documents, writer.num_tokens, empty, dtype.name)


def plan_units(paths: Sequence[Path], field: str) -> list[Unit]:
    """Cut the input at ends of lines, about every four megabytes."""
    units = []
    for path in paths:
        try:
            size = path.stat().st_size
            if not is_jsonl(path):
                units.append(Unit(path, 0, size, None))
                continue
            with path.open("rb") as file:
                borders = list(_line_borders(file, size))
        except OSError as error:
            raise UserError(f"data file {path} cannot be read: {error.strerror}") from error
        units += [Unit(path, start, stop, field) for start, stop in pairwise(borders)]
    return units


def encode_unit(unit: Unit, tokenizer: Tokenizer) -> Encoded:
    """Encode the documents of a unit.

    Raises:
        UserError: the text is unusable; names file and line.
    """
    try:
        return _encode_texts(_texts(unit, 1), tokenizer)
    except UserError:
        if not unit.start:
            raise
    # Counting lines means reading the file from its start: only done to name the one that is wrong.
    return _encode_texts(_texts(unit, _line_number(unit)), tokenizer)


def _encode_texts(texts: Iterator[tuple[str, str]], tokenizer: Tokenizer) -> Encoded:
    pieces, lengths, empty = [], [], 0
    end = np.array([tokenizer.eot_id], dtype=token_dtype(tokenizer.vocab_size))
    for place, text in texts:
        if not text:
            empty += 1
            continue
        try:
            ids = tokenizer.encode(text)
        except UserError as error:
            raise UserError(f"{place}: {error}") from error
        pieces += [ids, end]
        lengths.append(ids.size + 1)
    tokens = np.concatenate(pieces) if pieces else end[:0]
    return Encoded(tokens, np.array(lengths, dtype=np.int64), empty)


def _checked_prefix(output: str | Path) -> Path:
    prefix = strip_suffix(output)
    if prefix.name in ("", ".."):
        raise UserError(f"--output {str(output)!r} has no file name: expected a prefix, such as data/corpus")
    return prefix


def _refuse_existing(output: Path) -> None:
    for suffix in (".bin", ".idx"):
        path = output.with_name(output.name + suffix)
        try:
            exists = path.exists()
        except OSError as error:  # such as a name too long
            raise UserError(f"cannot write {path}: {error.strerror}") from error
        if exists:
            raise UserError(f"{path} exists already: choose another --output, or replace it with --overwrite")


def _line_borders(file: BinaryIO, size: int) -> Iterator[int]:
    position = 0
    while position < size:
        yield position
        file.seek(position + _UNIT_BYTES - 1)
        file.readline()
        position = min(file.tell(), size)
    yield size


def _texts(unit: Unit, first_line: int) -> Iterator[tuple[str, str]]:
    """(place, text) of each document."""
    if unit.field is None:
        yield str(unit.path), read_text(unit.path) if unit.stop else ""
        return
    try:
        with unit.path.open("rb") as file:
            file.seek(unit.start)
            for number, text in lines_of(file, str(unit.path), unit.field, first_line, unit.stop):
                yield f"{unit.path}:{number}", text
    except OSError as error:
        raise UserError(f"data file {unit.path} cannot be read: {error.strerror}") from error


def _line_number(unit: Unit) -> int:
    """Number of the first line of a unit."""
    number, left = 1, unit.start
    with unit.path.open("rb") as file:
        while left and (block := file.read(min(left, 1 << 20))):
            number += block.count(b"\n")
            left -= len(block)
    return number


def _encode(units: Sequence[Unit], tokenizer: Tokenizer, workers: int) -> Iterator[Encoded]:
    """What `encode_unit` gives for each unit, in order."""
    workers = min(workers, len(units))
    if workers <= 1:
        for unit in units:
            yield encode_unit(unit, tokenizer)
        return
    with ExitStack() as stack:
        team = [stack.enter_context(closing(_Worker(tokenizer))) for _ in range(workers)]
        for number in range(min(_AHEAD * workers, len(units))):
            team[number % workers].give(units[number])
        for number, unit in enumerate(units):
            worker = team[number % workers]
            yield worker.take(unit)
            if number + _AHEAD * workers < len(units):
                worker.give(units[number + _AHEAD * workers])


class _Worker:
    """A process that encodes the units that it is given, in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_serve, args=(theirs, tokenizer), daemon=True)
        self._process.start()
        theirs.close()

    def give(self, unit: Unit) -> None:
        """Add a unit to the worker's queue."""
        with suppress(BrokenPipeError):  # it is gone: `take` says so
            self._connection.send(unit)

    def take(self, unit: Unit) -> Encoded:
        """Wait for the result of the oldest unit that was given, which is `unit`."""
        try:
            result = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join()
            raise UserError(
                f"a worker ended with status {self._process.exitcode} while it encoded {unit.path}: it may "
                "have run out of memory; try fewer --workers"
            ) from error
        if isinstance(result, str):
            raise UserError(result)
        return result

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.terminate()
        self._process.join()


def _serve(connection: Connection, tokenizer: Tokenizer) -> None:
    """Encode units until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends this process
    with suppress(EOFError, ConnectionError):
        while True:
            unit = connection.recv()
            try:
                result: Encoded | str = encode_unit(unit, tokenizer)
            except UserError as error:
                result = str(error)
            connection.send(result)
