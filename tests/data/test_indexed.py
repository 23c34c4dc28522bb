import os
import subprocess
import sys

import numpy as np
import pytest

from ms_zero.data.indexed import DTYPES, IndexedTokens, IndexedWriter, chunks
from ms_zero.errors import UserError

DOCUMENTS = [[1, 2, 3], [], [4], [5, 6, 7, 8, 9]]


def read_all(indexed):
    return [indexed.document(number).tolist() for number in range(len(indexed))]


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"])
def test_every_dtype_is_read(tmp_path, pairs, dtype):
    indexed = IndexedTokens(pairs.write_pair(tmp_path / "data", DOCUMENTS, dtype))
    assert indexed.header.dtype == np.dtype(dtype)
    assert read_all(indexed) == DOCUMENTS
    assert isinstance(indexed.tokens.base, np.memmap)


def test_codes_are_those_of_the_format(pairs):
    assert {dtype.str.replace("|", ""): code for code, dtype in DTYPES.items()} == pairs.CODES


def test_documents_of_several_sequences(tmp_path, pairs):
    indexed = IndexedTokens(pairs.write_pair(tmp_path / "data", DOCUMENTS, borders=[0, 1, 1, 4]))
    assert read_all(indexed) == [[1, 2, 3], [], [4, 5, 6, 7, 8, 9]]
    assert [indexed.document_of(position) for position in range(9)] == [0] * 3 + [2] * 6
    assert indexed.starts(0, 4).tolist() == [indexed.start_of(number) for number in range(4)] == [0, 3, 3, 9]


@pytest.mark.parametrize("name", ["data", "data.bin", "data.idx"])
def test_a_pair_is_named_by_prefix_or_either_file(tmp_path, pairs, name):
    pairs.write_pair(tmp_path / "data", DOCUMENTS)
    assert read_all(IndexedTokens(tmp_path / name)) == DOCUMENTS


def test_a_dot_in_the_prefix_stays(tmp_path, pairs):
    assert read_all(IndexedTokens(pairs.write_pair(tmp_path / "web.v1", DOCUMENTS))) == DOCUMENTS


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32])
def test_the_writer_writes_the_format(tmp_path, pairs, dtype):
    with IndexedWriter(tmp_path / "ours", dtype) as writer:
        writer.add(np.array([1, 2, 3], dtype), np.array([3, 0]))
        writer.add(np.array([4, 5, 6, 7, 8, 9], dtype), np.array([1, 5]))
    pairs.write_pair(tmp_path / "theirs", DOCUMENTS, np.dtype(dtype).str.replace("|", ""))
    for suffix in (".bin", ".idx"):
        ours, theirs = ((tmp_path / f"{name}{suffix}").read_bytes() for name in ("ours", "theirs"))
        assert ours == theirs
    assert writer.num_tokens == 9
    assert len(list(tmp_path.iterdir())) == 4


def test_a_writer_that_fails_leaves_the_old_pair_and_nothing_else(tmp_path, pairs):
    pairs.write_pair(tmp_path / "data", DOCUMENTS)
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "data", np.uint16) as writer:
        writer.add(np.array([1], np.uint16), np.array([1]))
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.bin", "data.idx"]
    assert read_all(IndexedTokens(tmp_path / "data")) == DOCUMENTS


def test_a_writer_names_the_target_it_cannot_write(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*none/data.bin and .idx: No such file"):
        IndexedWriter(tmp_path / "none" / "data", np.uint16)


def test_an_empty_pair(tmp_path, pairs):
    indexed = IndexedTokens(pairs.write_pair(tmp_path / "data", []))
    assert len(indexed) == 0 and indexed.tokens.size == 0 and len(indexed.fingerprint()) == 64


def damage_idx(change):
    def damage(prefix, pairs):
        path = prefix.with_name("data.idx")
        path.write_bytes(change(path.read_bytes()))

    return damage


def damage_bin(change):
    def damage(prefix, pairs):
        path = prefix.with_name("data.bin")
        path.write_bytes(change(path.read_bytes()))

    return damage


def index(**values):
    def damage(prefix, pairs):
        lengths = values.get("lengths", [3, 0, 1, 5])
        others = {key: value for key, value in values.items() if key != "lengths"}
        prefix.with_name("data.idx").write_bytes(pairs.index_bytes(lengths, **others))

    return damage


def missing(name):
    return lambda prefix, pairs: (prefix.parent / name).unlink()


def folder(name):
    def damage(prefix, pairs):
        (prefix.parent / name).unlink()
        (prefix.parent / name).mkdir()

    return damage


# name, damage, message
HOSTILE = [
    ("no bin", missing("data.bin"), r"data.bin does not exist"),
    ("no idx", missing("data.idx"), r"data.idx does not exist"),
    ("bin is a folder", folder("data.bin"), r"data.bin does not exist or is no file"),
    ("idx is a folder", folder("data.idx"), r"data.idx does not exist or is no file"),
    ("truncated bin", damage_bin(lambda data: data[:-3]), r"15 bytes, but data.idx .* 18 bytes: it is trunc"),
    ("empty bin", damage_bin(lambda data: b""), r"holds 0 bytes.*truncated"),
    ("longer bin", damage_bin(lambda data: data + b"x"), r"19 bytes.*the idx is of another bin"),
    ("bin of another dtype", damage_bin(lambda data: data * 2), r"int32 or float32 would fit, so the dtype"),
    ("empty idx", damage_idx(lambda data: b""), r"no index of token files: it starts with b''"),
    ("wrong magic", index(magic=b"NOTANIDX\0"), r"starts with b'NOTANIDX.*expected b'MMIDIDX"),
    ("text", damage_idx(lambda data: b"hello world, this is a longer text file"), r"no index of token files"),
    ("cut magic", damage_idx(lambda data: data[:4]), r"data.idx is truncated: 4 bytes"),
    ("cut header", damage_idx(lambda data: data[:20]), r"data.idx is truncated: 20 bytes, the header has 34"),
    ("cut tables", damage_idx(lambda data: data[:-1]), r"data.idx is truncated: 121 bytes, its header"),
    ("longer idx", damage_idx(lambda data: data + b"x"), r"bytes after its end"),
    ("modalities", damage_idx(lambda data: data + bytes(4)), r"modality for each sequence"),
    ("version", index(version=2), r"index version 2: expected 1"),
    ("code 0", index(code=0), r"dtype code 0: expected 1 to 8"),
    ("code 9", index(code=9), r"dtype code 9: expected 1 to 8"),
    ("wrong code", index(code=4, pointers=[0, 12, 12, 16]), r"uint16.* would fit, so the dtype is wrong"),
    ("no borders", index(borders=[]), r"no document borders"),
    ("negative length", index(lengths=[3, -1, 2, 5]), r"sequence 1 has length -1"),
    ("pointer out of line", index(pointers=[0, 6, 8, 8]), r"sequence 2 starts at byte 8, expected 6"),
    ("borders out of order", index(borders=[0, 3, 2, 4]), r"borders are not in order"),
    ("borders end early", index(borders=[0, 1, 2]), r"documents cover sequences 0 to 2, expected 0 to 4"),
    ("borders end late", index(borders=[0, 5]), r"documents cover sequences 0 to 5, expected 0 to 4"),
    ("borders start late", index(borders=[1, 4]), r"documents cover sequences 1 to 4"),
    ("another idx", index(lengths=[3, 4]), r"18 bytes, but data.idx describes 7 ids of uint16, 14 bytes"),
    ("astronomic count", damage_idx(lambda data: data[:18] + b"\xff" * 16 + data[34:]), r"is truncated"),
]


@pytest.mark.parametrize(("name", "damage", "message"), HOSTILE, ids=[case[0] for case in HOSTILE])
def test_damage_is_refused_in_one_line(tmp_path, pairs, name, damage, message):
    prefix = pairs.write_pair(tmp_path / "data", DOCUMENTS)
    damage(prefix, pairs)
    with pytest.raises(UserError, match=message) as caught:
        IndexedTokens(prefix)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("name", ["data.bin", "data.idx"])
def test_an_unreadable_file_is_refused(tmp_path, pairs, name):
    prefix = pairs.write_pair(tmp_path / "data", DOCUMENTS)
    (tmp_path / name).chmod(0)
    with pytest.raises(UserError, match=f"{name} cannot be read: Permission denied"):
        IndexedTokens(prefix)


def test_large_index_is_checked_across_chunks(tmp_path, pairs, monkeypatch):
    monkeypatch.setattr("ms_zero.data.indexed._CHUNK", 3)
    documents = [[number] * (number % 4) for number in range(11)]
    prefix = pairs.write_pair(tmp_path / "data", documents)
    assert read_all(IndexedTokens(prefix)) == documents
    lengths = [len(document) for document in documents]
    pointers = [2 * sum(lengths[:number]) for number in range(11)]
    for number in range(11):
        wrong = [pointer + 2 * (place == number) for place, pointer in enumerate(pointers)]
        (tmp_path / "data.idx").write_bytes(pairs.index_bytes(lengths, pointers=wrong))
        with pytest.raises(UserError, match=f"sequence {number} starts at byte {wrong[number]}, expected"):
            IndexedTokens(prefix)
    for number in range(1, 11):
        borders = list(range(12))
        borders[number], borders[number + 1] = number + 1, number
        (tmp_path / "data.idx").write_bytes(pairs.index_bytes(lengths, borders=borders))
        with pytest.raises(UserError, match=r"not in order|documents cover"):
            IndexedTokens(prefix)


def test_the_fingerprint_follows_the_content_not_the_place(tmp_path, pairs):
    def print_of(name, documents, dtype="<u2", **values):
        return IndexedTokens(pairs.write_pair(tmp_path / name, documents, dtype, **values)).fingerprint()

    first = print_of("a", DOCUMENTS)
    assert print_of("b", DOCUMENTS) == first
    others = [
        print_of("c", [[1, 2, 3], [], [4], [5, 6, 7, 8, 8]]),
        print_of("d", [[1, 2, 3], [4], [], [5, 6, 7, 8, 9]]),
        print_of("e", DOCUMENTS, borders=[0, 2, 4]),
        print_of("f", DOCUMENTS, "<i2"),
    ]
    assert len({first, *others}) == 5


def test_the_fingerprint_of_a_large_file_reads_little_of_it(tmp_path, pairs):
    prefix = tmp_path / "data"
    count = 1 << 30
    with (tmp_path / "data.bin").open("wb") as file:
        file.truncate(2 * count)
    (tmp_path / "data.idx").write_bytes(pairs.index_bytes([count]))
    first = IndexedTokens(prefix).fingerprint()
    for place in (0, 2 * count - 1):
        with (tmp_path / "data.bin").open("r+b") as file:
            file.seek(place)
            file.write(b"\x01")
        changed = IndexedTokens(prefix).fingerprint()
        assert changed != first
        first = changed


def test_chunks_cover_an_array():
    pieces = list(chunks(np.arange(10), 4))
    assert [start for start, _ in pieces] == [0, 4, 8]
    assert np.concatenate([piece for _, piece in pieces]).tolist() == list(range(10))


def test_what_a_killed_writer_left_is_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    orphans = [tmp_path / f".a[1].{kind}.{dead.pid}.part" for kind in ("bin", "idx")]
    others = [tmp_path / f".a[1].bin.{os.getppid()}.part", tmp_path / f".b.bin.{dead.pid}.part"]
    for path in [*orphans, *others]:
        path.write_bytes(b"half")
    with IndexedWriter(tmp_path / "a[1]", np.uint16):
        assert [path.exists() for path in [*orphans, *others]] == [False, False, True, True]
