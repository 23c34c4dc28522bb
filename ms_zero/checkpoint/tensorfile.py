"""Tensor files in the safetensors format, written and read piecewise with checksums.

The format is an 8-byte little-endian length, a JSON header and the raw little-endian data. It is written here
and not by the ``safetensors`` package because that needs all bytes of a file in memory at once, has no
bfloat16 for numpy and no durable write; the tests prove that the package reads these files.
"""

import json
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from ms_zero.errors import UserError

# Name -> (safetensors code, numpy dtype of the raw array). numpy has no bfloat16: its bits travel as uint16.
DTYPES: dict[str, tuple[str, np.dtype]] = {
    name: (code, np.dtype(storage))
    for name, code, storage in (
        ("float64", "F64", "<f8"),
        ("float32", "F32", "<f4"),
        ("float16", "F16", "<f2"),
        ("bfloat16", "BF16", "<u2"),
        ("int64", "I64", "<i8"),
        ("int32", "I32", "<i4"),
        ("int16", "I16", "<i2"),
        ("int8", "I8", "i1"),
        ("uint64", "U64", "<u8"),
        ("uint32", "U32", "<u4"),
        ("uint16", "U16", "<u2"),
        ("uint8", "U8", "u1"),
        ("bool", "BOOL", "?"),
    )
}

ArraySource = np.ndarray | Callable[[], np.ndarray]

_CHUNK_BYTES = 16 << 20
_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors package


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a file: its key, dtype name and shape."""

    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its data."""
        return prod(self.shape) * self.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return storage_dtype(self.key, self.dtype).itemsize


def storage_dtype(name: str, dtype: str) -> np.dtype:
    """The numpy dtype that holds ``dtype``; ``name`` is the tensor, for the message."""
    if dtype not in DTYPES:
        raise UserError(f"{name}: dtype {dtype!r} cannot be stored; possible are {', '.join(DTYPES)}")
    return DTYPES[dtype][1]


def write(path: Path, tensors: Sequence[tuple[TensorSpec, ArraySource]]) -> list[int]:
    """Write one file and wait until it is on the disk.

    Args:
        path: a file that does not exist yet.
        tensors: specs with unique keys; an array given as a callable is made when its turn comes and dropped
            afterwards, so that only one is in memory at a time.

    Returns:
        The CRC-32 of each tensor's bytes, in the order given.

    Raises:
        UserError: if an array does not have the dtype and number of elements of its spec.
        OSError: if the file cannot be written.
    """
    # Widest dtype first keeps every tensor aligned to its item size.
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i][0].itemsize)
    checksums = [0] * len(tensors)
    with path.open("xb", buffering=0) as file:
        _write_all(file.fileno(), _header([tensors[i][0] for i in order]))
        for i in order:
            spec, source = tensors[i]
            array = _checked(spec, source() if callable(source) else source)
            checksums[i] = _write_array(file.fileno(), array)
        os.fsync(file.fileno())
    return checksums


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries, end = {}, 0
    for spec in specs:
        start, end = end, end + spec.nbytes
        entries[spec.key] = {
            "dtype": DTYPES[spec.dtype][0],
            "shape": list(spec.shape),
            "data_offsets": [start, end],
        }
    assert len(entries) == len(specs) and "__metadata__" not in entries, "keys must be unique and free to use"
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _checked(spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """The array as contiguous bytes, after comparing it with its spec."""
    expected = storage_dtype(spec.key, spec.dtype)
    if array.dtype != expected or array.size != prod(spec.shape):
        raise UserError(
            f"{spec.key}: array is {array.dtype}{list(array.shape)}, its shard says "
            f"{spec.dtype}{list(spec.shape)} (stored as {expected})"
        )
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _write_array(fd: int, data: np.ndarray) -> int:
    checksum = 0
    for start in range(0, data.size, _CHUNK_BYTES):
        chunk = memoryview(data[start : start + _CHUNK_BYTES])
        checksum = zlib.crc32(chunk, checksum)
        _write_all(fd, chunk)
    return checksum


def _write_all(fd: int, data: bytes | memoryview) -> None:
    rest = memoryview(data)
    while len(rest):
        rest = rest[os.write(fd, rest) :]


def read_header(path: Path) -> dict[str, tuple[TensorSpec, int]]:
    """Read the header of a file: per key its spec and the position of its first byte.

    Raises:
        UserError: if the file is missing, unreadable, cut short or not a tensor file.
    """
    codes = {code: name for name, (code, _) in DTYPES.items()}
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise UserError(f"{path}: header of {length} bytes in a file of {size}: damaged or cut short")
            header = json.loads(file.read(length))
        found = {}
        for key, entry in header.items():
            if key != "__metadata__":
                spec = TensorSpec(key, codes[entry["dtype"]], tuple(entry["shape"]))
                start, stop = entry["data_offsets"]
                found[key] = (spec, 8 + length + start)
                if stop - start != spec.nbytes or not 0 <= start <= stop <= size - 8 - length:
                    raise UserError(f"{path}: tensor {key} lies outside the file: damaged or cut short")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except UserError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not a readable safetensors header ({error!r}): damaged file") from error
    return found


def read(path: Path, spec: TensorSpec, position: int, checksum: int) -> np.ndarray:
    """Read one tensor and compare its checksum.

    Args:
        path: the file.
        spec: the tensor.
        position: of its first byte, from :func:`read_header`.
        checksum: CRC-32 of its bytes.

    Returns:
        A one-dimensional array of the storage dtype.

    Raises:
        UserError: if the bytes are not all there or differ from what was written.
    """
    array = np.empty(prod(spec.shape), storage_dtype(spec.key, spec.dtype))
    data = memoryview(array.view(np.uint8))
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(position)
            done = 0
            while done < len(data):
                count = file.readinto(data[done:])
                if not count:
                    raise UserError(
                        f"{path}: tensor {spec.key} ends after {done} of {len(data)} bytes: cut short"
                    )
                done += count
    except OSError as error:
        raise UserError(f"{path}: tensor {spec.key} cannot be read: {error.strerror}") from error
    actual = zlib.crc32(data)
    if actual != checksum:
        raise UserError(
            f"{path}: tensor {spec.key} is damaged: CRC-32 is {actual:08x}, written was {checksum:08x}; "
            f"resume from another checkpoint"
        )
    return array
