from itertools import combinations

import pytest

from ms_zero.data.corpus import Document
from ms_zero.data.fingerprint import fingerprint
from ms_zero.data.tokenizer import ByteTokenizer


class OtherTokenizer(ByteTokenizer):
    name = "other"


class LargerTokenizer(ByteTokenizer):
    vocab_size = 300


def doc(name, text):
    return Document(name, text)


GOLDEN = "fc77f4f4e0020da5854786a50755a0642116d822fff11d90e5cf78ca8338bcc0"

BASE = {"train": [doc("a", "one"), doc("b", "two")], "validation": [doc("c", "three")]}


def test_golden_value_never_changes():
    assert fingerprint(BASE, ByteTokenizer()) == GOLDEN


def test_equal_content_has_an_equal_fingerprint():
    copy = {part: tuple(doc(d.name, d.text) for d in documents) for part, documents in BASE.items()}
    assert fingerprint(copy, ByteTokenizer()) == fingerprint(BASE, ByteTokenizer())


VARIANTS = {
    "base": BASE,
    "content": BASE | {"train": [doc("a", "one"), doc("b", "twp")]},
    "order": BASE | {"train": [doc("b", "two"), doc("a", "one")]},
    "name": BASE | {"train": [doc("a", "one"), doc("bb", "two")]},
    "border": BASE | {"train": [doc("a", "on"), doc("b", "etwo")]},
    "name border": BASE | {"train": [doc("ao", "ne"), doc("b", "two")]},
    "missing": BASE | {"train": [doc("a", "one")]},
    "split": {"train": [doc("a", "one")], "validation": [doc("b", "two"), doc("c", "three")]},
    "part names": {"validation": BASE["train"], "train": BASE["validation"]},
    "empty part": BASE | {"validation": []},
}


@pytest.mark.parametrize(("first", "second"), list(combinations(VARIANTS, 2)))
def test_any_difference_of_the_corpus_shows(first, second):
    assert fingerprint(VARIANTS[first], ByteTokenizer()) != fingerprint(VARIANTS[second], ByteTokenizer())


def test_any_difference_of_the_tokenizer_shows():
    prints = {fingerprint(BASE, kind()) for kind in (ByteTokenizer, OtherTokenizer, LargerTokenizer)}
    assert len(prints) == 3


def test_names_may_be_any_bytes():
    name = b"caf\xe9".decode(errors="surrogateescape")
    assert fingerprint({"train": [doc(name, "x")]}, ByteTokenizer()) != fingerprint(
        {"train": [doc("caf", "x")]}, ByteTokenizer()
    )
