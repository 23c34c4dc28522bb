"""Which sample goes where: a deterministic order that does not depend on the layout.

Training consumes an endless sequence of samples, numbered from 0. Number s is in epoch ``s // N`` of a
dataset of N samples, at place ``s % N`` of that epoch's own order. The loader keeps no position: the count of
consumed samples is the whole state, so a run can go on from any sample with any data-parallel degree.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from ms_zero.data.cursor import Cursor, check_cursor
from ms_zero.data.packing import Sample
from ms_zero.data.shuffle import Shuffle


class Dataset(Protocol):
    """A finite, indexed set of samples of equal length."""

    @property
    def seq_len(self) -> int:
        """Positions per sample."""
        ...

    def __len__(self) -> int: ...

    def sample(self, index: int) -> Sample:
        """Sample `index`, ``0 <= index < len(self)``."""
        ...


class Batch(NamedTuple):
    """Consecutive samples of the sequence.

    Attributes:
        input_ids: int32[B, T].
        labels: int32[B, T], -100 where a position does not count in the loss.
        sample_numbers: int64[B], the place of each row in the sequence.
        document_starts: int32[B, T], see :class:`~ms_zero.data.packing.Sample`; None when samples have none.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    sample_numbers: np.ndarray
    document_starts: np.ndarray | None = None


class SampleSequence(ABC):
    """An endless sequence of samples of which any part can be read; it keeps no position."""

    def __init__(self, *, seq_len: int, seed: int, fingerprint: str, corpus: str) -> None:
        """Describe the sequence.

        Args:
            seq_len: positions per sample.
            seed: of the order.
            fingerprint: identity of the samples, for cursors.
            corpus: where they come from, for messages.
        """
        self._cursor_at_start = Cursor(0, fingerprint, seed, seq_len, corpus)

    @abstractmethod
    def __len__(self) -> int:
        """Samples after which the first one comes again."""

    @abstractmethod
    def sample(self, sample_number: int) -> Sample:
        """The sample at a place in the sequence."""

    def batch(self, consumed: int, count: int) -> Batch:
        """Samples number `consumed` to ``consumed + count - 1``; `count` is at least 1."""
        assert consumed >= 0 and count >= 1, f"{count} samples after {consumed}"
        numbers = range(consumed, consumed + count)
        samples = [self.sample(number) for number in numbers]
        starts = [sample.document_starts for sample in samples]
        return Batch(
            np.stack([sample.input_ids for sample in samples]),
            np.stack([sample.labels for sample in samples]),
            np.array(numbers, dtype=np.int64),
            None if any(row is None for row in starts) else np.stack(starts),
        )

    def microbatch(
        self, consumed: int, micro_index: int, dp_rank: int, dp_degree: int, micro_batch_size: int
    ) -> Batch:
        """Micro-batch `micro_index` of the step that starts after `consumed` samples, for one rank.

        Over all ranks and over micro indices ``0 .. m-1`` the batches hold samples ``consumed`` to
        ``consumed + m * dp_degree * micro_batch_size - 1``, each once.
        """
        assert micro_index >= 0, f"micro index {micro_index}"
        assert 0 <= dp_rank < dp_degree, f"data-parallel rank {dp_rank} of {dp_degree}"
        start = (micro_index * dp_degree + dp_rank) * micro_batch_size
        return self.batch(consumed + start, micro_batch_size)

    def cursor(self, consumed: int) -> dict[str, int | str]:
        """What a checkpoint stores to go on after `consumed` samples, as a JSON object."""
        return replace(self._cursor_at_start, consumed_samples=consumed).state()

    def check_cursor(self, state: Mapping[str, Any]) -> int:
        """The consumed samples of a stored cursor.

        Raises:
            UserError: the cursor is damaged or belongs to another sequence of samples: another corpus, split,
                tokenizer, seed or sample length.
        """
        return check_cursor(state, self._cursor_at_start)


class Loader(SampleSequence):
    """Reads a dataset as an endless sequence of samples, each exactly once per epoch."""

    def __init__(
        self, dataset: Dataset, *, seed: int, fingerprint: str, corpus: str = "", shuffle: bool = True
    ) -> None:
        """Read `dataset`, which holds at least one sample.

        Args:
            dataset: the samples.
            seed: with `shuffle`, the order of an epoch depends only on the seed and the number of the epoch.
            fingerprint: identity of the samples, for cursors.
            corpus: where they come from, for messages.
            shuffle: False reads every epoch in dataset order, as for validation.
        """
        assert len(dataset) > 0, "a loader needs samples"
        super().__init__(seq_len=dataset.seq_len, seed=seed, fingerprint=fingerprint, corpus=corpus)
        self.dataset = dataset
        self._seed, self._shuffle = seed, shuffle
        self._epoch, self._order = 0, self._epoch_order(0)

    def __len__(self) -> int:
        """Samples per epoch."""
        return len(self.dataset)

    def sample(self, sample_number: int) -> Sample:
        """The sample at a place in the sequence."""
        return self.dataset.sample(self.index_of(sample_number))

    def index_of(self, sample_number: int) -> int:
        """Dataset index of a place in the sequence of samples."""
        epoch, place = divmod(sample_number, len(self.dataset))
        if not self._shuffle:
            return place
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self._epoch_order(epoch)
        return self._order(place)

    def _epoch_order(self, epoch: int) -> Shuffle:
        return Shuffle(self._seed, f"data order/epoch {epoch}", len(self.dataset))
