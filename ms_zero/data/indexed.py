"""Memory-mapped token files: the ``.bin``/``.idx`` pair of Megatron-LM, version 1.

The bin file holds token ids and nothing else. The idx file, little-endian, holds:

    ========================  =======================  =====================================================
    magic                     9 bytes                  ``MMIDIDX`` and two zero bytes
    version                   uint64                   1
    dtype code                uint8                    of the ids, see :data:`DTYPES`
    sequences                 uint64
    document borders          uint64                   documents + 1
    lengths                   int32[sequences]         ids in each sequence
    pointers                  int64[sequences]         byte in the bin file at which each sequence starts
    borders                   int64[borders]           document d is sequences ``borders[d]:borders[d + 1]``
    ========================  =======================  =====================================================

Nothing is loaded: ids, lengths, pointers and borders are read through memory maps where they are asked for.
"""

import glob
import hashlib
import os
import struct
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np

from ms_zero.errors import UserError

MAGIC: Final = b"MMIDIDX\x00\x00"
VERSION: Final = 1
DTYPES: Final = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
"""Code in the idx file -> type of an id. The two floating-point codes exist, but are no token ids."""

_HEADER = struct.Struct("<9sQBQQ")
_CHUNK = 1 << 20  # entries of the index that are looked at together
_BLOCK = 4096  # bytes of a block of the bin file that goes into the fingerprint
_BLOCKS = 256


@dataclass(frozen=True)
class Header:
    """The fixed start of an idx file, and where its tables are."""

    dtype: np.dtype
    sequences: int
    documents: int

    @property
    def lengths_at(self) -> int:
        """Byte at which the lengths start."""
        return _HEADER.size

    @property
    def pointers_at(self) -> int:
        """Byte at which the pointers start."""
        return self.lengths_at + 4 * self.sequences

    @property
    def borders_at(self) -> int:
        """Byte at which the document borders start."""
        return self.pointers_at + 8 * self.sequences

    @property
    def size(self) -> int:
        """Bytes of the whole idx file."""
        return self.borders_at + 8 * (self.documents + 1)


class IndexedTokens:
    """A ``.bin``/``.idx`` pair, checked and ready to be read.

    Attributes:
        prefix: path of the pair without ``.bin`` and ``.idx``.
        header: what the idx file states.
        tokens: every id of the bin file, 1-D, memory-mapped.
        digest: SHA-256 of the idx file, in hexadecimal.
    """

    def __init__(self, prefix: str | os.PathLike) -> None:
        """Open the pair at `prefix` (also ``prefix.bin`` or ``prefix.idx``) and check one against the other.

        The whole index is read once; of the bin file only the size is looked at.

        Raises:
            UserError: a file is missing, damaged, truncated, or the two do not belong together.
        """
        self.prefix = strip_suffix(prefix)
        self.header = read_header(_idx(self.prefix))
        self._lengths = self._table("<i4", self.header.lengths_at, self.header.sequences)
        self._pointers = self._table("<i8", self.header.pointers_at, self.header.sequences)
        self._borders = self._table("<i8", self.header.borders_at, self.header.documents + 1)
        total = self._check_index()
        self._check_size(total)
        self.tokens = _map(_bin(self.prefix), self.header.dtype, 0, total)
        self._end = total
        self.digest = _sha256(_idx(self.prefix))

    def __len__(self) -> int:
        """Number of documents."""
        return self.header.documents

    def start_of(self, document: int) -> int:
        """Number of the first id of a document; ``start_of(len(self))`` is the number of ids."""
        sequence = int(self._borders[document])
        if sequence == self.header.sequences:
            return self._end
        return int(self._pointers[sequence]) // self.header.dtype.itemsize

    def starts(self, first: int, stop: int) -> np.ndarray:
        """``start_of`` of the documents ``first .. stop - 1``, int64."""
        sequences = self._borders[first:stop]
        inside = sequences < self.header.sequences
        starts = np.full(sequences.size, self._end, dtype=np.int64)
        starts[inside] = self._pointers[sequences[inside]] // self.header.dtype.itemsize
        return starts

    def document(self, document: int) -> np.ndarray:
        """Ids of one document, memory-mapped."""
        return self.tokens[self.start_of(document) : self.start_of(document + 1)]

    def document_of(self, position: int) -> int:
        """The document that holds id number `position`."""
        return bisect_right(range(len(self) + 1), position, key=self.start_of) - 1

    def fingerprint(self) -> str:
        """SHA-256 of the idx file and of 256 blocks of 4 KiB spread evenly over the bin file, in hexadecimal.

        It costs a megabyte of reading however large the bin file is. A replaced file shows, because its sizes
        or its blocks differ; a change of single ids between the blocks does not.
        """
        digest = hashlib.sha256(f"ms_zero indexed 1 {self.header.dtype.str} {self.digest}".encode())
        data = self.tokens.view(np.uint8)
        for start in np.unique(np.linspace(0, max(0, data.size - _BLOCK), _BLOCKS).astype(np.int64)):
            digest.update(data[start : start + _BLOCK].tobytes())
        return digest.hexdigest()

    def _table(self, dtype: str, offset: int, count: int) -> np.ndarray:
        return _map(_idx(self.prefix), np.dtype(dtype), offset, count)

    def _check_index(self) -> int:
        """The number of ids that the index describes, if its tables fit together."""
        idx, itemsize, total = _idx(self.prefix), self.header.dtype.itemsize, 0
        for start in range(0, self.header.sequences, _CHUNK):
            lengths = self._lengths[start : start + _CHUNK].astype(np.int64)
            if lengths.min() < 0:
                at = start + int(np.argmax(lengths < 0))
                length = self._lengths[at]
                raise UserError(f"{idx} is damaged: sequence {at} has length {length}; make it again")
            ends = total + np.cumsum(lengths)
            wrong = self._pointers[start : start + _CHUNK] != (ends - lengths) * itemsize
            if wrong.any():
                at = start + int(np.argmax(wrong))
                raise UserError(
                    f"{idx} is damaged: sequence {at} starts at byte {self._pointers[at]}, expected "
                    f"{(ends - lengths)[at - start] * itemsize}, where the one before it ends; make it again"
                )
            total = int(ends[-1])
        borders, last = self._borders, 0
        for start in range(0, borders.size, _CHUNK):
            chunk = borders[start : start + _CHUNK]
            if chunk[0] < last or (np.diff(chunk) < 0).any():
                raise UserError(f"{idx} is damaged: its document borders are not in order; make it again")
            last = int(chunk[-1])
        if borders[0] != 0 or last != self.header.sequences:
            raise UserError(
                f"{idx} is damaged: documents cover sequences {borders[0]} to {last}, expected 0 to "
                f"{self.header.sequences}; make it again"
            )
        return total

    def _check_size(self, total: int) -> None:
        path, dtype = _bin(self.prefix), self.header.dtype
        size, expected = _size(path), total * dtype.itemsize
        if size == expected:
            return
        fitting = [other.name for other in DTYPES.values() if total and size == total * other.itemsize]
        if fitting:
            why = f"{' or '.join(fitting)} would fit, so the dtype is wrong or the idx is of another bin"
        elif size < expected:
            why = "it is truncated, or the idx is of another bin"
        else:
            why = "the idx is of another bin"
        raise UserError(
            f"{path} holds {size:,} bytes, but {_idx(self.prefix).name} describes {total:,} ids of "
            f"{dtype.name}, {expected:,} bytes: {why}; copy or make both files again"
        )


class IndexedWriter:
    """Writes a ``.bin``/``.idx`` pair that appears under its name only when it is complete.

    Use as a context manager: leaving it normally publishes the pair, an exception leaves nothing behind.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype) -> None:
        """Write documents of ids of `dtype` to `prefix`; an existing pair is replaced at the end.

        Raises:
            UserError: the folder is missing or cannot be written to.
        """
        self.prefix = strip_suffix(prefix)
        self._dtype = np.dtype(dtype).newbyteorder("<")
        self._code = next((code for code, known in DTYPES.items() if known == self._dtype), None)
        assert self._code is not None, f"no index code for {dtype}"
        self._parts = [self._part(path) for path in (_bin(self.prefix), _idx(self.prefix))]
        self._remove_orphans()
        try:
            self._bin = self._parts[0].open("wb")
        except OSError as error:
            raise self._failed(error) from error
        self._lengths: list[np.ndarray] = []
        self.num_tokens = 0

    def add(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents, one after the other in `tokens`, with so many ids each."""
        assert tokens.dtype == self._dtype and tokens.size == lengths.sum(), "lengths do not fit the ids"
        if lengths.size and lengths.max() > np.iinfo(np.int32).max:
            raise UserError(f"a document has {lengths.max():,} ids, the format holds 2^31 - 1: split it")
        try:
            self._bin.write(tokens.tobytes())
        except OSError as error:
            raise self._failed(error) from error
        self._lengths.append(lengths.astype("<i4"))
        self.num_tokens += tokens.size

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._publish()
        except OSError as failure:
            raise self._failed(failure) from failure
        finally:
            with suppress(OSError):
                self._bin.close()
            for part in self._parts:
                part.unlink(missing_ok=True)

    def _failed(self, error: OSError) -> UserError:
        return UserError(f"cannot write {_bin(self.prefix)} and .idx: {error.strerror}")

    def _publish(self) -> None:
        self._bin.flush()
        os.fsync(self._bin.fileno())
        self._bin.close()
        with self._parts[1].open("wb") as file:
            self._write_index(file)
            file.flush()
            os.fsync(file.fileno())
        # A pair counts only with its idx file, so that one goes first and comes last.
        _idx(self.prefix).unlink(missing_ok=True)
        self._parts[0].replace(_bin(self.prefix))
        self._parts[1].replace(_idx(self.prefix))

    def _write_index(self, file: "os.IOBase") -> None:
        lengths = np.concatenate(self._lengths) if self._lengths else np.empty(0, "<i4")
        count, itemsize = lengths.size, self._dtype.itemsize
        file.write(_HEADER.pack(MAGIC, VERSION, self._code, count, count + 1))
        file.write(lengths.tobytes())
        pointers = (np.cumsum(lengths, dtype=np.int64) - lengths) * itemsize
        file.write(pointers.astype("<i8").tobytes())
        file.write(np.arange(count + 1, dtype="<i8").tobytes())

    def _remove_orphans(self) -> None:
        """Delete what writers of this pair left that were killed: they cannot clean up themselves."""
        for path in (_bin(self.prefix), _idx(self.prefix)):
            with suppress(OSError):
                for part in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
                    pid = part.name.removeprefix(f".{path.name}.").removesuffix(".part")
                    if pid.isdecimal() and not _is_alive(int(pid)):
                        part.unlink(missing_ok=True)

    @staticmethod
    def _part(path: Path) -> Path:
        return path.with_name(f".{path.name}.{os.getpid()}.part")


def read_header(path: Path) -> Header:
    """The header of an idx file, if it is one and has the size that it states.

    Raises:
        UserError: it cannot be read, is no idx file, is of another version or truncated.
    """
    size = _size(path)
    try:
        with path.open("rb") as file:
            data = file.read(_HEADER.size)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if data[: len(MAGIC)] != MAGIC[: len(data)] or not data:
        raise UserError(f"{path} is no index of token files: it starts with {data[:9]!r}, expected {MAGIC!r}")
    if len(data) < _HEADER.size:
        raise UserError(f"{path} is truncated: {size} bytes, the header has {_HEADER.size}; copy it again")
    _, version, code, sequences, borders = _HEADER.unpack(data)
    if version != VERSION:
        raise UserError(f"{path} has index version {version}: expected {VERSION}; make it again")
    if code not in DTYPES:
        raise UserError(f"{path} has dtype code {code}: expected 1 to {len(DTYPES)}; make it again")
    if borders < 1:
        raise UserError(f"{path} has no document borders: expected at least 1; make it again")
    header = Header(DTYPES[code], sequences, borders - 1)
    if sequences and size == header.size + sequences:
        raise UserError(f"{path} has a modality for each sequence: only token files are supported")
    if size != header.size:
        what = "is truncated" if size < header.size else "has bytes after its end"
        raise UserError(f"{path} {what}: {size:,} bytes, its header means {header.size:,}; copy it again")
    return header


def strip_suffix(prefix: str | os.PathLike) -> Path:
    """The path of a pair without ``.bin`` or ``.idx``."""
    path = Path(prefix)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def chunks(tokens: np.ndarray, size: int = 1 << 22) -> Iterator[tuple[int, np.ndarray]]:
    """(start, piece) of a long array, piece by piece."""
    for start in range(0, tokens.size, size):
        yield start, tokens[start : start + size]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user; no process number
        return True
    return True


def _bin(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".bin")


def _idx(prefix: Path) -> Path:
    return prefix.with_name(prefix.name + ".idx")


def _size(path: Path) -> int:
    try:
        if not path.is_file():
            raise UserError(f"{path} does not exist or is no file: a data set is PREFIX.bin and PREFIX.idx")
        return path.stat().st_size
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _map(path: Path, dtype: np.dtype, offset: int, count: int) -> np.ndarray:
    if not count:
        return np.empty(0, dtype)
    try:
        return np.asarray(np.memmap(path, dtype, "r", offset, (count,)))  # a plain array is quicker to index
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
