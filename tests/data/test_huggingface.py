"""Hugging Face tokenizers, with files that the package itself makes."""

import builtins
import pickle

import numpy as np
import pytest

from ms_zero.config.tokenizers import read_tokenizer_file
from ms_zero.data.fingerprint import fingerprint
from ms_zero.data.tokenizer import HuggingFaceTokenizer, get_tokenizer
from ms_zero.errors import UserError

EOT = "<|endoftext|>"
TEXTS = ["", "hello world", "日本語 and ümlaut 🚀", "line\r\n\tline\n", f"a {EOT} inside", "\0 \x7f"]


def get(path, eot_token=None):
    return get_tokenizer("file", str(path), eot_token)


@pytest.fixture
def byte_level(tmp_path):
    """A byte-level BPE that would cut and pad if it were asked to encode plainly."""
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[EOT],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world, hello tokens"] * 3, trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{EOT} $A", special_tokens=[(EOT, 0)]
    )
    tokenizer.add_tokens(["<extra>"])
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=10)
    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_decode_inverts_encode(byte_level, text):
    tokenizer = get(byte_level)
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and tokenizer.eot_id not in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.append(ids, tokenizer.eot_id)) == text


def test_vocabulary_is_what_the_package_says(byte_level):
    from tokenizers import Tokenizer

    assert get(byte_level).vocab_size == Tokenizer.from_file(str(byte_level)).get_vocab_size()


def test_another_process_gets_the_same_tokenizer(byte_level):
    tokenizer = get(byte_level)
    expected = tokenizer.encode("hello").tolist()
    assert pickle.loads(pickle.dumps(tokenizer)).encode("hello").tolist() == expected


def test_identity_follows_content_and_end_of_text_not_the_path(byte_level, tmp_path):
    def identity(path, eot_token=None):
        return fingerprint({"train": []}, get(path, eot_token))

    moved = tmp_path / "moved.json"
    moved.write_bytes(byte_level.read_bytes())
    assert identity(moved) == identity(byte_level)
    assert identity(byte_level, "<extra>") != identity(byte_level)
    moved.write_bytes(byte_level.read_bytes() + b"\n")
    assert identity(moved) != identity(byte_level)


def test_a_text_that_contains_the_end_of_text_is_refused(byte_level):
    with pytest.raises(UserError, match="encodes to 'h', the token that ends a document"):
        get(byte_level, "h").encode("h")


def test_a_file_that_the_package_refuses(tmp_path):
    pytest.importorskip("tokenizers")
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"type": "NoSuch", "vocab": {"</s>": 0}}}')
    with pytest.raises(UserError, match="is refused by the package tokenizers") as caught:
        get(path).encode("x")
    assert "\n" not in str(caught.value)


def test_without_the_package_the_command_to_install_it_is_named(tmp_path, monkeypatch):
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"vocab": {"</s>": 0, "a": 1}}}')
    plain = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return plain(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    tokenizer = HuggingFaceTokenizer(read_tokenizer_file(path))
    assert tokenizer.vocab_size == 2
    with pytest.raises(UserError, match=r"needs the package tokenizers: pip install 'ms_zero\[tokenizers\]'"):
        tokenizer.encode("a")
