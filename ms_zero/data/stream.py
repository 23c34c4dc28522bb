"""Documents as one long line of token ids: in memory, or read from a memory-mapped file where asked."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from ms_zero.data.indexed import IndexedTokens
from ms_zero.errors import UserError


class Stream(Protocol):
    """What packing asks of a stream of documents."""

    @property
    def size(self) -> int:
        """Number of ids."""
        ...

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        ...

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids ``start .. stop - 1``, 1-D integers."""
        ...

    def last_positions(self, start: int, stop: int) -> np.ndarray:
        """Positions in ``start .. stop - 1`` that hold the last id of a document, int64, ascending."""
        ...

    def describe(self, position: int) -> str:
        """Where a position comes from, for messages: the file and document."""
        ...


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Documents as one flat array.

    Attributes:
        tokens: ids of all documents one after the other, 1-D integers; each document ends with its
            end-of-text id.
        offsets: int64[documents + 1]; document d is ``tokens[offsets[d]:offsets[d + 1]]``.
    """

    tokens: np.ndarray
    offsets: np.ndarray

    @property
    def size(self) -> int:
        """Number of ids."""
        return self.tokens.size

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self.offsets.size - 1

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids ``start .. stop - 1``."""
        return self.tokens[start:stop]

    def last_positions(self, start: int, stop: int) -> np.ndarray:
        """Positions in ``start .. stop - 1`` that hold the last id of a document."""
        first, after = np.searchsorted(self.offsets, [start + 1, stop + 1])
        return self.offsets[first:after] - 1

    def describe(self, position: int) -> str:
        """The document of a position."""
        return f"document {int(np.searchsorted(self.offsets, position, side='right')) - 1}"


class IndexedStream:
    """Some documents of a ``.bin``/``.idx`` pair, in order; nothing is loaded.

    Megatron-LM's tools end documents with an end-of-text id or not, as asked. Where the file has none,
    `eot_id` puts one after each document while reading; positions count it.
    """

    def __init__(self, indexed: IndexedTokens, first: int, stop: int, eot_id: int | None) -> None:
        """Read documents ``first .. stop - 1``.

        Args:
            indexed: the pair.
            first: the first document.
            stop: the document after the last.
            eot_id: what to put after each document; None when they already end as they should.
        """
        assert 0 <= first < stop <= len(indexed), f"documents {first} to {stop} of {len(indexed)}"
        self.indexed, self.first, self.stop, self._eot_id = indexed, first, stop, eot_id

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self.stop - self.first

    @cached_property
    def size(self) -> int:
        """Number of ids."""
        return self._start_of(self.num_documents)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Ids ``start .. stop - 1``; ``start < stop``."""
        assert 0 <= start < stop <= self.size, f"ids {start} to {stop} of {self.size}"
        if self._eot_id is None:
            origin = self.indexed.start_of(self.first)
            return self.indexed.tokens[origin + start : origin + stop]
        pieces, position, document = [], start, self._document_of(start)
        while position < stop:
            begin, end = self._start_of(document), self._start_of(document + 1)
            inside = self.indexed.document(self.first + document)[position - begin : stop - begin]
            pieces.append(inside.astype(np.int64))
            if end <= stop:
                pieces.append(np.array([self._eot_id], dtype=np.int64))
            position, document = end, document + 1
        return np.concatenate(pieces)

    def last_positions(self, start: int, stop: int) -> np.ndarray:
        """Positions in ``start .. stop - 1`` that hold the last id of a document."""
        documents = range(self.num_documents + 1)
        first = bisect_left(documents, start + 1, key=self._start_of)
        after = bisect_left(documents, stop + 1, lo=first, key=self._start_of)
        starts = self.indexed.starts(self.first + first, self.first + after)
        return starts - self.indexed.start_of(self.first) - 1 + self._added(np.arange(first, after))

    def describe(self, position: int) -> str:
        """The file, document and place in it of a position."""
        document = self._document_of(position)
        place = position - self._start_of(document)
        return f"{self.indexed.prefix}.bin, document {self.first + document}, id {place}"

    def _start_of(self, document: int) -> int:
        origin = self.indexed.start_of(self.first)
        return self.indexed.start_of(self.first + document) - origin + self._added(document)

    def _added(self, documents: int | np.ndarray) -> int | np.ndarray:
        """How many end-of-text ids are put in before a document."""
        return 0 if self._eot_id is None else documents

    def _document_of(self, position: int) -> int:
        return bisect_right(range(self.num_documents + 1), position, key=self._start_of) - 1


def ends_with_eot(indexed: IndexedTokens, eot_id: int, samples: int = 256) -> bool:
    """Whether the documents of a pair end with `eot_id`: decided on up to `samples` of them, evenly spread.

    Raises:
        UserError: some of them do and some do not, so that neither reading would be right.
    """
    found: dict[bool, int] = {}
    count = min(samples, len(indexed))
    for document in np.linspace(0, max(0, len(indexed) - 1), count).astype(np.int64).tolist():
        ids = indexed.document(document)
        if ids.size:
            found.setdefault(bool(ids[-1] == eot_id), document)
    if len(found) == 2:
        raise UserError(
            f"{indexed.prefix}.bin: document {found[True]} ends with the end-of-text id {eot_id}, document "
            f"{found[False]} does not; expected all or none: tokenize it again, or read it as it is with "
            "data.tokenizer=none"
        )
    return found == {} or True in found
