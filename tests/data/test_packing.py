import math

import numpy as np
import pytest

from ms_zero.data.corpus import Document
from ms_zero.data.packing import (
    IGNORED_LABEL,
    JoinedDataset,
    PackedDataset,
    add_counts,
    tokenize,
    unigram_entropy,
)
from ms_zero.data.stream import TokenStream
from ms_zero.data.tokenizer import ByteTokenizer

EOT = ByteTokenizer.eot_id


def stream_of(*texts):
    return tokenize([Document(str(index), text) for index, text in enumerate(texts)], ByteTokenizer())


def random_stream(seed=0, count=60):
    draw = np.random.default_rng(seed)
    return stream_of(*("".join(map(chr, draw.integers(97, 123, draw.integers(1, 40)))) for _ in range(count)))


def test_documents_follow_each_other_and_end_with_eot():
    stream = stream_of("ab", "c", "def")
    assert stream.tokens.tolist() == [97, 98, EOT, 99, EOT, 100, 101, 102, EOT]
    assert stream.tokens.dtype == np.uint16
    assert stream.offsets.tolist() == [0, 3, 5, 9] and stream.offsets.dtype == np.int64


def test_samples_by_hand():
    dataset = PackedDataset(stream_of("ab", "c", "def"), seq_len=3)
    no = IGNORED_LABEL
    assert len(dataset) == 3
    expected = [
        ([97, 98, EOT], [98, EOT, no]),  # the token after the end of a document is never a label
        ([99, EOT, 100], [EOT, no, 101]),
        ([101, 102, EOT], [102, EOT, no]),  # the last window is padded
    ]
    for index, (input_ids, labels) in enumerate(expected):
        sample = dataset.sample(index)
        assert sample.input_ids.tolist() == input_ids and sample.labels.tolist() == labels
        assert sample.input_ids.dtype == sample.labels.dtype == np.int32


@pytest.mark.parametrize("seq_len", [1, 2, 3, 5, 7, 12, 64])
def test_samples_say_where_their_documents_begin(seq_len):
    stream = stream_of("ab", "c", "def", "ghijklmn", "o")
    dataset = PackedDataset(stream, seq_len)
    for index in range(len(dataset)):
        starts = dataset.sample(index).document_starts
        first = index * seq_len
        for place in range(seq_len):
            token = min(first + place, stream.tokens.size - 1)  # padding repeats the last token
            begin = max(o for o in stream.offsets.tolist() if o <= token)
            assert starts[place] == max(begin - first, 0)
        assert starts.dtype == np.int32 and starts.shape == (seq_len,)


@pytest.mark.parametrize("seq_len", [1, 2, 3, 7, 16, 64, 1000, 5000])
def test_samples_cover_every_prediction_within_a_document_once(seq_len):
    stream = random_stream()
    dataset = PackedDataset(stream, seq_len)
    samples = [dataset.sample(index) for index in range(len(dataset))]
    input_ids = np.concatenate([sample.input_ids for sample in samples])
    labels = np.concatenate([sample.labels for sample in samples])
    assert all(sample.input_ids.shape == sample.labels.shape == (seq_len,) for sample in samples)

    predictions = stream.tokens.size - 1
    assert predictions <= input_ids.size < predictions + seq_len  # no sample is padding only
    np.testing.assert_array_equal(input_ids[:predictions], stream.tokens[:-1])
    expected = np.where(stream.tokens[:-1] == EOT, IGNORED_LABEL, stream.tokens[1:].astype(np.int32))
    np.testing.assert_array_equal(labels[:predictions], expected)
    assert (labels[predictions:] == IGNORED_LABEL).all()
    assert (input_ids[predictions:] == EOT).all()


def test_number_of_valid_tokens_differs_between_samples():
    dataset = PackedDataset(random_stream(), 32)
    valid = {int((dataset.sample(index).labels != IGNORED_LABEL).sum()) for index in range(len(dataset))}
    assert len(valid) > 2 and min(valid) > 0


def test_borders_come_from_offsets_not_from_the_eot_id():
    stream = TokenStream(np.array([1, EOT, 2, 3, 4], dtype=np.uint16), np.array([0, 3, 5], dtype=np.int64))
    assert PackedDataset(stream, 4).sample(0).labels.tolist() == [EOT, 2, IGNORED_LABEL, 4]


def test_samples_do_not_share_memory_with_the_stream():
    dataset = PackedDataset(stream_of("abcdef"), 2)
    dataset.sample(0).input_ids[:] = 0
    assert dataset.sample(0).input_ids.tolist() == [97, 98]


@pytest.mark.parametrize("index", [-1, 3])
def test_sample_index_is_checked(index):
    with pytest.raises(AssertionError, match=f"sample {index} of 3"):
        PackedDataset(stream_of("ab", "c", "def"), 3).sample(index)


def test_a_dataset_needs_text():
    with pytest.raises(AssertionError, match="needs a document"):
        PackedDataset(stream_of(), 3)


def test_unigram_entropy_of_known_distributions():
    assert unigram_entropy(np.array([0, 0, 7])) == 0
    assert unigram_entropy(np.ones(257)) == pytest.approx(math.log(257))
    quarter = pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))
    assert unigram_entropy(np.array([30, 0, 0, 10])) == unigram_entropy(np.array([0.75, 0.25])) == quarter


def test_tokens_are_counted_across_chunks_up_to_a_limit():
    tokens = np.zeros((1 << 20) + 3, dtype=np.uint16)
    tokens[-3:] = [256, 1, 1]
    dataset = PackedDataset(TokenStream(tokens, np.array([0, tokens.size])), 8)
    counts = dataset.token_counts(1 << 30)
    assert counts.tolist() == np.bincount(tokens).tolist()
    assert dataset.token_counts(tokens.size - 2).tolist() == np.bincount(tokens[:-2]).tolist()
    assert dataset.num_tokens == tokens.size and dataset.num_documents == 1


def test_counts_of_different_lengths_add():
    assert add_counts(np.array([1, 2]), np.array([3, 0, 5])).tolist() == [4, 2, 5]


def test_joined_datasets_are_read_one_after_the_other():
    parts = [PackedDataset(stream_of(text), 3) for text in ("abcdefgh", "i", "jklm")]
    joined = JoinedDataset(parts)
    assert len(joined) == 3 + 1 + 2 and joined.seq_len == 3
    expected = [part.sample(index) for part in parts for index in range(len(part))]
    for index, sample in enumerate(expected):
        np.testing.assert_array_equal(joined.sample(index).input_ids, sample.input_ids)
        np.testing.assert_array_equal(joined.sample(index).labels, sample.labels)
    assert joined.num_documents == 3 and joined.num_tokens == 16
    assert joined.token_counts(100).sum() == 16 and joined.token_counts(100)[EOT] == 3
    assert joined.token_counts(8).sum() == 8 * 9 // 16 + 8 * 2 // 16 + 8 * 5 // 16
    for index in (-1, 6):
        with pytest.raises(AssertionError, match=f"sample {index} of 6"):
            joined.sample(index)
