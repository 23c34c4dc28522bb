"""Packing of token streams into samples of fixed length."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from ms_zero.data.corpus import Document
from ms_zero.data.stream import Stream, TokenStream
from ms_zero.data.tokenizer import Tokenizer, token_dtype
from ms_zero.errors import UserError

IGNORED_LABEL = -100
"""Label of a position that does not count in the loss."""
_CHUNK = 1 << 20  # ids that are counted together: bincount works on an int64 copy


def tokenize(documents: Iterable[Document], tokenizer: Tokenizer) -> TokenStream:
    """Encode documents in order and end each with the end-of-text id."""
    pieces = [tokenizer.encode(document.text) for document in documents]
    offsets = np.zeros(len(pieces) + 1, dtype=np.int64)
    np.cumsum([piece.size + 1 for piece in pieces], out=offsets[1:])
    tokens = np.empty(int(offsets[-1]), dtype=token_dtype(tokenizer.vocab_size))
    for document, piece in enumerate(pieces):
        tokens[offsets[document] : offsets[document + 1] - 1] = piece
    tokens[offsets[1:] - 1] = tokenizer.eot_id
    return TokenStream(tokens, offsets)


class Sample(NamedTuple):
    """One packed sequence.

    Attributes:
        input_ids: int32[T].
        labels: int32[T], the token that follows each input; :data:`IGNORED_LABEL` where no token of the same
            document follows.
        document_starts: int32[T], for each position where in the sequence its document begins (0 for one that
            began in an earlier sample); None when the data has no documents.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    document_starts: np.ndarray | None = None


class PackedDataset:
    """Samples of `seq_len` positions cut from a token stream, none padded but the last.

    Sample i reads the ``seq_len + 1`` tokens from ``i * seq_len``: neighbours share one token, so every token
    but the first is the label of exactly one position. Labels that would cross into the next document are
    ignored, hence samples differ in their number of valid tokens.

    Args:
        stream: at least one document.
        seq_len: positions per sample, T.
        vocab_size: ids must be below it; None when the stream is known to keep to its vocabulary.
    """

    def __init__(self, stream: Stream, seq_len: int, vocab_size: int | None = None) -> None:
        assert seq_len >= 1, f"seq_len {seq_len}"
        assert stream.size >= 2, "a dataset needs a document with text"
        self.stream = stream
        self.seq_len = seq_len
        self._vocab_size = vocab_size

    def __len__(self) -> int:
        return -(-(self.stream.size - 1) // self.seq_len)

    def sample(self, index: int) -> Sample:
        """Sample `index`, ``0 <= index < len(self)``; the last repeats its final token without labels.

        Raises:
            UserError: an id is beyond the vocabulary.
        """
        assert 0 <= index < len(self), f"sample {index} of {len(self)}"
        start = index * self.seq_len
        window = self.stream.read(start, min(start + self.seq_len + 1, self.stream.size))
        self._check_vocabulary(window, start)
        window = window.astype(np.int32)
        valid = window.size - 1
        input_ids = np.full(self.seq_len, window[-1], dtype=np.int32)
        labels = np.full(self.seq_len, IGNORED_LABEL, dtype=np.int32)
        input_ids[:valid] = window[:-1]
        labels[:valid] = window[1:]
        last_positions = self.stream.last_positions(start, start + valid) - start
        labels[last_positions] = IGNORED_LABEL
        return Sample(input_ids, labels, self._document_starts(last_positions + 1))

    def _document_starts(self, first_positions: np.ndarray) -> np.ndarray:
        starts = np.zeros(self.seq_len, dtype=np.int32)
        inside = first_positions[first_positions < self.seq_len]
        starts[inside] = inside
        return np.maximum.accumulate(starts)

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return self.stream.num_documents

    @property
    def num_tokens(self) -> int:
        """Number of ids, ends of text included."""
        return self.stream.size

    def token_counts(self, limit: int) -> np.ndarray:
        """How often each id occurs among the first `limit` ids, int64[highest id + 1]."""
        counts = np.zeros(1, dtype=np.int64)
        end = min(limit, self.num_tokens)
        for start in range(0, end, _CHUNK):
            window = self.stream.read(start, min(start + _CHUNK, end))
            self._check_vocabulary(window, start)
            counts = add_counts(counts, np.bincount(window))
        return counts

    def _check_vocabulary(self, window: np.ndarray, start: int) -> None:
        """Refuse ids that would read outside the embedding; costs two passes over a sample."""
        if self._vocab_size is None or (window.min() >= 0 and window.max() < self._vocab_size):
            return
        at = int(np.argmax((window < 0) | (window >= self._vocab_size)))
        raise UserError(
            f"token id {window[at]} is beyond model.vocab_size {self._vocab_size}: sample "
            f"{start // self.seq_len}, {self.stream.describe(start + at)}; use the tokenizer that the data "
            "was made with, or see 'ms-zero data lint'"
        )


class JoinedDataset:
    """Datasets one after the other; each keeps its own last, padded sample."""

    def __init__(self, datasets: Sequence[PackedDataset]) -> None:
        """Join at least one dataset; all have the same sample length."""
        assert len({dataset.seq_len for dataset in datasets}) == 1, "datasets of one sample length"
        self.datasets = tuple(datasets)
        self.seq_len = datasets[0].seq_len
        self._ends = list(accumulate(len(dataset) for dataset in datasets))

    def __len__(self) -> int:
        return self._ends[-1]

    def sample(self, index: int) -> Sample:
        """Sample `index`, ``0 <= index < len(self)``."""
        assert 0 <= index < len(self), f"sample {index} of {len(self)}"
        number = bisect_right(self._ends, index)
        return self.datasets[number].sample(index - self._ends[number] + len(self.datasets[number]))

    @property
    def num_documents(self) -> int:
        """Number of documents."""
        return sum(dataset.num_documents for dataset in self.datasets)

    @property
    def num_tokens(self) -> int:
        """Number of ids, ends of text included."""
        return sum(dataset.num_tokens for dataset in self.datasets)

    def token_counts(self, limit: int) -> np.ndarray:
        """How often each id occurs, int64[highest id + 1]; each dataset gives its share of `limit` ids."""
        counts = np.zeros(1, dtype=np.int64)
        for dataset in self.datasets:
            share = limit * dataset.num_tokens // max(limit, self.num_tokens)
            counts = add_counts(counts, dataset.token_counts(share))
        return counts


def add_counts(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Sum of two vectors of counts or weights; the shorter one goes on with zeros."""
    short, long = sorted((first, second), key=len)
    total = long.copy()
    total[: short.size] += short
    return total


def unigram_entropy(counts: np.ndarray) -> float:
    """Entropy of the distribution of single tokens, in nats.

    It is the lowest loss of a model that ignores context: a trained model must be clearly below it.

    Args:
        counts: how often each id occurs; only the ratios matter.
    """
    assert counts.sum() > 0, "entropy of no tokens"
    probability = counts[counts > 0] / counts.sum()
    return float(-(probability * np.log(probability)).sum())
