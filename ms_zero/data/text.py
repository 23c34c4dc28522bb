"""From a description of the data to datasets and loaders."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ms_zero.data.corpus import Omission, file_corpus, split_documents, stdlib_corpus
from ms_zero.data.fingerprint import fingerprint
from ms_zero.data.loader import Loader
from ms_zero.data.packing import PackedDataset, tokenize
from ms_zero.data.tokenizer import Tokenizer, get_tokenizer
from ms_zero.errors import UserError


@dataclass(frozen=True)
class TextData:
    """A corpus, tokenized, split and packed.

    Attributes:
        train: training samples.
        validation: validation samples; None if the validation fraction is 0.
        tokenizer: how text became ids.
        fingerprint: identity of both parts and the tokenizer.
        corpus: where the text comes from.
        omitted: what was found there and left out.
    """

    train: PackedDataset
    validation: PackedDataset | None
    tokenizer: Tokenizer
    fingerprint: str
    corpus: str
    omitted: tuple[Omission, ...]

    def train_loader(self, seed: int) -> Loader:
        """Endless shuffled training samples."""
        return Loader(self.train, seed=seed, fingerprint=self.fingerprint, corpus=self.corpus)

    def validation_loader(self) -> Loader:
        """Validation samples in order.

        Raises:
            UserError: nothing was kept for validation.
        """
        if self.validation is None:
            raise UserError("data.validation_fraction=0 keeps nothing for validation: set it above 0")
        return Loader(
            self.validation, seed=0, fingerprint=self.fingerprint, corpus=self.corpus, shuffle=False
        )

    def summary(self) -> str:
        """One line: source, documents and tokens of each part, what was left out and why, fingerprint."""
        parts = [f"train {_size(self.train)}"]
        if self.validation is not None:
            parts.append(f"validation {_size(self.validation)}")
        reasons = Counter(omission.reason for omission in self.omitted)
        omitted = ", ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items())) or "nothing"
        return f"{self.corpus}: {'; '.join(parts)}; left out: {omitted}; fingerprint {self.fingerprint[:12]}"


def load_text(
    *,
    source: str,
    files: Sequence[str],
    tokenizer: str,
    seq_len: int,
    validation_fraction: float,
    base: Path | None = None,
) -> TextData:
    """Read, tokenize, split and pack a corpus.

    Args:
        source: ``stdlib`` (the text of the running Python's standard library) or ``files``.
        files: paths and globs of UTF-8 text files; only for ``files``.
        tokenizer: name of a tokenizer.
        seq_len: positions per sample.
        validation_fraction: expected share of documents for validation, in [0, 1).
        base: the folder that relative `files` start from; default the working directory.

    Raises:
        UserError: the source or tokenizer is unknown, a file is unusable, or a part would be empty.
    """
    if source not in ("stdlib", "files"):
        raise UserError(f"data.source={source!r}: expected stdlib or files")
    encoder = get_tokenizer(tokenizer)
    corpus = stdlib_corpus() if source == "stdlib" else file_corpus(files, base)
    train, validation = split_documents(corpus.documents, validation_fraction)
    return TextData(
        train=PackedDataset(tokenize(train, encoder), seq_len),
        validation=PackedDataset(tokenize(validation, encoder), seq_len) if validation else None,
        tokenizer=encoder,
        fingerprint=fingerprint({"train": train, "validation": validation}, encoder),
        corpus=corpus.description,
        omitted=corpus.omitted,
    )


def _size(dataset: PackedDataset) -> str:
    documents, tokens = dataset.stream.offsets.size - 1, dataset.stream.tokens.size
    return f"{documents:,} documents, {tokens:,} tokens, {len(dataset):,} samples"
