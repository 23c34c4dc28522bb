import numpy as np
import pytest

from ms_zero.data import Batch, DocumentResets, Loader, PackedDataset, TokenStream
from ms_zero.data.packing import Sample
from ms_zero.errors import UserError

STARTS = np.array([[0, 0, 2, 2, 4], [0, 0, 0, 0, 0]], np.int32)


def test_positions_count_from_the_start_of_the_document():
    arguments = DocumentResets(positions=True).arguments(STARTS)
    assert list(arguments) == ["position_ids"]
    assert arguments["position_ids"].tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 3, 4]]
    assert arguments["position_ids"].dtype == np.int32


def test_attention_gets_the_first_position_that_it_may_see():
    arguments = DocumentResets(attention=True).arguments(STARTS)
    assert list(arguments) == ["document_starts"]
    assert arguments["document_starts"] is STARTS


def test_without_resets_a_model_is_told_nothing():
    assert DocumentResets().arguments(STARTS) == DocumentResets().arguments(None) == {}


@pytest.mark.parametrize("resets", [DocumentResets(True), DocumentResets(positions=True)])
def test_data_without_documents_is_refused(resets):
    with pytest.raises(UserError, match="this data has no borders"):
        resets.arguments(None)


def test_a_batch_stacks_the_starts_of_its_samples():
    stream = TokenStream(np.arange(12, dtype=np.uint16), np.array([0, 3, 7, 12]))
    loader = Loader(PackedDataset(stream, 4), seed=1, fingerprint="x", shuffle=False)
    batch = loader.batch(0, 2)
    assert batch.document_starts.tolist() == [[0, 0, 0, 3], [0, 0, 0, 3]]


def test_a_dataset_without_documents_gives_batches_without():
    class Plain:
        seq_len = 2

        def __len__(self):
            return 3

        def sample(self, index):
            return Sample(np.zeros(2, np.int32), np.zeros(2, np.int32))

    batch = Loader(Plain(), seed=1, fingerprint="x").batch(0, 2)
    assert isinstance(batch, Batch) and batch.document_starts is None
