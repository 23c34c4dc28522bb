"""Tokenizers: text to token ids and back."""

from typing import Protocol

import numpy as np

from ms_zero.errors import UserError


class Tokenizer(Protocol):
    """What the data pipeline asks of a tokenizer.

    Attributes:
        name: identity that goes into fingerprints; two tokenizers that encode differently differ in it.
        vocab_size: number of ids; every id is below it.
        eot_id: the id that ends a document; `encode` never produces it.
    """

    name: str
    vocab_size: int
    eot_id: int

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text` without an end-of-text id, 1-D, of :func:`token_dtype`."""
        ...

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`; end-of-text ids add nothing."""
        ...


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    name = "byte"
    vocab_size = 257
    eot_id = 256

    def encode(self, text: str) -> np.ndarray:
        """UTF-8 bytes of `text`, uint16[number of bytes]."""
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        """Inverse of `encode`. Bytes that are no UTF-8, as a model may emit, become U+FFFD.

        Raises:
            UserError: an id is outside the vocabulary.
        """
        ids = np.asarray(ids)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise UserError(
                f"token ids from {ids.min()} to {ids.max()} do not fit the byte tokenizer: expected 0 to "
                f"{self.vocab_size - 1}"
            )
        return ids[ids != self.eot_id].astype(np.uint8).tobytes().decode(errors="replace")


_TOKENIZERS = {ByteTokenizer.name: ByteTokenizer}


def get_tokenizer(name: str) -> Tokenizer:
    """The tokenizer called `name`.

    Raises:
        UserError: there is none of that name.
    """
    if name not in _TOKENIZERS:
        raise UserError(f"data.tokenizer={name!r}: expected one of {', '.join(_TOKENIZERS)}")
    return _TOKENIZERS[name]()


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype among uint8, uint16 and int32 that holds every id below `vocab_size`."""
    if vocab_size <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)
