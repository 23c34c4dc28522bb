"""Identity of what a run reads: equal fingerprints mean equal tokens in equal order."""

import hashlib
from collections.abc import Mapping, Sequence

from ms_zero.data.corpus import Document
from ms_zero.data.tokenizer import Tokenizer


def fingerprint(parts: Mapping[str, Sequence[Document]], tokenizer: Tokenizer) -> str:
    """SHA-256, in hexadecimal, of the tokenizer's identity and every document's part, name, length and text.

    Args:
        parts: documents by part (``train``, ``validation``); the order of parts and documents counts.
        tokenizer: what will encode them.
    """
    digest = hashlib.sha256(b"ms_zero corpus 1")

    def add(field: bytes) -> None:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)

    for value in (tokenizer.name, tokenizer.vocab_size, tokenizer.eot_id):
        add(str(value).encode())
    for part, documents in parts.items():
        add(part.encode())
        digest.update(len(documents).to_bytes(8, "little"))
        for document in documents:
            add(document.name.encode(errors="surrogateescape"))
            add(document.text.encode())
    return digest.hexdigest()
