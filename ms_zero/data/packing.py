"""Token streams, and their packing into samples of fixed length."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ms_zero.data.corpus import Document
from ms_zero.data.tokenizer import Tokenizer, token_dtype

IGNORED_LABEL = -100
"""Label of a position that does not count in the loss."""


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
    """One packed sequence: ``input_ids`` int32[T] and ``labels`` int32[T], the token that follows each input.

    A label is :data:`IGNORED_LABEL` where no token of the same document follows.
    """

    input_ids: np.ndarray
    labels: np.ndarray


class PackedDataset:
    """Samples of `seq_len` positions cut from a token stream, none padded but the last.

    Sample i reads the ``seq_len + 1`` tokens from ``i * seq_len``: neighbours share one token, so every token
    but the first is the label of exactly one position. Labels that would cross into the next document are
    ignored, hence samples differ in their number of valid tokens.

    Args:
        stream: at least one document.
        seq_len: positions per sample, T.
    """

    def __init__(self, stream: TokenStream, seq_len: int) -> None:
        assert seq_len >= 1, f"seq_len {seq_len}"
        assert stream.tokens.size >= 2, "a dataset needs a document with text"
        self.stream = stream
        self.seq_len = seq_len

    def __len__(self) -> int:
        return -(-(self.stream.tokens.size - 1) // self.seq_len)

    def sample(self, index: int) -> Sample:
        """Sample `index`, ``0 <= index < len(self)``; the last repeats its final token without labels."""
        assert 0 <= index < len(self), f"sample {index} of {len(self)}"
        start = index * self.seq_len
        window = self.stream.tokens[start : start + self.seq_len + 1].astype(np.int32)
        valid = window.size - 1
        input_ids = np.full(self.seq_len, window[-1], dtype=np.int32)
        labels = np.full(self.seq_len, IGNORED_LABEL, dtype=np.int32)
        input_ids[:valid] = window[:-1]
        labels[:valid] = window[1:]
        labels[self._last_positions(start, start + valid) - start] = IGNORED_LABEL
        return Sample(input_ids, labels)

    def _last_positions(self, start: int, stop: int) -> np.ndarray:
        """Positions of the stream in ``start .. stop`` that hold the last token of a document."""
        first, after = np.searchsorted(self.stream.offsets, [start + 1, stop + 1])
        return self.stream.offsets[first:after] - 1


def unigram_entropy(tokens: np.ndarray) -> float:
    """Entropy of the distribution of single tokens, in nats.

    It is the lowest loss of a model that ignores context: a trained model must be clearly below it.
    """
    assert tokens.size, "entropy of no tokens"
    chunk = 1 << 20  # bincount works on an int64 copy of its input
    size = int(tokens.max()) + 1
    counts = np.zeros(size, dtype=np.int64)
    for start in range(0, tokens.size, chunk):
        counts += np.bincount(tokens[start : start + chunk], minlength=size)
    probability = counts[counts > 0] / tokens.size
    return float(-(probability * np.log(probability)).sum())
