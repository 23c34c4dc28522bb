"""Every kind of source through `load_text`: what is read, how it is split, and exact restores."""

import json

import numpy as np
import pytest

from ms_zero.data import IGNORED_LABEL, ByteTokenizer, MixtureData, Source, load_text, unigram_entropy
from ms_zero.errors import UserError

EOT = ByteTokenizer.eot_id
TEXTS = [f"document {number} " * (1 + number % 5) for number in range(40)]


def load(base, *sources, **changes):
    settings = {"tokenizer": ByteTokenizer(), "vocab_size": 257, "seq_len": 16, "validation_fraction": 0.2}
    return load_text(sources, base=base, **settings | changes)


def ids_of(texts, eot=(EOT,)):
    return [[*text.encode(), *eot] for text in texts]


@pytest.fixture
def folder(tmp_path, pairs):
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    pairs.write_pair(tmp_path / "ended", ids_of(TEXTS))
    pairs.write_pair(tmp_path / "bare", ids_of(TEXTS, ()), "<i4")
    (tmp_path / "notes.txt").write_text("some notes " * 60)
    (tmp_path / "more.txt").write_text("more of them " * 50)
    return tmp_path


SOURCES = {
    "files": [Source("files", ["*.txt"])],
    "jsonl": [Source("jsonl", ["data.jsonl"])],
    "megatron, ends stored": [Source("megatron", ["ended"])],
    "megatron, ends added": [Source("megatron", ["bare.idx"])],
    "several pairs": [Source("megatron", ["*"])],
    "mixture": [
        Source("jsonl", ["data.jsonl"], 0.7),
        Source("megatron", ["bare"], 0.2),
        Source("files", ["*.txt"], 0.1),
    ],
}
EVERY = pytest.mark.parametrize("sources", SOURCES.values(), ids=SOURCES)


def load_one(folder, sources):
    return load(folder, *sources, validation_fraction=0)


def read(loader, consumed, count):
    batch = loader.batch(consumed, count)
    return np.concatenate([batch.input_ids, batch.labels], axis=1).tolist()


@EVERY
@pytest.mark.parametrize(("old", "new"), [(1, 2), (3, 1), (2, 4)])
def test_restoring_under_another_degree_continues_the_exact_sequence(folder, sources, old, new):
    expected, seen = read(load_one(folder, sources).train_loader(7), 0, 90), {}

    def train(loader, consumed, degree, steps):
        for _ in range(steps):
            for rank in range(degree):
                batch = loader.microbatch(consumed, 0, rank, degree, 3)
                rows = np.concatenate([batch.input_ids, batch.labels], axis=1).tolist()
                seen.update(zip(batch.sample_numbers.tolist(), rows, strict=True))
            consumed += 3 * degree
        return consumed

    first = load_one(folder, sources).train_loader(7)
    state = json.loads(json.dumps(first.cursor(train(first, 0, old, 3))))
    second = load_one(folder, sources).train_loader(7)
    consumed = train(second, second.check_cursor(state), new, 5)
    assert seen == dict(enumerate(expected[:consumed]))


@EVERY
def test_any_sample_can_be_read_first(folder, sources):
    expected = read(load_one(folder, sources).train_loader(7), 0, 70)
    for number in (69, 0, 33):
        assert read(load_one(folder, sources).train_loader(7), number, 1) == [expected[number]]


@EVERY
def test_another_seed_another_order(folder, sources):
    data = load_one(folder, sources)
    assert read(data.train_loader(7), 0, 20) != read(data.train_loader(8), 0, 20)


@EVERY
def test_changed_files_are_refused_and_moved_ones_are_not(folder, sources, tmp_path_factory):
    state = load_one(folder, sources).train_loader(7).cursor(5)
    moved = tmp_path_factory.mktemp("moved")
    for path in folder.iterdir():
        (moved / path.name).write_bytes(path.read_bytes())
    assert load_one(moved, sources).train_loader(7).check_cursor(state) == 5
    for path in moved.iterdir():
        data = path.read_bytes()
        if path.suffix == ".bin":
            path.write_bytes(data[:-4] + bytes([data[-4] ^ 1]) + data[-3:])
        elif path.suffix != ".idx":
            path.write_bytes(data.replace(b"o", b"u", 1))
    with pytest.raises(UserError, match="another corpus"):
        load_one(moved, sources).train_loader(7).check_cursor(state)


def test_all_kinds_of_files_with_the_same_documents_give_the_same_samples(folder):
    names = ("jsonl", "megatron, ends stored", "megatron, ends added")
    datasets = [load_one(folder, SOURCES[name]).train for name in names]
    assert len({len(dataset) for dataset in datasets}) == 1
    for index in range(len(datasets[0])):
        samples = [dataset.sample(index) for dataset in datasets]
        assert len({(s.input_ids.tobytes(), s.labels.tobytes()) for s in samples}) == 1


def test_the_last_documents_of_a_pair_are_for_validation(folder):
    source = Source("megatron", ["ended"])
    data = load(folder, source)
    train, validation = data.train.datasets[0].stream, data.validation.datasets[0].stream
    assert (train.first, train.stop, validation.stop) == (0, validation.first, 40)
    assert 0.2 <= validation.size / (train.size + validation.size) < 0.24
    assert data.summary().startswith(f"1 token file under {folder}: train {train.stop} documents, ")
    assert data.fingerprint != load(folder, source, validation_fraction=0.4).fingerprint


@pytest.mark.parametrize(("documents", "fraction"), [(1, 0), (2, 0.01), (2, 0.99), (3, 0.5)])
def test_small_pairs_keep_a_document_for_each_part(tmp_path, pairs, documents, fraction):
    pairs.write_pair(tmp_path / "data", [[1, 2, EOT]] * documents)
    data = load(tmp_path, Source("megatron", ["data"]), validation_fraction=fraction)
    assert data.train.num_documents == 1


def test_one_document_cannot_be_split(tmp_path, pairs):
    pairs.write_pair(tmp_path / "data", [[1, 2, EOT]])
    with pytest.raises(UserError, match=r"data.validation_fraction=0.2 leaves no document for validation"):
        load(tmp_path, Source("megatron", ["data"]))


@pytest.mark.parametrize("documents", [[], [[]], [[EOT]]])
def test_pairs_without_text_are_refused(tmp_path, pairs, documents):
    pairs.write_pair(tmp_path / "data", documents)
    with pytest.raises(UserError, match="leaves no document for training"):
        load(tmp_path, Source("megatron", ["data"]), validation_fraction=0)


def test_an_empty_pair_among_others_is_passed_over(folder, pairs):
    pairs.write_pair(folder / "empty", [])
    with_it = load(folder, Source("megatron", ["empty", "ended"]))
    assert len(with_it.train) == len(load(folder, Source("megatron", ["ended"])).train)


def test_ids_that_are_no_integers_are_refused(tmp_path, pairs):
    pairs.write_pair(tmp_path / "data", [[1, 2]], "<f4")
    with pytest.raises(UserError, match=r"data.idx holds numbers of float32: token ids are integers"):
        load(tmp_path, Source("megatron", ["data"]))


def test_ids_beyond_the_vocabulary_are_refused_when_they_are_met(folder, pairs):
    pairs.write_pair(folder / "data", [*ids_of(TEXTS), [1, 300, EOT]])
    loader = load(folder, Source("megatron", ["data"]), validation_fraction=0).train_loader(7)
    with pytest.raises(UserError, match=r"token id 300 is beyond .* 257: .*data.bin, document 40, id 1"):
        loader.batch(0, len(loader))
    assert load(folder, Source("megatron", ["data"]), vocab_size=301).train_loader(7).batch(0, 200)


def test_without_a_tokenizer_ids_are_read_as_they_are(folder):
    stored, bare = (
        load(folder, Source("megatron", [name]), tokenizer=None, validation_fraction=0)
        for name in ("ended", "bare")
    )
    assert stored.train.num_tokens - bare.train.num_tokens == len(TEXTS)
    labels = bare.train_loader(7).batch(0, len(bare.train)).labels
    assert int((labels != IGNORED_LABEL).sum()) == bare.train.num_tokens - len(TEXTS)


def test_a_missing_pair_and_a_glob_without_matches(folder):
    with pytest.raises(UserError, match=r"data file none.idx does not exist under"):
        load(folder, Source("megatron", ["none"]))
    with pytest.raises(UserError, match=r"data glob x\*.idx matches no file"):
        load(folder, Source("megatron", ["x*"]))
    (folder / "ended.bin").unlink()
    with pytest.raises(UserError, match=r"ended.bin does not exist"):
        load(folder, Source("megatron", ["ended"]))


def test_a_mixture_keeps_its_proportions_and_validates_alike(folder):
    data = load(folder, *SOURCES["mixture"])
    assert isinstance(data, MixtureData)
    loader = data.train_loader(7)
    assert loader.shares == data.validation_loader().shares == (7, 2, 1)
    assert [part.dataset for part in loader.parts] == [part.train for part in data.parts]
    assert read(loader, 0, 1) == read(data.parts[0].train_loader(7), 0, 1)
    assert "70.00% 1 JSON-lines file" in data.summary() and data.fingerprint[:12] in data.summary()


def test_weights_and_parts_are_identity(folder):
    first, second, third = SOURCES["mixture"]
    variants = ([first, second, third], [second, first, third], [first, second], [first, first, third])
    assert len({load(folder, *sources).fingerprint for sources in variants}) == 4


def test_entropy_of_a_mixture_is_that_of_the_mixed_distribution(folder):
    data = load(folder, *SOURCES["mixture"][:2])
    mixed = np.zeros(257)
    for weight, part in zip((0.7, 0.2), data.parts):
        counts = part.validation_counts()
        mixed[: counts.size] += weight / 0.9 * counts / counts.sum()
    assert data.validation_entropy() == pytest.approx(unigram_entropy(mixed))
    assert load(folder, *SOURCES["mixture"], validation_fraction=0).validation_entropy() is None
    with pytest.raises(UserError, match="keeps nothing for validation"):
        load(folder, *SOURCES["mixture"], validation_fraction=0).validation_loader()


def test_what_is_wrong_in_a_part_is_told_with_its_number(folder):
    (folder / "notes.txt").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"data.parts\[2\]: data file .*notes.txt is not UTF-8"):
        load(folder, *SOURCES["mixture"])
