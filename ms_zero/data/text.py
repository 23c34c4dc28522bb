"""From a description of the data to datasets and loaders."""

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ms_zero.data.corpus import Corpus, Omission, file_corpus, find_files, split_documents, stdlib_corpus
from ms_zero.data.fingerprint import fingerprint
from ms_zero.data.indexed import IndexedTokens, strip_suffix
from ms_zero.data.jsonl import jsonl_corpus
from ms_zero.data.loader import Loader, SampleSequence
from ms_zero.data.mixture import MixtureLoader
from ms_zero.data.packing import JoinedDataset, PackedDataset, add_counts, tokenize, unigram_entropy
from ms_zero.data.stream import IndexedStream, ends_with_eot
from ms_zero.data.tokenizer import Tokenizer
from ms_zero.errors import UserError

_ENTROPY_TOKENS = 1 << 24  # enough for four digits; memory-mapped data can have any number


@dataclass(frozen=True)
class Source:
    """What to read: one source, or one part of a mixture.

    Attributes:
        kind: ``stdlib`` (the text of the running Python's standard library), ``files`` (UTF-8 text files),
            ``jsonl`` (JSON-lines files with a text field) or ``megatron`` (``.bin``/``.idx`` pairs).
        files: paths and globs; for ``megatron`` prefixes of pairs.
        weight: share of the samples, relative to the other parts of a mixture.
    """

    kind: str
    files: Sequence[str] = ()
    weight: float = 1.0


@dataclass(frozen=True)
class TextData:
    """One source, tokenized, split and packed.

    Attributes:
        train: training samples.
        validation: validation samples; None if the validation fraction is 0.
        tokenizer: how text became ids; None if that is not known.
        fingerprint: identity of both parts and the tokenizer.
        corpus: where the text comes from.
        omitted: what was found there and left out.
    """

    train: PackedDataset | JoinedDataset
    validation: PackedDataset | JoinedDataset | None
    tokenizer: Tokenizer | None
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

    def validation_counts(self) -> np.ndarray | None:
        """How often each id occurs in the validation samples, of long data at their beginning."""
        return None if self.validation is None else self.validation.token_counts(_ENTROPY_TOKENS)

    def validation_entropy(self) -> float | None:
        """`unigram_entropy` of the validation samples; None when there are none."""
        counts = self.validation_counts()
        return None if counts is None else unigram_entropy(counts)

    def summary(self) -> str:
        """One line: source, documents and tokens of each part, what was left out and why, fingerprint."""
        parts = [f"train {_size(self.train)}"]
        if self.validation is not None:
            parts.append(f"validation {_size(self.validation)}")
        reasons = Counter(omission.reason for omission in self.omitted)
        omitted = ", ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items())) or "nothing"
        return f"{self.corpus}: {'; '.join(parts)}; left out: {omitted}; fingerprint {self.fingerprint[:12]}"


@dataclass(frozen=True)
class MixtureData:
    """Several sources, mixed by weight.

    Attributes:
        parts: the sources.
        weights: of each source, relative to the others.
        seq_len: positions per sample.
        fingerprint: identity of the parts and their weights.
        corpus: where the text comes from.
    """

    parts: tuple[TextData, ...]
    weights: tuple[float, ...]
    seq_len: int
    fingerprint: str = field(init=False)
    corpus: str = field(init=False)

    def __post_init__(self) -> None:
        identity = json.dumps([[part.fingerprint for part in self.parts], self.weights])
        digest = hashlib.sha256(f"ms_zero mixture 1 {identity}".encode()).hexdigest()
        object.__setattr__(self, "fingerprint", digest)
        names = [f"{weight:g} x {part.corpus}" for weight, part in zip(self.weights, self.parts, strict=True)]
        object.__setattr__(self, "corpus", f"mixture of {' + '.join(names)}")

    def train_loader(self, seed: int) -> MixtureLoader:
        """Endless training samples, shuffled within each part."""
        return self._mix([part.train_loader(seed) for part in self.parts], seed)

    def validation_loader(self) -> MixtureLoader:
        """Validation samples in order, mixed like the training samples.

        Raises:
            UserError: nothing was kept for validation.
        """
        return self._mix([part.validation_loader() for part in self.parts], 0)

    def validation_entropy(self) -> float | None:
        """`unigram_entropy` of the mixed validation samples; None when there are none."""
        mixed = np.zeros(1)
        for weight, part in zip(self.weights, self.parts, strict=True):
            counts = part.validation_counts()
            if counts is None:
                return None
            mixed = add_counts(mixed, counts * (weight / counts.sum()))
        return unigram_entropy(mixed)

    def summary(self) -> str:
        """One line: the share of each part of the samples, and the part's own summary."""
        total = sum(self.weights)
        parts = [
            f"{weight / total:.2%} {part.summary()}"
            for weight, part in zip(self.weights, self.parts, strict=True)
        ]
        return f"mixture: {' | '.join(parts)} | fingerprint {self.fingerprint[:12]}"

    def _mix(self, loaders: Sequence[SampleSequence], seed: int) -> MixtureLoader:
        return MixtureLoader(
            loaders,
            self.weights,
            seq_len=self.seq_len,
            seed=seed,
            fingerprint=self.fingerprint,
            corpus=self.corpus,
        )


def load_text(
    sources: Sequence[Source],
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    seq_len: int,
    validation_fraction: float,
    base: Path | None = None,
) -> TextData | MixtureData:
    """Read, tokenize, split and pack one source, or several as a mixture.

    Args:
        sources: at least one.
        tokenizer: makes ids of text and ends documents; None is for ``megatron`` sources only, which are then
            read as they are.
        vocab_size: every id must be below it.
        seq_len: positions per sample.
        validation_fraction: expected share of documents for validation, in [0, 1).
        base: the folder that relative paths start from; default the working directory.

    Raises:
        UserError: a source is unknown, a file is unusable, or a part would be empty.
    """
    settings = _Settings(tokenizer, vocab_size, seq_len, validation_fraction, base)
    if len(sources) == 1:
        return settings.load(sources[0])
    parts = []
    for number, source in enumerate(sources):
        try:
            parts.append(settings.load(source))
        except UserError as error:
            raise UserError(f"data.parts[{number}]: {error}") from error
    return MixtureData(tuple(parts), tuple(source.weight for source in sources), seq_len)


@dataclass(frozen=True)
class _Settings:
    """What all sources of a run have in common."""

    tokenizer: Tokenizer | None
    vocab_size: int
    seq_len: int
    validation_fraction: float
    base: Path | None

    def load(self, source: Source) -> TextData:
        if source.kind == "megatron":
            return _load_indexed(source.files, self)
        if self.tokenizer is None:
            raise UserError(f"data.tokenizer=none cannot encode the text of source {source.kind}: name one")
        corpus = _corpus(source, self.base)
        return _pack_text(corpus, self.tokenizer, self.seq_len, self.validation_fraction)


def _corpus(source: Source, base: Path | None) -> Corpus:
    if source.kind == "stdlib":
        return stdlib_corpus()
    if source.kind == "files":
        return file_corpus(source.files, base)
    if source.kind == "jsonl":
        return jsonl_corpus(source.files, base)
    raise UserError(f"data.source={source.kind!r}: expected stdlib, files, jsonl or megatron")


def _pack_text(corpus: Corpus, tokenizer: Tokenizer, seq_len: int, validation_fraction: float) -> TextData:
    train, validation = split_documents(corpus.documents, validation_fraction)
    return TextData(
        train=PackedDataset(tokenize(train, tokenizer), seq_len),
        validation=PackedDataset(tokenize(validation, tokenizer), seq_len) if validation else None,
        tokenizer=tokenizer,
        fingerprint=fingerprint({"train": train, "validation": validation}, tokenizer),
        corpus=corpus.description,
        omitted=corpus.omitted,
    )


def _load_indexed(prefixes: Sequence[str], settings: _Settings) -> TextData:
    """Datasets of ``.bin``/``.idx`` pairs. The last documents of each pair are for validation.

    A pair of one document is for training whole.
    """
    found = find_files([f"{strip_suffix(prefix)}.idx" for prefix in prefixes], settings.base)
    tokenizer, fraction = settings.tokenizer, settings.validation_fraction
    train: list[PackedDataset] = []
    validation: list[PackedDataset] = []
    digest = hashlib.sha256(f"ms_zero megatron 1 {tokenizer and tokenizer.name}".encode())
    for path in found.names:
        indexed = _open(path)
        eot_id = _missing_eot(indexed, tokenizer)
        border = _validation_border(indexed, fraction)
        train += _pack_indexed(indexed, range(border), eot_id, settings)
        validation += _pack_indexed(indexed, range(border, len(indexed)), eot_id, settings)
        digest.update(f"{indexed.fingerprint()} {border} {eot_id}".encode())
    if not train or (fraction > 0 and not validation):
        raise UserError(
            f"data.validation_fraction={fraction} leaves no document for "
            f"{'validation' if train else 'training'} in {found.describe('token')}: change it"
        )
    return TextData(
        train=JoinedDataset(train),
        validation=JoinedDataset(validation) if validation else None,
        tokenizer=tokenizer,
        fingerprint=digest.hexdigest(),
        corpus=found.describe("token"),
        omitted=found.omitted,
    )


def _missing_eot(indexed: IndexedTokens, tokenizer: Tokenizer | None) -> int | None:
    """The id to put after each document; None when it is there, or when nothing is known of it."""
    if tokenizer is None or ends_with_eot(indexed, tokenizer.eot_id):
        return None
    return tokenizer.eot_id


def _pack_indexed(
    indexed: IndexedTokens, documents: range, eot_id: int | None, settings: _Settings
) -> list[PackedDataset]:
    """One dataset, or none when there is nothing to predict."""
    if not documents:
        return []
    stream = IndexedStream(indexed, documents.start, documents.stop, eot_id)
    return [PackedDataset(stream, settings.seq_len, settings.vocab_size)] if stream.size > 1 else []


def _open(path: Path) -> IndexedTokens:
    indexed = IndexedTokens(path)
    if indexed.header.dtype.kind == "f":
        raise UserError(f"{path} holds numbers of {indexed.header.dtype.name}: token ids are integers")
    return indexed


def _validation_border(indexed: IndexedTokens, fraction: float) -> int:
    """The first document for validation: at least this share of the ids lies from there on, if it can be."""
    if fraction == 0 or len(indexed) < 2:
        return len(indexed)
    wanted = int(indexed.tokens.size * (1 - fraction))
    return min(max(1, indexed.document_of(wanted)), len(indexed) - 1)


def _size(dataset: PackedDataset | JoinedDataset) -> str:
    return f"{dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens, {len(dataset):,} samples"
