import numpy as np
import pytest

from ms_zero.zero.layout import ParamSpec, plan_buckets

PARAMS = [
    ParamSpec("embed", (7, 4), key=False),
    ParamSpec("w1", (4, 4), key=True),
    ParamSpec("b1", (4,), key=False),
    ParamSpec("scale", (), key=False),
    ParamSpec("w2", (3, 5), key=True),
    ParamSpec("b2", (5,), key=False),
]


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("max_elements", [1, 10, 31, 1000])
def test_every_parameter_lies_in_exactly_one_slot_without_gaps(degree, max_elements):
    buckets = plan_buckets(PARAMS, max_elements=max_elements, degree=degree)
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert sorted((slot.name, slot.shape) for slot in slots) == sorted((p.name, p.shape) for p in PARAMS)
    for bucket in buckets:
        starts = [slot.start for slot in bucket.slots]
        assert starts == [0, *(slot.stop for slot in bucket.slots[:-1])]
        assert bucket.padded_size % degree == 0
        assert 0 <= bucket.padded_size - bucket.size < degree


def test_buckets_never_mix_keys_and_respect_the_limit():
    by_name = {spec.name: spec for spec in PARAMS}
    for bucket in plan_buckets(PARAMS, max_elements=20, degree=2):
        assert {by_name[slot.name].key for slot in bucket.slots} == {bucket.key}
        assert bucket.size <= 20 or len(bucket.slots) == 1


def test_buckets_come_in_the_order_in_which_backward_completes_them():
    buckets = plan_buckets(PARAMS, max_elements=16, degree=1)
    names = [[slot.name for slot in bucket.slots] for bucket in buckets]
    assert names == [["w2"], ["b2", "scale", "b1"], ["w1"], ["embed"]]


@pytest.mark.parametrize("degree", [1, 2, 3, 5])
def test_chunks_and_pieces_rebuild_every_parameter(degree):
    seen = {spec.name: np.zeros(spec.numel, int) for spec in PARAMS}
    for bucket in plan_buckets(PARAMS, max_elements=25, degree=degree):
        buffer = np.full(bucket.padded_size, -1)
        for slot in bucket.slots:
            buffer[slot.start : slot.stop] = np.arange(slot.stop - slot.start)
        for index in range(degree):
            start, stop = bucket.chunk(index)
            for piece in bucket.pieces(start, stop):
                first = piece.slot.start + piece.start
                values = buffer[first : first + piece.stop - piece.start]
                np.testing.assert_array_equal(values, np.arange(piece.start, piece.stop))
                seen[piece.slot.name][piece.start : piece.stop] += 1
    assert all((count == 1).all() for count in seen.values())


def test_a_degree_larger_than_the_bucket_leaves_ranks_without_pieces():
    (bucket,) = plan_buckets([ParamSpec("p", (2,))], max_elements=10, degree=4)
    assert bucket.padded_size == 4
    assert [list(bucket.pieces(*bucket.chunk(i))) for i in (2, 3)] == [[], []]
