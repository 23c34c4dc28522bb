"""Optimizer state in a file (ZeRO-Infinity, Rajbhandari et al. 2021, arXiv:2104.07857).

One file a rank holds a region per bucket, one vector after another, each padded to the block size. A sweep
over the buckets works in three host buffers: while one is updated, the next bucket is read into another and
the one before is written from the third. Reads and writes leave the page cache out (O_DIRECT) where the file
system can; :attr:`NvmeStates.is_direct` says whether it does.

The file is allocated in full before training and has no name: it is unlinked as soon as it is open, so that
it disappears with the process, however that ends, and nobody else's file can be meant.
"""

import errno
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ms_zero.errors import UserError
from ms_zero.zero.states import NVME

BLOCK_BYTES = 4096
_ITEM_BYTES = 4
_NUM_BUFFERS = 3


@dataclass(frozen=True)
class _Region:
    """Where the vectors of one bucket lie in the file."""

    offset: int
    kinds: tuple[str, ...]
    numel: int

    @property
    def stride(self) -> int:
        """Bytes from one vector to the next."""
        return padded_bytes(self.numel)

    @property
    def size(self) -> int:
        """Bytes of the region."""
        return self.stride * len(self.kinds)

    def views(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """The vectors inside a buffer (uint8) that holds the region."""
        starts = {kind: number * self.stride for number, kind in enumerate(self.kinds)}
        length = self.numel * _ITEM_BYTES
        return {kind: buffer[start : start + length].view(np.float32) for kind, start in starts.items()}


class NvmeStates:
    """State in a file; see the module and `ms_zero.zero.states.StateStore`."""

    place = NVME

    def __init__(self, folder: str | Path) -> None:
        """Create the file in ``folder``, which is created if needed.

        Raises:
            UserError: the folder cannot be made or written.
        """
        self.folder = Path(folder)
        self._file, self.is_direct = _open_unnamed(self.folder)
        self._regions: dict[int, _Region] = {}
        self._size = 0
        self._buffers: list[np.ndarray] = []
        # One thread each, so that a write never waits for a read that was asked for later.
        self._reader = ThreadPoolExecutor(1, "nvme-read")
        self._writer = ThreadPoolExecutor(1, "nvme-write")
        self._free: list[np.ndarray] = []
        self._ahead: tuple[int, np.ndarray, Future] | None = None
        self._behind: list[tuple[np.ndarray, Future]] = []

    def create(self, index: int, vectors: Mapping[str, np.ndarray]) -> None:
        """See StateStore; allocates the region.

        Raises:
            UserError: the disk is full.
        """
        if not vectors:
            return
        assert not self._buffers, "all state is created before the first sweep"
        region = _Region(self._size, tuple(vectors), next(iter(vectors.values())).size)
        try:
            os.posix_fallocate(self._file, region.offset, region.size)
        except OSError as error:
            raise self._failure("allocate", region.size, error) from None
        self._size += region.size
        self._regions[index] = region
        for kind, values in vectors.items():
            self.write(index, kind, values)

    @property
    def kinds(self) -> Sequence[str]:
        """See StateStore."""
        return next((region.kinds for region in self._regions.values()), ())

    @contextmanager
    def sweep(self) -> Iterator[None]:
        """See StateStore.

        Raises:
            UserError: a read or a write failed; the state is lost then.
        """
        self._free = list(self._allocated())
        try:
            if self._regions:
                self._read_ahead(next(iter(self._regions)))
            yield
            while self._behind:
                self._reclaim()
        finally:
            self._settle()

    @contextmanager
    def borrow(self, index: int) -> Iterator[Mapping[str, np.ndarray]]:
        """See StateStore."""
        if index not in self._regions:
            yield {}
            return
        expected, buffer, reading = self._ahead
        assert index == expected, f"bucket {index} is borrowed, {expected} comes next"
        reading.result()
        self._ahead = None
        order = list(self._regions)
        following = order[order.index(index) + 1 :]
        if following:
            self._read_ahead(following[0])
        yield self._regions[index].views(buffer)
        writing = self._writer.submit(self._write_region, self._regions[index], buffer)
        self._behind.append((buffer, writing))

    def read(self, index: int, kind: str) -> np.ndarray:
        """See StateStore."""
        region = self._regions[index]
        buffer = _aligned_buffer(region.size)
        self._read_region(region, buffer)
        return region.views(buffer)[kind].copy()

    def write(self, index: int, kind: str, values: np.ndarray) -> None:
        """See StateStore."""
        region = self._regions[index]
        buffer = _aligned_buffer(region.stride)
        buffer[: region.numel * _ITEM_BYTES] = np.ascontiguousarray(values, np.float32).view(np.uint8)
        self._transfer(os.pwrite, buffer, region.offset + region.kinds.index(kind) * region.stride, "write")

    def held_bytes(self) -> Mapping[str, int]:
        """See StateStore; without padding."""
        return {
            kind: sum(region.numel * _ITEM_BYTES for region in self._regions.values()) for kind in self.kinds
        }

    @property
    def buffer_bytes(self) -> int:
        """Host memory for the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def close(self) -> None:
        """Give the space back; may be called again."""
        if self._file is None:
            return
        self._reader.shutdown()
        self._writer.shutdown()
        os.close(self._file)
        self._file = None
        self._buffers.clear()

    def _allocated(self) -> list[np.ndarray]:
        if not self._buffers and self._regions:
            largest = max(region.size for region in self._regions.values())
            count = min(_NUM_BUFFERS, len(self._regions))
            self._buffers = [_aligned_buffer(largest) for _ in range(count)]
        return self._buffers

    def _read_ahead(self, index: int) -> None:
        while not self._free:
            self._reclaim()
        buffer = self._free.pop()
        region = self._regions[index]
        self._ahead = (index, buffer, self._reader.submit(self._read_region, region, buffer))

    def _reclaim(self) -> None:
        """Wait for the oldest write and take its buffer back."""
        buffer, writing = self._behind.pop(0)
        writing.result()
        self._free.append(buffer)

    def _settle(self) -> None:
        """Let nothing run on after a sweep, also when it was broken off."""
        if self._ahead is not None:
            self._ahead[2].exception()
            self._ahead = None
        for _, writing in self._behind:
            writing.exception()
        self._behind.clear()

    def _read_region(self, region: _Region, buffer: np.ndarray) -> None:
        size = os.fstat(self._file).st_size
        if size != self._size:
            raise UserError(
                f"offload: the file in {self.folder} has {size} bytes instead of {self._size}: something cut "
                f"it short; start again from the last checkpoint"
            )
        self._transfer(_pread_into, buffer[: region.size], region.offset, "read")

    def _write_region(self, region: _Region, buffer: np.ndarray) -> None:
        self._transfer(os.pwrite, buffer[: region.size], region.offset, "write")

    def _transfer(self, operation: object, buffer: np.ndarray, offset: int, verb: str) -> None:
        """Move a whole buffer; the system may move less than asked for in one call."""
        done = 0
        while done < buffer.nbytes:
            try:
                moved = operation(self._file, memoryview(buffer)[done:], offset + done)
            except OSError as error:
                raise self._failure(verb, buffer.nbytes, error) from None
            if moved == 0:
                raise self._failure(verb, buffer.nbytes, OSError(errno.EIO, "end of file"))
            done += moved

    def _failure(self, verb: str, size: int, error: OSError) -> UserError:
        return UserError(
            f"offload: cannot {verb} {size} bytes of optimizer state in {self.folder}: {error.strerror}; "
            f"free space there or choose another offload.nvme_path, then resume from the last checkpoint"
        )


def padded_bytes(numel: int) -> int:
    """Bytes that a vector of this many fp32 elements takes in a file."""
    return -(-numel * _ITEM_BYTES // BLOCK_BYTES) * BLOCK_BYTES


def check_space(folder: str | Path, needed: int) -> None:
    """Refuse a folder whose file system has less than ``needed`` bytes free.

    Args:
        folder: may not exist yet.
        needed: bytes that all ranks of this machine are about to allocate there.

    Raises:
        UserError: with both numbers.
    """
    existing = Path(folder).absolute()
    while not existing.exists():
        existing = existing.parent
    space = os.statvfs(existing)
    free = space.f_bavail * space.f_frsize
    if free < needed:
        raise UserError(
            f"offload.nvme_path: {folder} has {_size(free)} free, the optimizer state of the ranks of this "
            f"machine needs {_size(needed)}: free space, lower offload.fraction or use more ranks"
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.2f} MB"


def _open_unnamed(folder: Path) -> tuple[int, bool]:
    """A new unlinked file and whether it bypasses the page cache."""
    path = folder / f"optimizer-{os.getpid()}-{os.urandom(6).hex()}.bin"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            file, is_direct = os.open(path, flags | os.O_DIRECT, 0o600), True
        except OSError as error:
            if error.errno != errno.EINVAL:  # the file system knows no O_DIRECT
                raise
            path.unlink(missing_ok=True)
            file, is_direct = os.open(path, flags, 0o600), False
        path.unlink()
    except OSError as error:
        raise UserError(
            f"offload.nvme_path: {folder}: cannot create a file: {error.strerror}; name a folder that can be "
            f"written"
        ) from None
    return file, is_direct


def _aligned_buffer(size: int) -> np.ndarray:
    """Zeroed bytes at the start of a memory page, as O_DIRECT needs."""
    return np.frombuffer(mmap.mmap(-1, max(size, BLOCK_BYTES)), np.uint8)[:size]


def _pread_into(file: int, view: memoryview, offset: int) -> int:
    return os.preadv(file, [view], offset)
