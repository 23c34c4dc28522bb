"""Where optimizer state lives: the device, the host, or files.

The state of a bucket is a set of named fp32 vectors of equal length ("master", "exp_avg", ...). A store holds
the states of all buckets and lends them out one bucket at a time, in bucket order, so that a store on a slow
medium can read ahead and write behind.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np
from mindspore import Tensor

#: Media that a store can hold state on.
DEVICE, HOST, NVME = "device", "host", "nvme"

Vector = Tensor | np.ndarray


class StateStore(Protocol):
    """Holds named fp32 vectors per bucket.

    Attributes:
        place: DEVICE (lends tensors), or HOST or NVME (lend arrays for the host to compute on).
    """

    place: str

    def create(self, index: int, vectors: Mapping[str, np.ndarray]) -> None:
        """Take the initial state of a bucket, in bucket order; the arrays now belong to the store."""

    @property
    def kinds(self) -> Sequence[str]:
        """Names of the vectors that every bucket has."""

    @contextmanager
    def sweep(self) -> Iterator[None]:
        """Wrap one pass over all buckets; on leaving, what was changed is back on its medium."""

    @contextmanager
    def borrow(self, index: int) -> Iterator[Mapping[str, Vector]]:
        """The state of one bucket, to be changed in place, inside :meth:`sweep`, in bucket order."""

    def read(self, index: int, kind: str) -> np.ndarray:
        """A copy of one vector, outside of a sweep."""

    def write(self, index: int, kind: str, values: np.ndarray) -> None:
        """Overwrite one vector, outside of a sweep."""

    def held_bytes(self) -> Mapping[str, int]:
        """Bytes held on the medium, by kind."""

    def close(self) -> None:
        """Let go of everything, including files."""


class DeviceStates:
    """State on the device."""

    place = DEVICE

    def __init__(self) -> None:
        self._states: dict[int, dict[str, Tensor]] = {}

    def create(self, index: int, vectors: Mapping[str, np.ndarray]) -> None:
        """See StateStore."""
        self._states[index] = {kind: Tensor(values) for kind, values in vectors.items()}

    @property
    def kinds(self) -> Sequence[str]:
        """See StateStore."""
        return list(next(iter(self._states.values()), ()))

    @contextmanager
    def sweep(self) -> Iterator[None]:
        """See StateStore."""
        yield

    @contextmanager
    def borrow(self, index: int) -> Iterator[Mapping[str, Tensor]]:
        """See StateStore."""
        yield self._states[index]

    def read(self, index: int, kind: str) -> np.ndarray:
        """See StateStore."""
        return self._states[index][kind].asnumpy().copy()

    def write(self, index: int, kind: str, values: np.ndarray) -> None:
        """See StateStore."""
        self._states[index][kind].copy_(Tensor(values))

    def held_bytes(self) -> Mapping[str, int]:
        """See StateStore."""
        return {kind: sum(state[kind].nbytes for state in self._states.values()) for kind in self.kinds}

    def close(self) -> None:
        """See StateStore."""
        self._states.clear()


class HostStates:
    """State in host memory (ZeRO-Offload, Ren et al. 2021, arXiv:2101.06840).

    Only gradients go to the host and only updated parameters come back. On CPU the two memories are one; the
    state is then still kept apart, updated by the host's kernel, and counted as the host's.
    """

    place = HOST

    def __init__(self) -> None:
        self._states: dict[int, dict[str, np.ndarray]] = {}

    def create(self, index: int, vectors: Mapping[str, np.ndarray]) -> None:
        """See StateStore."""
        self._states[index] = dict(vectors)

    @property
    def kinds(self) -> Sequence[str]:
        """See StateStore."""
        return list(next(iter(self._states.values()), ()))

    @contextmanager
    def sweep(self) -> Iterator[None]:
        """See StateStore."""
        yield

    @contextmanager
    def borrow(self, index: int) -> Iterator[Mapping[str, np.ndarray]]:
        """See StateStore."""
        yield self._states[index]

    def read(self, index: int, kind: str) -> np.ndarray:
        """See StateStore."""
        return self._states[index][kind].copy()

    def write(self, index: int, kind: str, values: np.ndarray) -> None:
        """See StateStore."""
        self._states[index][kind][...] = values

    def held_bytes(self) -> Mapping[str, int]:
        """See StateStore."""
        return {kind: sum(state[kind].nbytes for state in self._states.values()) for kind in self.kinds}

    def close(self) -> None:
        """See StateStore."""
        self._states.clear()
