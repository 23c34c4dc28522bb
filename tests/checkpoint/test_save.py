"""Saving: all ranks succeed or all fail with one reason, and nothing that was good is ever lost."""

import contextlib
import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from ms_zero.checkpoint import SaveError, Shard, directory, latest, open_checkpoint, save
from ms_zero.errors import UserError


def shards(value, parts=2, size=1000):
    step = size // parts
    array = np.full(step, value, np.float32)
    return [[(Shard.flat("w", (size,), "float32", i * step, (i + 1) * step), array)] for i in range(parts)]


def value_of(path, size=1000):
    values = open_checkpoint(path).read(Shard.whole("w", (size,), "float32"))
    assert (values == values[0]).all()
    return values[0]


def assert_all_failed(results, message):
    assert all(isinstance(result, SaveError) for result in results), results
    assert {str(result) for result in results} == {message}


@pytest.fixture
def good(tmp_path, world):
    """A root with one good checkpoint, as (root, a function that checks that it is all there is)."""
    (path, _) = world(2).save(tmp_path, 1, shards(1.0), {})

    def untouched():
        assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
        assert value_of(path) == 1.0

    return tmp_path, untouched


def failing(error):
    def make():
        raise error

    return make


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
        (RuntimeError("device lost"), "RuntimeError: device lost"),
    ],
)
def test_a_failure_on_any_rank_is_told_on_all(good, world, step, rank, error, reason):
    root, untouched = good
    parts = shards(2.0, parts=3, size=999)
    parts[rank][0] = (parts[rank][0][0], failing(error))
    results = world(3).save(root, step, parts, {})
    assert all(isinstance(result, SaveError) for result in results)
    assert len({str(result) for result in results}) == 1
    message = str(results[0])
    assert message.startswith(f"checkpoint of step {step} not saved: rank {rank}: ")
    assert message.endswith(reason) and "\n" not in message
    if isinstance(error, OSError):
        assert f"/rank-{rank:05d}-" in message
    assert results[rank].__cause__ is not None
    untouched()


def test_a_real_write_error_in_the_middle_of_a_file(good, world):
    """A file size limit makes the kernel refuse bytes of the large file of rank 1 only."""
    root, untouched = good
    large = np.zeros(1 << 20, np.float32)
    parts = [[], [(Shard.whole("w", large.shape, "float32"), large)]]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        results = world(2).save(root, 2, parts, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert all(isinstance(result, SaveError) for result in results)
    assert "rank 1: " in str(results[0]) and str(results[0]).endswith("File too large")
    untouched()


def test_several_failures_name_the_first_and_count_the_rest(good, world):
    root, untouched = good
    parts = [[(shard, failing(ValueError(rank)))] for rank, [(shard, _)] in enumerate(shards(2.0))]
    assert_all_failed(
        world(2).save(root, 2, parts, {}),
        "checkpoint of step 2 not saved: rank 0: ValueError: 0 (and 1 more ranks)",
    )
    untouched()


def test_a_root_that_cannot_be_made(tmp_path, world):
    (tmp_path / "file").write_text("keep me")
    assert_all_failed(
        world(2).save(tmp_path / "file" / "ckpt", 2, shards(2.0), {}),
        f"checkpoint of step 2 not saved: rank 0: {tmp_path}/file/ckpt: checkpoint folder cannot be read: "
        "Not a directory",
    )
    assert (tmp_path / "file").read_text() == "keep me"


def test_nodes_without_a_shared_folder_are_told(good, world, tmp_path_factory):
    root, untouched = good
    elsewhere = tmp_path_factory.mktemp("node1")
    results = world(2).save(None, 2, shards(2.0), {}, roots=[root, elsewhere])
    assert all("rank 1: " in str(r) and "a file system that all nodes share" in str(r) for r in results)
    untouched()


def test_a_tensor_that_no_rank_or_two_ranks_hold_is_refused(good, world):
    root, untouched = good
    one, two = shards(2.0)
    assert_all_failed(
        world(2).save(root, 2, [one, []], {}),
        "checkpoint of step 2 not saved: rank 0: w: 500 of 1000 elements are held by no rank",
    )
    untouched()
    results = world(3).save(root, 2, [one, two, two], {})
    assert all("w: rank 1 and rank 2 both hold the element at (500,)" in str(r) for r in results)
    untouched()


def test_ranks_out_of_step_are_refused(good, world):
    root, untouched = good
    meeting = world(2)

    results = meeting.run(lambda rank: meeting.save_rank(root, 2 + rank, rank, [], {}))
    assert all("ranks are at different steps: [2, 3]" in str(result) for result in results)
    untouched()


def test_ranks_with_different_states_are_refused_by_key(good, world):
    root, untouched = good
    states = [{"consumed": 64, "lr": 0.1, "seed": 1}, {"consumed": 64, "lr": 0.2}]
    assert_all_failed(
        world(2).save(root, 2, shards(2.0), states),
        "checkpoint of step 2 not saved: state differs between rank 0 and rank 1 at lr, seed; "
        "it must be the same on every rank",
    )
    untouched()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": {"b": [1, float("nan")]}}, r"state\.a\.b\[1\]: is nan, which JSON cannot hold"),
        ({"a": -float("inf")}, r"state\.a: is -inf"),
        ({"a": (1, 2)}, r"state\.a: is a tuple"),
        ({"a": {3: 4}}, r"state\.a: key 3 is a int"),
        ({"a": np.int64(1)}, r"state\.a: is a int64"),
        ({"a": np.float64(1)}, r"state\.a: is a float64"),
        ({"a": np.zeros(2)}, r"state\.a: is a ndarray"),
        ({"a": {1, 2}}, r"state\.a: is a set"),
    ],
)
def test_state_that_json_would_change_is_refused(good, world, state, message):
    root, untouched = good
    for result in world(2).save(root, 2, shards(2.0), state):
        with pytest.raises(SaveError, match=message):
            raise result
    untouched()


def test_state_comes_back_exactly(tmp_path, world):
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**64, 2000, np.uint64).view(np.float64)
    floats = [float(x) for x in bits[np.isfinite(bits)]] + [0.1, -0.0, 5e-324, 1.7976931348623157e308]
    others = {"int": -(2**100), "text": "é\n\udcff\0", "none": None, "deep": {"a": [{"b": True}]}}
    state = {"floats": floats, **others}
    (path,) = world(1).save(tmp_path, 1, [[]], state)
    back = open_checkpoint(path).state
    assert back == state
    assert np.signbit(back["floats"][-3])


def test_a_step_saved_again_replaces_the_old_one(tmp_path, world):
    (first, _) = world(2).save(tmp_path, 7, shards(1.0), {"run": 1})
    reader = open_checkpoint(first)
    (second, *_) = world(4).save(tmp_path, 7, shards(2.0, parts=4), {"run": 2})
    assert second == first and value_of(second) == 2.0
    assert open_checkpoint(second).state == {"run": 2}
    assert len(list(second.iterdir())) == 5
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000007"]
    with pytest.raises(UserError, match="cannot be read: No such file"):  # not the values of the new one
        reader.read(Shard.whole("w", (1000,), "float32"))


def test_a_file_in_the_place_of_the_step_is_not_overwritten(tmp_path, world):
    (tmp_path / "step-00000003").write_text("mine")
    results = world(2).save(tmp_path, 3, shards(1.0), {})
    assert all("rank 0: " in str(result) and "Not a directory" in str(result) for result in results)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000003"]
    assert (tmp_path / "step-00000003").read_text() == "mine"


def test_files_and_directories_reach_the_disk_before_the_rename(tmp_path, world, monkeypatch):
    """Order of the durable steps on one rank: data, manifest, its directory, rename, root."""
    log, fsync, rename = [], os.fsync, os.rename

    def logged_fsync(fd):
        log.append(Path(f"/proc/self/fd/{fd}").readlink().name.split("-")[0])
        fsync(fd)

    def logged_rename(source, target, **kwargs):
        log.append("RENAME")
        rename(source, target, **kwargs)

    monkeypatch.setattr(os, "fsync", logged_fsync)
    monkeypatch.setattr(os, "rename", logged_rename)
    world(1).save(tmp_path, 1, shards(1.0, parts=1), {})
    assert log == ["rank", "manifest.json", ".step", "RENAME", tmp_path.name.split("-")[0]]


def test_a_peer_that_dies_ends_the_save_and_leaves_nothing(good):
    """The exchange raises, as a communicator does when a peer is gone."""
    root, untouched = good
    calls = []

    def exchange(obj):
        calls.append(obj)
        if len(calls) == 2:
            raise ConnectionError("rank 1 is gone")
        return [obj, {**obj, "result": None}]

    with pytest.raises(ConnectionError):
        save(
            root,
            2,
            shards(2.0)[0],
            {},
            rank=0,
            world_size=2,
            exchange=exchange,
            barrier=lambda: pytest.fail("a barrier would hang"),
        )
    untouched()


def test_no_rank_returns_before_a_failed_save_is_cleaned_up(good, world, monkeypatch):
    root, untouched = good
    remove = shutil.rmtree

    def slow(path, **kwargs):
        time.sleep(0.05)
        remove(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", slow)
    meeting, ((shard, _),) = world(2), shards(2.0)[0]

    def left_behind(rank):
        with pytest.raises(SaveError):
            meeting.save_rank(root, 2, rank, [(shard, failing(ValueError()))], {})
        return list(root.glob(".step-*"))

    assert meeting.run(left_behind) == [[], []]
    untouched()


CALLS = ("mkdir", "write", "fsync", "rename", "replace", "unlink", "rmdir")


class Fault:
    """Replaces system calls of `os`; the chosen one fails, before or after it did its work."""

    def __init__(self, patch, chosen, error, *, after):
        self.fired, self._count, self._chosen, self._error, self._after = False, 0, chosen, error, after
        for name in CALLS:
            patch.setattr(os, name, self._wrap(getattr(os, name)))

    def _wrap(self, call):
        def wrapped(*args, **kwargs):
            self._count += 1
            chosen = self._count == self._chosen
            self.fired |= chosen
            if chosen and not self._after:
                raise self._error
            result = call(*args, **kwargs)
            if chosen:
                raise self._error
            return result

        return wrapped


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("kind", ["error before", "interrupt after"])
def test_a_failure_at_any_system_call_leaves_the_old_or_the_new(tmp_path, world, monkeypatch, step, kind):
    after = kind == "interrupt after"
    error = KeyboardInterrupt() if after else OSError(errno.EIO, "Input/output error")
    outcomes, fired, chosen = [], True, 0
    while fired:
        chosen += 1
        root = tmp_path / str(chosen)
        world(1).save(root, 1, shards(1.0, parts=1), {})
        with monkeypatch.context() as patch:
            fault, saved = Fault(patch, chosen, error, after=after), False
            with contextlib.suppress(SaveError, KeyboardInterrupt):
                world(1).save_rank(root, step, 0, shards(2.0, parts=1)[0], {})
                saved = True
        fired = fault.fired
        outcomes.append(value_of(latest(root)))
        assert value_of(root / "step-00000001") in ((1.0, 2.0) if step == 1 else (1.0,))
        assert outcomes[-1] == 2.0 or not saved
        if not saved and not after:
            assert not list(root.glob(".step-*"))
            assert outcomes[-1] == 2.0 or len(list((root / "step-00000001").iterdir())) == 2
    # At least these calls; Python 3.10 makes directories without os.mkdir, so that one cannot fail here.
    assert outcomes == sorted(outcomes) and set(outcomes) == {1.0, 2.0} and len(outcomes) >= 8


def dead_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


@pytest.fixture
def zombie():
    """A process that has ended but was not waited for, as (pid, start time)."""
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = directory._start_time(str(child.pid))
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    yield child.pid, started
    child.wait()


def test_only_temporary_directories_of_dead_processes_of_this_machine_are_removed(tmp_path, world, zombie):
    machine, pid = directory._machine(), os.getpid()
    started = directory._start_time(str(pid))
    dead, unwaited, live, reused, elsewhere, foreign = (
        tmp_path / f".step-00000009.tmp-{machine}-{dead_process()}-123-0123abcd",
        tmp_path / f".step-00000009.tmp-{machine}-{zombie[0]}-{zombie[1]}-0123abcd",
        tmp_path / f".step-00000009.tmp-{machine}-{pid}-{started}-0123abcd",
        tmp_path / f".step-00000009.tmp-{machine}-{pid}-{int(started) + 1}-0123abcd",
        tmp_path / ".step-00000009.tmp-00000000-1-123-0123abcd",
        tmp_path / ".step-00000009.tmp-mine",
    )
    for path in (dead, unwaited, live, reused, elsewhere, foreign):
        path.mkdir()
        (path / "rank-00000.safetensors").write_text("x")
    world(2).save(tmp_path, 1, shards(1.0), {})
    assert not any(path.exists() for path in (dead, unwaited, reused))
    assert all(path.exists() for path in (live, elsewhere, foreign))
    assert latest(tmp_path).name == "step-00000001"


# Saves steps 1, 2, 2, 3, 3, 4, ... (every one but the first twice) until it is killed. Two ranks as threads.
ENDLESS = """
import sys, threading, json
import numpy as np
from ms_zero.checkpoint import Shard, latest, open_checkpoint, save
root, meet, posted = sys.argv[1], threading.Barrier(2), [None, None]
def exchange(rank, obj):
    posted[rank] = json.dumps(obj)
    meet.wait()
    both = [json.loads(text) for text in posted]
    meet.wait()
    return both
found = latest(root)
value = open_checkpoint(found).state["value"] if found else 0
def run(rank, value):
    while True:
        value += 1
        half = np.full(20000, value, np.float32)
        shard = Shard.flat("w", (40000,), "float32", rank * 20000, (rank + 1) * 20000)
        path = save(root, value // 2 + 1, [(shard, half)], {"value": value}, rank=rank, world_size=2,
                    exchange=lambda obj: exchange(rank, obj), barrier=meet.wait)
        if rank == 0:
            print(value, flush=True)
threading.Thread(target=run, args=(1, value), daemon=True).start()
run(0, value)
"""


def test_kill_at_random_moments_never_loses_a_checkpoint(tmp_path):
    rng = np.random.default_rng(0)
    best = 0
    for _ in range(10):
        command = [sys.executable, "-c", ENDLESS, str(tmp_path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            first = child.stdout.readline()  # the first save is through: the next ones are under way
            killer = threading.Timer(float(rng.uniform(0, 0.06)), child.kill)
            killer.start()
            reported = [int(line) for line in [first, *child.stdout] if line.endswith("\n")]
            killer.join()
        assert child.returncode == -signal.SIGKILL
        assert reported[0] > best  # it went on from the newest
        damaged = []
        path = latest(tmp_path, damaged.append)
        assert not damaged
        value = open_checkpoint(path).state["value"]
        assert value >= reported[-1]
        assert value_of(path, 40000) == value
        for older in tmp_path.glob("step-*"):
            assert value_of(older, 40000) == open_checkpoint(older).state["value"]
        assert len(list(tmp_path.glob(".step-*"))) <= 1  # the one of the process just killed
        best = value


# Forks one process per file operation of a save and kills it right before that operation.
EXHAUSTIVE = """
import os, signal, shutil, sys
import numpy as np
from ms_zero.checkpoint import Shard, latest, open_checkpoint, prune, save
base = sys.argv[1]
def put(root, step, value):
    w = np.full(10, value, np.float32)
    save(root, step, [(Shard.whole("w", (10,), "float32"), w)], {"value": value}, rank=0, world_size=1,
         exchange=lambda obj: [obj], barrier=lambda: None)
def killed_at(count, action):
    pid = os.fork()
    if pid == 0:
        seen = 0
        def hook(event, args):
            nonlocal seen
            if event == "open" or event.startswith(("os.", "shutil.")):
                seen += 1
                if seen == count:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        action()
        os._exit(0)
    return os.WIFSIGNALED(os.waitpid(pid, 0)[1])
def check(root, allowed):
    path = latest(root, lambda line: sys.exit(line))
    found = open_checkpoint(path)
    value = found.state["value"]
    assert value in allowed, value
    assert (found.read(Shard.whole("w", (10,), "float32")) == value).all()
    return value
for step in (1, 2):
    count, outcomes = 0, []
    killed = True
    while killed:
        count += 1
        root = f"{base}/{step}-{count}"
        put(root, 1, 1.0)
        killed = killed_at(count, lambda: put(root, step, 2.0))
        outcomes.append(check(root, (1.0, 2.0)))
        put(root, step, 3.0)
        assert check(root, (3.0,)) and not [n for n in os.listdir(root) if n.startswith(".")]
        files = os.listdir(f"{root}/step-{step:08d}")
        assert len(files) == 2, files
        shutil.rmtree(root)
    assert outcomes == sorted(outcomes) and set(outcomes) == {1.0, 2.0}, outcomes
    print("save", step, count)
count, killed = 0, True
while killed:
    count += 1
    root = f"{base}/prune-{count}"
    for step in (1, 2, 3):
        put(root, step, float(step))
    killed = killed_at(count, lambda: prune(root, 1))
    check(root, (3.0,))
    prune(root, 1)
    assert os.listdir(root) == ["step-00000003"]
    shutil.rmtree(root)
print("prune", count)
"""


def test_kill_before_every_single_file_operation(tmp_path):
    done = subprocess.run([sys.executable, "-c", EXHAUSTIVE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = {line.rpartition(" ")[0]: int(line.rpartition(" ")[2]) for line in done.stdout.splitlines()}
    assert counts.keys() == {"save 1", "save 2", "prune"} and all(n > 10 for n in counts.values()), counts
