"""What a config must know of a tokenizer: how many ids it has, and which one ends a document.

A Hugging Face ``tokenizer.json`` is read as JSON here, without the package that can run it.
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ms_zero.errors import UserError

VOCAB_SIZES: Final = {"byte": 257}
"""Vocabulary of the tokenizers that need no file."""

_EOT_TOKENS = (
    "<|endoftext|>",
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "[EOS]",
    "<|eos|>",
    "<\N{FULLWIDTH VERTICAL LINE}end\N{LOWER ONE EIGHTH BLOCK}of\N{LOWER ONE EIGHTH BLOCK}sentence"
    "\N{FULLWIDTH VERTICAL LINE}>",
)
_MAX_BYTES = 256 << 20


@dataclass(frozen=True)
class TokenizerFile:
    """What a ``tokenizer.json`` says.

    Attributes:
        path: the file.
        vocab_size: the highest id, added tokens included, plus one.
        eot_token: the token that ends a document.
        eot_id: its id.
        sha256: of the file, in hexadecimal.
    """

    path: Path
    vocab_size: int
    eot_token: str
    eot_id: int
    sha256: str


def read_tokenizer_file(path: str | Path, eot_token: str | None = None) -> TokenizerFile:
    """Read a Hugging Face ``tokenizer.json``.

    Args:
        path: the file, relative to the working directory.
        eot_token: the token that ends a document; None finds one by its usual names.

    Raises:
        UserError: it cannot be read, is no tokenizer.json, or has no such token.
    """
    data = _read(path)
    vocabulary, added = _tokens(path, data)
    ids = vocabulary | added
    if not ids:
        raise UserError(f"{path} has no tokens: expected a tokenizer.json of Hugging Face tokenizers")
    if eot_token is None:
        eot_token = _find_eot(path, added or vocabulary)
    elif eot_token not in ids:
        raise UserError(f"{path} has no token {eot_token!r}: correct data.eot_token")
    return TokenizerFile(
        path=Path(path),
        vocab_size=max(ids.values()) + 1,
        eot_token=eot_token,
        eot_id=ids[eot_token],
        sha256=hashlib.sha256(data).hexdigest(),
    )


def _tokens(path: str | Path, data: bytes) -> tuple[dict[str, int], dict[str, int]]:
    """(tokens of the model, tokens added to it), each with its id."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON: {error}") from error
    try:
        vocabulary: Any = content["model"]["vocab"]
        if isinstance(vocabulary, list):  # Unigram: pairs of token and score, in the order of ids
            vocabulary = {token: number for number, (token, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        for token, number in (*vocabulary.items(), *added.items()):
            if type(token) is not str or type(number) is not int or not 0 <= number < 2**31 - 1:
                raise ValueError(f"token {token!r} has id {number!r}")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{path} is no tokenizer.json of Hugging Face tokenizers ({why}): save it with "
            "save_pretrained of a fast tokenizer"
        ) from error
    return vocabulary, added


def _find_eot(path: str | Path, tokens: dict[str, int]) -> str:
    """The one token with a usual name for the end of a text."""
    found = [token for token in _EOT_TOKENS if token in tokens]
    if len(found) == 1:
        return found[0]
    what = f"has {' and '.join(found)}" if found else "has no token with a usual name for it"
    raise UserError(
        f"{path}: which token ends a document? It {what}; name it with data.eot_token "
        "(--eot-token in 'ms-zero data tokenize')"
    )


def _read(path: str | Path) -> bytes:
    try:
        if not Path(path).is_file():
            raise UserError(f"{path} does not exist or is no file: expected a tokenizer.json")
        if Path(path).stat().st_size > _MAX_BYTES:
            raise UserError(f"{path} is larger than {_MAX_BYTES >> 20} MiB: is it a tokenizer.json?")
        return Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
