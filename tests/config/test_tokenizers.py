import hashlib
import json
import subprocess
import sys

import pytest

from ms_zero.config.tokenizers import read_tokenizer_file
from ms_zero.errors import UserError

EOT = "<|endoftext|>"


@pytest.fixture
def file(tmp_path):
    def file(content):
        path = tmp_path / "tokenizer.json"
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return path

    return file


def word_level(vocab, added=()):
    return {
        "model": {"type": "WordLevel", "vocab": vocab},
        "added_tokens": [{"content": token, "id": number} for token, number in added],
    }


def test_vocabulary_counts_added_tokens_and_gaps(file):
    path = file(word_level({"a": 0, "b": 1}, [(EOT, 2), ("<pad>", 9)]))
    found = read_tokenizer_file(path)
    assert (found.vocab_size, found.eot_token, found.eot_id, found.path) == (10, EOT, 2, path)
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_unigram_vocabularies_are_lists(file):
    content = {"model": {"type": "Unigram", "vocab": [["<unk>", 0], ["</s>", 0], ["a", -1.5]]}}
    found = read_tokenizer_file(file(content))
    assert (found.vocab_size, found.eot_token, found.eot_id) == (3, "</s>", 1)


def test_a_named_token_wins_and_may_be_any(file):
    path = file(word_level({"a": 0, "b": 1}, [(EOT, 2)]))
    assert read_tokenizer_file(path, "b").eot_id == 1


def test_a_token_of_the_model_does_not_compete_with_an_added_one(file):
    assert read_tokenizer_file(file(word_level({"a": 0, "</s>": 1}, [(EOT, 2)]))).eot_id == 2


BAD = [
    (b"", "is no JSON"),
    (b"{", "is no JSON"),
    (b"\xff\xfe", "is no JSON"),
    (b"[" * 100_000, "is no JSON"),
    ([], "is no tokenizer.json"),
    ({"hello": 1}, r"is no tokenizer.json of Hugging Face tokenizers \(no 'model'\)"),
    ({"model": {"vocab": 3}}, "is no tokenizer.json"),
    ({"model": {"vocab": [1, 2]}}, "is no tokenizer.json"),
    (word_level({"a": "x"}), "token 'a' has id 'x'"),
    (word_level({"a": -1}), "token 'a' has id -1"),
    (word_level({"a": True}), "token 'a' has id True"),
    (word_level({"a": 2**40}), "token 'a' has id 1099511627776"),
    ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b"}]}, r"\(no 'id'\)"),
    ({"model": {"vocab": {}}}, "has no tokens"),
    (word_level({"a": 0}), "which token ends a document.*has no token with a usual name.*data.eot_token"),
    (word_level({"a": 0}, [(EOT, 1), ("</s>", 2)]), r"has <\|endoftext\|> and </s>; name it with"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_what_cannot_be_used_is_explained_in_one_line(file, content, message):
    with pytest.raises(UserError, match=message) as caught:
        read_tokenizer_file(file(content))
    assert "\n" not in str(caught.value) and "tokenizer.json" in str(caught.value)


def test_an_unknown_token_a_missing_file_and_a_folder(file, tmp_path):
    with pytest.raises(UserError, match=r"has no token '<eod>': correct data.eot_token"):
        read_tokenizer_file(file(word_level({"a": 0})), "<eod>")
    for path in (tmp_path / "none.json", tmp_path, "\0"):
        with pytest.raises(UserError, match="does not exist or is no file"):
            read_tokenizer_file(path)


def test_the_vocabulary_becomes_that_of_the_model(load, file):
    path = file(word_level({"a": 0}, [(EOT, 700)]))
    loaded = load("data.tokenizer=file", f"data.tokenizer_file={path}")
    assert loaded.config.model.vocab_size == 701
    assert loaded.origins["model.vocab_size"] == f"derived: the highest id in {path}, plus 1"


def test_loading_needs_neither_numpy_nor_tokenizers(file, write):
    path = file(word_level({"a": 0}, [(EOT, 7)]))
    text = f"""\
include: [runs/quickstart]
data: {{tokenizer: file, tokenizer_file: '{path}'}}
"""
    code = (
        "import sys; from ms_zero.config import load_config; config = load_config(sys.argv[1]).config;"
        "assert config.model.vocab_size == 8; sys.exit(bool({'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code, write(text)], check=False).returncode == 0
