"""Text data: corpora, tokenizers, packing and a loader that can be restored at any sample (numpy only)."""

from ms_zero.data.batch_size import BatchSchedule
from ms_zero.data.corpus import Corpus, Document, Omission, file_corpus, split_documents, stdlib_corpus
from ms_zero.data.cursor import Cursor, check_cursor
from ms_zero.data.documents import NO_RESETS, DocumentResets
from ms_zero.data.fingerprint import fingerprint
from ms_zero.data.indexed import IndexedTokens, IndexedWriter
from ms_zero.data.jsonl import jsonl_corpus
from ms_zero.data.loader import Batch, Dataset, Loader, SampleSequence
from ms_zero.data.mixture import MixtureLoader
from ms_zero.data.packing import (
    IGNORED_LABEL,
    JoinedDataset,
    PackedDataset,
    Sample,
    tokenize,
    unigram_entropy,
)
from ms_zero.data.stream import IndexedStream, Stream, TokenStream
from ms_zero.data.text import MixtureData, Source, TextData, load_text
from ms_zero.data.tokenizer import ByteTokenizer, HuggingFaceTokenizer, Tokenizer, get_tokenizer

__all__ = [
    "IGNORED_LABEL",
    "NO_RESETS",
    "Batch",
    "BatchSchedule",
    "ByteTokenizer",
    "Corpus",
    "Cursor",
    "Dataset",
    "Document",
    "DocumentResets",
    "HuggingFaceTokenizer",
    "IndexedStream",
    "IndexedTokens",
    "IndexedWriter",
    "JoinedDataset",
    "Loader",
    "MixtureData",
    "MixtureLoader",
    "Omission",
    "PackedDataset",
    "Sample",
    "SampleSequence",
    "Source",
    "Stream",
    "TextData",
    "TokenStream",
    "Tokenizer",
    "check_cursor",
    "file_corpus",
    "fingerprint",
    "get_tokenizer",
    "jsonl_corpus",
    "load_text",
    "split_documents",
    "stdlib_corpus",
    "tokenize",
    "unigram_entropy",
]
