import json

import numpy as np
import pytest

from ms_zero.data.loader import Loader
from ms_zero.data.packing import PackedDataset, Sample
from ms_zero.data.shuffle import Shuffle
from ms_zero.data.stream import TokenStream
from ms_zero.errors import UserError

FINGERPRINT = "ab" * 32


class Numbered:
    """Sample i is filled with the number i."""

    seq_len = 4

    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def sample(self, index):
        assert type(index) is int and 0 <= index < self.size
        return Sample(np.full(4, index, np.int32), np.full(4, index + 1, np.int32))


def loader_of(size=23, seed=1234, shuffle=True):
    return Loader(Numbered(size), seed=seed, fingerprint=FINGERPRINT, corpus="demo", shuffle=shuffle)


def read(loader, consumed, count):
    return loader.batch(consumed, count).input_ids[:, 0].tolist()


@pytest.mark.parametrize("micro_batch_size", [1, 2, 3, 8])
@pytest.mark.parametrize("dp_degree", [1, 2, 3, 4, 5])
def test_ranks_and_micro_batches_split_the_global_batch(dp_degree, micro_batch_size):
    reference = loader_of()
    for consumed in (0, 7, 22, 23, 100):
        for accumulation in (1, 2, 5):
            rows = {}
            for rank in range(dp_degree):
                loader = loader_of()
                for micro in range(accumulation):
                    batch = loader.microbatch(consumed, micro, rank, dp_degree, micro_batch_size)
                    assert batch.input_ids.shape == batch.labels.shape == (micro_batch_size, 4)
                    for number, row in zip(batch.sample_numbers.tolist(), batch.input_ids, strict=True):
                        assert number not in rows, "two ranks read the same sample"
                        rows[number] = int(row[0])
            count = dp_degree * accumulation * micro_batch_size
            assert sorted(rows) == list(range(consumed, consumed + count))
            assert [rows[number] for number in sorted(rows)] == read(reference, consumed, count)


@pytest.mark.parametrize("old", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("new", [1, 2, 3, 4, 5])
def test_restoring_under_another_degree_continues_the_exact_sequence(old, new):
    expected = read(loader_of(), 0, 150)
    seen = {}

    def train(loader, consumed, dp_degree, micro_batch_size, steps):
        for _ in range(steps):
            for rank in range(dp_degree):
                batch = loader.microbatch(consumed, 0, rank, dp_degree, micro_batch_size)
                seen.update(zip(batch.sample_numbers.tolist(), batch.input_ids[:, 0].tolist(), strict=True))
            consumed += dp_degree * micro_batch_size
        return consumed

    first = loader_of()
    consumed = train(first, 0, old, 3, 4)
    state = json.loads(json.dumps(first.cursor(consumed)))
    second = loader_of()
    consumed = train(second, second.check_cursor(state), new, 2, 5)
    assert seen == dict(enumerate(expected[:consumed]))


def test_any_sample_can_be_read_first():
    expected = read(loader_of(), 0, 70)
    for number in (0, 1, 22, 23, 24, 45, 46, 69):
        assert read(loader_of(), number, 1) == [expected[number]]
    backwards = loader_of()
    assert [read(backwards, number, 1)[0] for number in reversed(range(70))] == expected[::-1]


@pytest.mark.parametrize("size", [1, 2, 23])
def test_every_epoch_holds_every_sample_once(size):
    loader = loader_of(size)
    sequence = read(loader, 0, 4 * size)
    for epoch in range(4):
        assert sorted(sequence[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_a_giant_epoch_costs_nothing():
    loader = loader_of(10**12)
    assert len(set(map(loader.index_of, range(10**12 - 500, 10**12 + 500)))) == 1000


def test_epochs_differ_in_order():
    sequence = read(loader_of(), 0, 69)
    assert len({tuple(sequence[start : start + 23]) for start in (0, 23, 46)}) == 3


def test_a_batch_may_span_several_epochs():
    assert read(loader_of(3), 1, 10) == read(loader_of(3), 0, 11)[1:]


def test_order_is_the_seeds_shuffle():
    order = [Shuffle(7, "data order/epoch 1", 23)(place) for place in range(23)]
    assert read(loader_of(seed=7), 23, 23) == order
    assert read(loader_of(seed=8), 23, 23) != order


def test_without_shuffle_samples_come_in_order():
    assert read(loader_of(5, shuffle=False), 3, 9) == [3, 4, 0, 1, 2, 3, 4, 0, 1]


def test_batch_holds_inputs_labels_and_numbers():
    stream = TokenStream(np.arange(9, dtype=np.uint16), np.array([0, 9]))
    loader = Loader(PackedDataset(stream, 4), seed=0, fingerprint=FINGERPRINT, shuffle=False)
    assert len(loader) == 2
    batch = loader.batch(1, 2)
    assert batch.input_ids.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert batch.labels.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    assert batch.sample_numbers.tolist() == [1, 2]
    assert [array.dtype for array in batch[:3]] == [np.int32, np.int32, np.int64]


@pytest.mark.parametrize(
    ("consumed", "micro", "rank", "degree", "size"),
    [(-1, 0, 0, 1, 1), (0, -1, 0, 1, 1), (0, 0, 2, 2, 1), (0, 0, -1, 2, 1), (0, 0, 0, 1, 0)],
)
def test_impossible_requests_are_caught(consumed, micro, rank, degree, size):
    with pytest.raises(AssertionError):
        loader_of().microbatch(consumed, micro, rank, degree, size)


def test_cursor_of_another_loader_is_refused():
    state = loader_of().cursor(40)
    assert loader_of().check_cursor(state) == 40
    with pytest.raises(UserError, match=r"train.seed=1 would change"):
        loader_of(seed=1).check_cursor(state)
    other = Loader(Numbered(23), seed=1234, fingerprint="cd" * 32, corpus="other")
    with pytest.raises(UserError, match="another corpus"):
        other.check_cursor(state)
