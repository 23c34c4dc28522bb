"""Optimizer state in files: what a disk can do to a run, and in which order the file is used."""

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from ms_zero.errors import UserError
from ms_zero.optim import AdamW
from ms_zero.zero import nvme
from ms_zero.zero.nvme import BLOCK_BYTES, NvmeStates, check_space, padded_bytes
from tests.optim.models import give, sharded, weights

ROOT = Path(__file__).resolve().parents[2]


def vectors(size, value=0.0):
    return {"exp_avg": np.full(size, value, np.float32), "exp_avg_sq": np.full(size, value + 1, np.float32)}


def filled(folder, sizes=(3000, 10, 5000)):
    store = NvmeStates(folder)
    for index, size in enumerate(sizes):
        store.create(index, vectors(size, float(index)))
    return store


def add_one(store, count=3):
    with store.sweep():
        for index in range(count):
            with store.borrow(index) as state:
                for vector in state.values():
                    vector += 1


def test_sweeps_change_what_is_read_and_survive_many_rounds(tmp_path):
    store = filled(tmp_path)
    for _ in range(5):
        add_one(store)
    for index in range(3):
        np.testing.assert_array_equal(store.read(index, "exp_avg"), index + 5)
        np.testing.assert_array_equal(store.read(index, "exp_avg_sq"), index + 6)
    store.close()


def test_the_next_bucket_is_read_and_the_last_one_written_while_one_is_updated(tmp_path, monkeypatch):
    store, log, gate = filled(tmp_path, (100, 200, 300, 400)), [], threading.Event()
    read, write = store._read_region, store._write_region

    def slow_read(region, buffer):
        log.append(("read", region.numel))
        read(region, buffer)

    def slow_write(region, buffer):
        gate.wait(10)  # writing does not hold up reading ahead or updating
        write(region, buffer)
        log.append(("written", region.numel))

    monkeypatch.setattr(store, "_read_region", slow_read)
    monkeypatch.setattr(store, "_write_region", slow_write)
    with store.sweep():
        for index, size in enumerate((100, 200)):
            with store.borrow(index) as state:
                store._ahead[2].result()
                assert ("read", size + 100) in log  # ahead, during this update
                assert not any(verb == "written" for verb, _ in log)
                state["exp_avg"] += 1
        gate.set()
        for index in (2, 3):
            with store.borrow(index) as state:
                state["exp_avg"] += 1
    assert [entry for entry in log if entry[0] == "written"] == [("written", n) for n in (100, 200, 300, 400)]
    assert store.buffer_bytes == 3 * 2 * padded_bytes(400)
    store.close()


def test_a_full_disk_is_told_before_training(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    store = NvmeStates(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(UserError, match=r"cannot allocate 24576 bytes of .* No space left"):
        store.create(0, vectors(3000))
    store.close()


def test_a_limit_on_the_file_size_is_told_too(tmp_path):
    """In a process of its own: the limit cannot be raised again."""
    program = (
        "import resource, signal, sys, numpy as np\n"
        "from ms_zero.zero.nvme import NvmeStates\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))\n"
        "from ms_zero.errors import UserError\n"
        "try:\n"
        "    NvmeStates(sys.argv[1]).create(0, {'exp_avg': np.zeros(10000, np.float32)})\n"
        "except UserError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"},
    )
    assert "cannot allocate 40960 bytes of optimizer state" in done.stdout, done.stderr
    assert "File too large" in done.stdout and done.stdout.count("\n") == 1


def test_a_file_that_was_cut_short_ends_the_run(tmp_path):
    store = filled(tmp_path)
    os.ftruncate(store._file, BLOCK_BYTES)
    with pytest.raises(UserError, match=r"instead of .*: something cut it short; start again"):
        add_one(store)
    store.close()


@pytest.mark.parametrize("failing", ["preadv", "pwrite"])
def test_an_error_during_a_sweep_is_one_clear_line(tmp_path, monkeypatch, failing):
    rng = np.random.default_rng(0)
    model = sharded(matrix=rng.standard_normal((40, 50)), vector=rng.standard_normal(60))
    optimizer = AdamW(model, offload=NvmeStates(tmp_path))
    give(model, matrix=np.ones((40, 50)), vector=np.ones(60))
    optimizer.apply(lr=0.1)

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    give(model, matrix=np.ones((40, 50)), vector=np.ones(60))
    with monkeypatch.context() as patch:
        patch.setattr(nvme.os, failing, broken)
        if failing == "preadv":
            patch.setattr(nvme, "_pread_into", broken)
        with pytest.raises(UserError, match=r"cannot (read|write) \d+ bytes .* Input/output") as told:
            optimizer.apply(lr=0.1)
    assert "\n" not in str(told.value)
    optimizer.close()  # nothing runs on
    assert all(np.isfinite(value).all() for value in weights(model).values())


def test_short_transfers_are_continued(tmp_path, monkeypatch):
    store = filled(tmp_path)
    pread, pwrite = nvme._pread_into, os.pwrite
    monkeypatch.setattr(nvme, "_pread_into", lambda f, view, at: pread(f, view[:BLOCK_BYTES], at))
    monkeypatch.setattr(nvme.os, "pwrite", lambda f, view, at: pwrite(f, view[:BLOCK_BYTES], at))
    add_one(store)
    np.testing.assert_array_equal(store.read(2, "exp_avg_sq"), 4)
    store.close()


def test_a_file_system_without_direct_access_is_used_all_the_same(tmp_path, monkeypatch):
    real = os.open

    def refuse(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real(path, flags, *rest)

    monkeypatch.setattr(nvme.os, "open", refuse)
    store = filled(tmp_path)
    assert not store.is_direct
    add_one(store)
    np.testing.assert_array_equal(store.read(1, "exp_avg"), 2)
    store.close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below", "/proc/no"):
        with pytest.raises(UserError, match=r"nvme_path: .*: cannot create a file: .*; name a folder"):
            NvmeStates(folder)


def test_space_is_compared_with_what_is_needed(tmp_path):
    check_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(UserError, match=r"GB free, the .* needs 1000000000\.00 GB: free space"):
        check_space(tmp_path, 10**18)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_files_vanish_with_the_process(tmp_path, end):
    program = (
        "import sys, numpy as np\n"
        "from ms_zero.zero.nvme import NvmeStates\n"
        "store = NvmeStates(sys.argv[1])\n"
        "store.create(0, {'exp_avg': np.zeros(100000, np.float32)})\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3"},
    )
    assert process.stdout.readline() == b"ready\n"
    assert list(tmp_path.iterdir()) == []  # it never has a name
    process.send_signal(end)
    assert process.wait() == -end
    assert list(tmp_path.iterdir()) == []
    process.stdin.close()
    process.stdout.close()


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / "optimizer-1-abc.bin").write_text("mine")
    filled(tmp_path).close()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("optimizer-1-abc.bin", "mine")]


def test_closing_gives_the_descriptor_back(tmp_path):
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(5):
        store = filled(tmp_path)
        store.close()
        store.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before < soft
