import subprocess
import sys

import numpy as np
import pytest

from ms_zero.data import IGNORED_LABEL, ByteTokenizer, Omission, Source, load_text
from ms_zero.errors import UserError

BYTES = {"tokenizer": ByteTokenizer(), "vocab_size": 257}


@pytest.fixture
def folder(tmp_path):
    for index in range(30):
        (tmp_path / f"{index:02}.txt").write_text(f"document {index} " * (index + 1))
    return tmp_path


def load(folder, **changes):
    source = Source(changes.pop("source", "files"), changes.pop("files", ["*.txt"]))
    settings = {"seq_len": 16, "validation_fraction": 0.2, "base": folder, **BYTES}
    return load_text([source], **settings | changes)


def text_of(dataset, tokenizer):
    return tokenizer.decode(dataset.stream.tokens)


def test_the_standard_library_loads(tmp_path):
    data = load(tmp_path, source="stdlib", files=[], seq_len=128, validation_fraction=0.05)
    assert len(data.train) > len(data.validation) > 100
    assert data.corpus.startswith("Python 3.") and "import" in text_of(data.validation, data.tokenizer)
    again = load(tmp_path, source="stdlib", files=[], seq_len=64, validation_fraction=0.05)
    assert again.fingerprint == data.fingerprint
    assert f"fingerprint {data.fingerprint[:12]}" in data.summary()


def test_each_document_is_in_exactly_one_part(folder):
    data = load(folder)
    texts = [(folder / f"{index:02}.txt").read_text() for index in range(30)]
    train, validation = (
        [data.tokenizer.decode(piece) for piece in np.split(part.stream.tokens, part.stream.offsets[1:-1])]
        for part in (data.train, data.validation)
    )
    assert validation and train
    assert sorted(train + validation) == sorted(texts)
    assert train == [text for text in texts if text in train]


def test_summary_counts_what_is_used_and_left_out(folder):
    data = load(folder, files=["*.txt", "03.txt"])
    assert data.omitted == (Omission("03.txt", "matched again"),)
    count = data.train.stream.offsets.size - 1
    assert data.summary() == (
        f"30 text files under {folder}: train {count} documents, {data.train.stream.tokens.size:,} tokens, "
        f"{len(data.train)} samples; validation {30 - count} documents, "
        f"{data.validation.stream.tokens.size:,} tokens, {len(data.validation)} samples; "
        f"left out: 1 x matched again; fingerprint {data.fingerprint[:12]}"
    )


def test_loaders_share_the_fingerprint(folder):
    data = load(folder)
    train, validation = data.train_loader(seed=5), data.validation_loader()
    assert train.cursor(9) == {
        "consumed_samples": 9,
        "fingerprint": data.fingerprint,
        "seed": 5,
        "seq_len": 16,
        "corpus": data.corpus,
    }
    first = data.validation.sample(0)
    np.testing.assert_array_equal(validation.batch(0, 1).input_ids[0], first.input_ids)
    assert {train.index_of(number) for number in range(len(train))} == set(range(len(data.train)))
    assert [train.index_of(number) for number in range(9)] != list(range(9))


def test_valid_tokens_of_one_epoch_are_all_tokens_but_the_first_of_each_document(folder):
    data = load(folder)
    labels = data.train_loader(seed=5).batch(0, len(data.train)).labels
    stream = data.train.stream
    assert int((labels != IGNORED_LABEL).sum()) == stream.tokens.size - (stream.offsets.size - 1)


def test_a_moved_corpus_resumes_and_a_changed_one_is_refused(folder):
    state = load(folder).train_loader(5).cursor(64)
    moved = folder / "moved"
    moved.mkdir()
    for path in folder.glob("*.txt"):
        path.rename(moved / path.name)
    assert load(moved).train_loader(5).check_cursor(state) == 64
    for changes in ({"files": ["0*.txt", "[12]*.txt"], "validation_fraction": 0.5}, {"files": ["[01]*.txt"]}):
        with pytest.raises(UserError, match="another corpus"):
            load(moved, **changes).train_loader(5).check_cursor(state)
    (moved / "07.txt").write_text("changed")
    with pytest.raises(UserError, match="another corpus"):
        load(moved).train_loader(5).check_cursor(state)


def test_without_validation(folder):
    data = load(folder, files=["00.txt"], validation_fraction=0)
    assert "left out: nothing" in data.summary()
    assert data.validation is None and "; validation" not in data.summary()
    with pytest.raises(UserError, match=r"data.validation_fraction=0 keeps nothing"):
        data.validation_loader()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"source": "web"}, "data.source='web': expected stdlib, files, jsonl or megatron"),
        ({"tokenizer": None}, "data.tokenizer=none cannot encode the text of source files"),
        ({"files": ["00.txt"]}, "one document"),
        ({"files": []}, "data.files is empty"),
    ],
)
def test_bad_settings_are_explained(folder, changes, message):
    with pytest.raises(UserError, match=message):
        load(folder, **changes)


def test_data_does_not_import_mindspore():
    code = "import sys, ms_zero.data, ms_zero.mesh; sys.exit('mindspore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
