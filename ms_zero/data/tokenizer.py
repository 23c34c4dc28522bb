"""Tokenizers: text to token ids and back."""

from functools import cached_property
from typing import Any, Protocol

import numpy as np

from ms_zero.config.tokenizers import TokenizerFile, read_tokenizer_file
from ms_zero.errors import UserError

_INSTALL = "pip install 'ms_zero[tokenizers]'"


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


class HuggingFaceTokenizer:
    """A ``tokenizer.json``, run by the optional package ``tokenizers``.

    Text that looks like a special token stays text; nothing is cut or padded. The package is imported when
    something is encoded or decoded for the first time.
    """

    def __init__(self, file: TokenizerFile) -> None:
        self._file = file
        self.name = f"tokenizer.json {file.sha256} {file.eot_token}"
        self.vocab_size = file.vocab_size
        self.eot_id = file.eot_id

    def encode(self, text: str) -> np.ndarray:
        """Ids of `text`, without those that a template would add.

        Raises:
            UserError: the package is not installed, or the text encodes to the end-of-text id.
        """
        ids = np.array(self._encoder.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        if ids.size and ids.max() >= self.vocab_size:
            highest = self.vocab_size - 1
            raise UserError(f"{self._file.path} encodes to id {ids.max()}, its highest is {highest}")
        if (ids == self.eot_id).any():
            raise UserError(
                f"a text encodes to {self._file.eot_token!r}, the token that ends a document, with "
                f"{self._file.path}: take the token out of the text, or name another with data.eot_token"
            )
        return ids.astype(token_dtype(self.vocab_size))

    def decode(self, ids: np.ndarray) -> str:
        """The text of `ids`; end-of-text ids add nothing."""
        ids = np.asarray(ids)
        return self._encoder.decode(ids[ids != self.eot_id].tolist(), skip_special_tokens=False)

    def __getstate__(self) -> dict[str, Any]:
        """What another process needs to make the same tokenizer."""
        return {key: value for key, value in vars(self).items() if key != "_encoder"}

    @cached_property
    def _encoder(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise UserError(f"{self._file.path} needs the package tokenizers: {_INSTALL}") from error
        try:
            encoder = Tokenizer.from_file(str(self._file.path))
        except Exception as error:  # the package raises a bare Exception for whatever it cannot read
            raise UserError(f"{self._file.path} is refused by the package tokenizers: {error}") from error
        encoder.no_truncation()
        encoder.no_padding()
        encoder.encode_special_tokens = True
        return encoder


def get_tokenizer(name: str, file: str | None = None, eot_token: str | None = None) -> Tokenizer | None:
    """The tokenizer that a config means; None for ``none``.

    Args:
        name: ``byte``, ``file`` or ``none``.
        file: for ``file``, the path of a ``tokenizer.json``.
        eot_token: for ``file``, the token that ends a document; None finds one by its usual names.

    Raises:
        UserError: there is no such tokenizer, or the file cannot be used.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "file" and file is not None:
        return HuggingFaceTokenizer(read_tokenizer_file(file, eot_token))
    if name == "none":
        return None
    raise UserError(f"data.tokenizer={name!r}: expected byte, none, or file and data.tokenizer_file")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype among uint8, uint16 and int32 that holds every id below `vocab_size`."""
    if vocab_size <= 1 << 8:
        return np.dtype(np.uint8)
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.int32)
