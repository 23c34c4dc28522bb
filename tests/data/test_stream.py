from itertools import product

import numpy as np
import pytest

from ms_zero.data.indexed import IndexedTokens
from ms_zero.data.packing import PackedDataset
from ms_zero.data.stream import IndexedStream, TokenStream, ends_with_eot
from ms_zero.errors import UserError

EOT = 99
TEXTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9], [], [], [10, 11]]
ENDED = [[*text, EOT] for text in TEXTS]


def in_memory(documents):
    offsets = np.cumsum([0, *map(len, documents)])
    return TokenStream(np.array([token for document in documents for token in document], np.uint16), offsets)


@pytest.fixture
def streams(tmp_path, pairs):
    """The same documents from files: with stored ends of text, and with ends put in while reading."""
    stored = IndexedTokens(pairs.write_pair(tmp_path / "stored", ENDED))
    bare = IndexedTokens(pairs.write_pair(tmp_path / "bare", TEXTS))
    return lambda first, stop: (
        IndexedStream(stored, first, stop, None),
        IndexedStream(bare, first, stop, EOT),
    )


def spans(size):
    return [(start, stop) for start, stop in product(range(size), range(size + 1)) if start < stop]


@pytest.mark.parametrize(("first", "stop"), [(0, 7), (0, 3), (2, 7), (1, 2), (6, 7), (3, 6)])
def test_files_read_like_memory(streams, first, stop):
    expected = in_memory(ENDED[first:stop])
    for stream in streams(first, stop):
        assert stream.size == expected.size and stream.num_documents == stop - first
        for start, end in spans(stream.size):
            assert stream.read(start, end).tolist() == expected.read(start, end).tolist()
            last = stream.last_positions(start, end)
            assert last.tolist() == expected.last_positions(start, end).tolist()


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 64])
def test_samples_from_files_are_those_from_memory(streams, seq_len):
    expected = PackedDataset(in_memory(ENDED), seq_len)
    for stream in streams(0, 7):
        dataset = PackedDataset(stream, seq_len, vocab_size=100)
        assert len(dataset) == len(expected)
        for index in range(len(dataset)):
            ours, theirs = dataset.sample(index), expected.sample(index)
            assert ours.input_ids.tolist() == theirs.input_ids.tolist()
            assert ours.labels.tolist() == theirs.labels.tolist()
            assert ours.input_ids.dtype == ours.labels.dtype == np.int32


def test_files_without_ends_of_text_are_read_as_they_are(tmp_path, pairs):
    stream = IndexedStream(IndexedTokens(pairs.write_pair(tmp_path / "bare", TEXTS)), 0, 7, None)
    assert stream.read(0, stream.size).tolist() == list(range(1, 12))
    assert sorted(set(stream.last_positions(0, stream.size).tolist())) == [2, 3, 8, 10]
    labels = PackedDataset(stream, 11).sample(0).labels
    assert labels.tolist() == [2, 3, -100, -100, 6, 7, 8, 9, -100, 11, -100]


@pytest.mark.parametrize("dtype", ["<u2", "<i8"])
@pytest.mark.parametrize("bad", [100, 32767])
def test_an_id_beyond_the_vocabulary_is_refused_where_it_is(tmp_path, pairs, dtype, bad):
    documents = [[1, 2, 3, EOT], [4, 5, bad, EOT], [6, EOT]]
    indexed = IndexedTokens(pairs.write_pair(tmp_path / "data", documents, dtype))
    dataset = PackedDataset(IndexedStream(indexed, 0, 3, None), 2, vocab_size=100)
    dataset.sample(0), dataset.sample(1)
    with pytest.raises(UserError, match=f"token id {bad} is beyond model.vocab_size 100") as caught:
        dataset.sample(2)
    assert f": sample 2, {tmp_path}/data.bin, document 1, id 2;" in str(caught.value)


@pytest.mark.parametrize("bad", [-1, 2**33])
def test_ids_that_fit_no_vocabulary_are_refused(tmp_path, pairs, bad):
    indexed = IndexedTokens(pairs.write_pair(tmp_path / "data", [[1, bad], [3, EOT]], "<i8"))
    dataset = PackedDataset(IndexedStream(indexed, 0, 2, None), 4, vocab_size=100)
    with pytest.raises(UserError, match=f"token id {bad} is beyond model.vocab_size 100: sample 0"):
        dataset.sample(0)


def test_memory_names_the_document_of_a_bad_id():
    dataset = PackedDataset(in_memory([[1, 2], [3, 7], [4]]), 8, vocab_size=7)
    with pytest.raises(UserError, match=r"token id 7 .* sample 0, document 1;"):
        dataset.sample(0)


def test_whether_documents_end_with_the_end_of_text(tmp_path, pairs):
    def ends(documents, samples=256):
        return ends_with_eot(IndexedTokens(pairs.write_pair(tmp_path / "data", documents)), EOT, samples)

    assert ends(ENDED) is True
    assert ends(TEXTS) is False
    assert ends([[], []]) is True
    assert ends([[], [1], []]) is False
    with pytest.raises(UserError, match="document 0 ends with the end-of-text id 99, document 2 does not"):
        ends([[1, EOT], [], [1]])
    assert ends([[1, EOT], [1], [1, EOT]], samples=2) is True
