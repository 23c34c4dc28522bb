"""Tensor files: the safetensors package reads them, and damage of any kind is named."""

import zlib

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from ms_zero.checkpoint import tensorfile
from ms_zero.checkpoint.tensorfile import DTYPES, TensorSpec
from ms_zero.errors import UserError


def every_dtype():
    rng = np.random.default_rng(0)
    tensors = []
    for i, (name, (_, storage)) in enumerate(DTYPES.items()):
        bits = rng.integers(0, 2 if name == "bool" else 256, (3 + i) * 5 * storage.itemsize, np.uint8)
        tensors.append((TensorSpec(f"t.{name}", name, (3 + i, 5)), bits.view(storage).reshape(3 + i, 5)))
    return [
        *tensors,
        (TensorSpec("scalar", "float32", ()), np.array(1.5, np.float32)),
        (TensorSpec("empty", "int32", (0, 4)), np.zeros((0, 4), np.int32)),
    ]


@pytest.fixture
def stored(tmp_path):
    tensors = every_dtype()
    path = tmp_path / "x.safetensors"
    return path, tensors, tensorfile.write(path, tensors)


def read(path, spec, checksum):
    found, position = tensorfile.read_header(path)[spec.key]
    assert found == spec
    return tensorfile.read(path, spec, position, checksum)


def test_every_dtype_comes_back_bitwise(stored):
    path, tensors, checksums = stored
    for (spec, array), checksum in zip(tensors, checksums):
        back = read(path, spec, checksum)
        assert back.dtype == array.dtype and back.tobytes() == array.tobytes(), spec.key
        assert checksum == zlib.crc32(array.tobytes())


def test_tensors_are_aligned_to_their_item_size(stored):
    path = stored[0]
    for spec, position in tensorfile.read_header(path).values():
        assert position % DTYPES[spec.dtype][1].itemsize == 0, spec.key


def test_the_safetensors_package_reads_the_file(stored):
    path, tensors, _ = stored
    entries = dict(safetensors.deserialize(path.read_bytes()))
    assert entries.keys() == {spec.key for spec, _ in tensors}
    for spec, array in tensors:
        entry = entries[spec.key]
        assert (entry["dtype"], tuple(entry["shape"])) == (DTYPES[spec.dtype][0], spec.shape)
        assert bytes(entry["data"]) == array.tobytes()


def test_a_file_of_the_safetensors_package_is_read(tmp_path):
    path = tmp_path / "theirs.safetensors"
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    safetensors.numpy.save_file({"w": array}, path, metadata={"format": "np"})
    back = read(path, TensorSpec("w", "float32", (3, 4)), zlib.crc32(array.tobytes()))
    assert np.array_equal(back.reshape(3, 4), array)


def test_non_contiguous_arrays_are_stored_in_row_major_order(tmp_path):
    array = np.arange(12, dtype=np.int32).reshape(3, 4).T
    spec = TensorSpec("w", "int32", (4, 3))
    (checksum,) = tensorfile.write(tmp_path / "x", [(spec, array)])
    assert np.array_equal(read(tmp_path / "x", spec, checksum).reshape(4, 3), array)


def test_large_tensors_are_written_in_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(tensorfile, "_CHUNK_BYTES", 100)
    array = np.random.default_rng(0).standard_normal(1234)
    spec = TensorSpec("w", "float64", (1234,))
    (checksum,) = tensorfile.write(tmp_path / "x", [(spec, array)])
    assert checksum == zlib.crc32(array.tobytes())
    assert np.array_equal(read(tmp_path / "x", spec, checksum), array)


def test_arrays_made_on_demand_are_made_one_at_a_time(tmp_path):
    alive = []

    class Tracked(np.ndarray):
        def __del__(self):
            alive.remove(id(self))

    def make():
        array = np.zeros(4, np.float32).view(Tracked)
        alive.append(id(array))
        assert len(alive) <= 2  # the one being replaced and this one
        return array

    tensorfile.write(tmp_path / "x", [(TensorSpec(f"w{i}", "float32", (4,)), make) for i in range(5)])


@pytest.mark.parametrize(
    "array", [np.zeros((3, 4)), np.zeros((3, 5), np.float32), np.zeros((3, 4), ">f4")], ids=str
)
def test_an_array_unlike_its_spec_is_refused(tmp_path, array):
    with pytest.raises(UserError, match=r"^w: array is .* its shard says float32\[3, 4\]"):
        tensorfile.write(tmp_path / "x", [(TensorSpec("w", "float32", (3, 4)), array)])


def test_an_unknown_dtype_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"^w: dtype 'complex64' cannot be stored; possible are float64"):
        tensorfile.write(tmp_path / "x", [(TensorSpec("w", "complex64", (1,)), np.zeros(1, np.complex64))])


def test_an_existing_file_is_never_overwritten(stored):
    path, tensors, _ = stored
    with pytest.raises(FileExistsError):
        tensorfile.write(path, tensors)


def test_every_cut_is_noticed(stored):
    """Cut the file at many places: reading everything never succeeds and always names the file."""
    path, tensors, checksums = stored
    whole = path.read_bytes()
    for length in [*range(0, len(whole), 37), len(whole) - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(UserError, match=rf"{path}.*(cut short|damaged)"):
            for (spec, _), checksum in zip(tensors, checksums):
                found, position = tensorfile.read_header(path)[spec.key]
                tensorfile.read(path, found, position, checksum)


def test_every_flipped_bit_of_the_data_is_noticed(stored):
    path, tensors, checksums = stored
    whole = bytearray(path.read_bytes())
    start = min(position for _, position in tensorfile.read_header(path).values())
    for at in range(start, len(whole), 11):
        whole[at] ^= 1 << (at % 8)
        path.write_bytes(whole)
        with pytest.raises(UserError, match=rf"{path}: tensor \S+ is damaged: CRC-32"):
            for (spec, _), checksum in zip(tensors, checksums):
                read(path, spec, checksum)
        whole[at] ^= 1 << (at % 8)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        b'{"w": 3}',
        b'{"w": {"dtype": "F9", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}',
        b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 3]}}',
        b'{"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}}',
        b'{"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"w": {"dtype": "F32", "shape": ["a"], "data_offsets": [0, 4]}}',
        b"\xff\xfe",
    ],
)
def test_hostile_headers_give_one_line(tmp_path, header):
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    with pytest.raises(UserError, match=rf"^{path}: [^\n]+$"):
        tensorfile.read_header(path)


def test_a_huge_header_length_is_not_allocated(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + b"{}")
    with pytest.raises(UserError, match="damaged or cut short"):
        tensorfile.read_header(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone\.safetensors: cannot be read: No such file"):
        tensorfile.read_header(tmp_path / "gone.safetensors")
