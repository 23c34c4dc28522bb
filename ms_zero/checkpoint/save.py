"""Saving: every rank writes its own file, rank 0 commits when all have succeeded.

The three steps of :func:`save` each end with an exchange, so that all ranks go on together or fail together:

1. rank 0 makes a temporary directory next to the final one;
2. every rank writes its shards into it and waits for the disk;
3. rank 0 checks that the shards tile every tensor, writes the manifest and renames.

The folder must be on a file system that all nodes share; a rank that cannot see rank 0's directory says so.
"""

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ms_zero.checkpoint import directory, tensorfile
from ms_zero.checkpoint.layout import Shard, check_coverage
from ms_zero.checkpoint.manifest import (
    MANIFEST_NAME,
    Entry,
    Manifest,
    check_state,
    encode,
    state_checksums,
)
from ms_zero.checkpoint.tensorfile import ArraySource, TensorSpec
from ms_zero.errors import UserError

Exchange = Callable[[Any], list[Any]]


class SaveError(UserError):
    """A checkpoint was not saved; raised on every rank with the same message."""


def save(
    root: str | Path,
    step: int,
    shards: Iterable[tuple[Shard, ArraySource]],
    state: dict[str, Any],
    *,
    rank: int,
    world_size: int,
    exchange: Exchange,
    barrier: Callable[[], None],
) -> Path:
    """Save a checkpoint; collective over all ranks.

    It appears as ``root/step-00000010`` by one atomic rename. If that directory exists (a run went back and
    came to the step again), the new files are moved in beside the old ones and replacing the manifest is the
    one atomic change: before it the old checkpoint is whole, after it the new one. Others are never touched.

    Args:
        root: folder for checkpoints, shared by all nodes.
        step: optimizer steps done.
        shards: this rank's shards with their values: arrays [shard.array_shape] of the storage dtype
            (bfloat16 as its bits in uint16), or callables that make the array when it is written. All ranks'
            shards of a name must cover the tensor exactly once.
        state: JSON values, the same on every rank.
        rank: of this process.
        world_size: number of processes.
        exchange: gives every rank the JSON objects of all ranks in rank order.
        barrier: returns when every rank has called it.

    Returns:
        The directory.

    Raises:
        SaveError: on every rank, if any rank failed. Names the rank and its reason; the temporary directory
            is removed.
    """
    root, team = Path(root), _Team(step, world_size, exchange)
    temp: Path | None = None

    def open_temp() -> str:
        nonlocal temp
        directory.remove_stale(root)
        temp = directory.make_temp(root, step)
        return temp.name

    try:
        names = team.run(open_temp if rank == 0 else lambda: None)
        temp = root / names[0]
        reports = team.run(lambda: _write_own(temp, rank, shards, state))
        team.check_states([report["state"] for report in reports])
        team.run(lambda: _commit(root, temp, step, state, reports) if rank == 0 else None)
    except SaveError:
        if rank == 0:
            _discard(temp)
        barrier()  # nobody returns before the directory is gone
        raise
    except BaseException:  # a peer is gone or this process is being stopped: no collective would return
        if rank == 0:
            _discard(temp)
        raise
    return root / directory.step_name(step)


class _Team:
    """Runs the steps of one save so that all ranks learn of a failure on any."""

    def __init__(self, step: int, world_size: int, exchange: Exchange) -> None:
        self._step, self._world_size, self._exchange = step, world_size, exchange

    def run(self, action: Callable[[], Any]) -> list[Any]:
        """Every rank's result of ``action``, in rank order; raises on all ranks if it failed on any."""
        cause, reply = None, {"step": self._step, "error": None, "result": None}
        try:
            reply["result"] = action()
        except Exception as error:  # whatever it is, the other ranks wait for an answer
            cause, reply["error"] = error, _reason(error)
        replies = self._exchange(reply)
        assert len(replies) == self._world_size, "exchange must span all ranks"
        steps = [other["step"] for other in replies]
        if len(set(steps)) > 1:
            raise self._error(f"ranks are at different steps: {steps[:16]}")
        failed = [(rank, other["error"]) for rank, other in enumerate(replies) if other["error"] is not None]
        if failed:
            rank, reason = failed[0]
            others = f" (and {len(failed) - 1} more ranks)" if len(failed) > 1 else ""
            raise self._error(f"rank {rank}: {reason}{others}") from cause
        return [other["result"] for other in replies]

    def check_states(self, states: list[dict[str, int]]) -> None:
        """Raise on every rank, naming the keys, if the ranks' states differ; given as checksums per key."""
        for rank, state in enumerate(states):
            keys = sorted(key for key in {*state, *states[0]} if state.get(key) != states[0].get(key))
            if keys:
                raise self._error(
                    f"state differs between rank 0 and rank {rank} at {', '.join(keys)}; "
                    f"it must be the same on every rank"
                )

    def _error(self, reason: str) -> SaveError:
        return SaveError(f"checkpoint of step {self._step} not saved: {reason}")


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _write_own(
    temp: Path, rank: int, shards: Iterable[tuple[Shard, ArraySource]], state: dict[str, Any]
) -> dict[str, Any]:
    """Write this rank's file; returns what the manifest needs to know about it, as JSON values."""
    if not temp.is_dir():
        raise UserError(
            f"{temp}: made by rank 0 but not visible here; the checkpoint folder must be on a file system "
            f"that all nodes share"
        )
    check_state(state)
    shards = list(shards)
    report = {"state": state_checksums(state), "file": None, "bytes": 0, "shards": []}
    if not shards:
        return report
    # The id keeps the files of two saves of one step apart while both lie in the final directory.
    path = temp / f"rank-{rank:05d}-{temp.name[-8:]}.safetensors"
    specs = _specs([shard for shard, _ in shards])
    try:
        checksums = tensorfile.write(path, [(spec, source) for spec, (_, source) in zip(specs, shards)])
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    report.update(
        file=path.name,
        bytes=path.stat().st_size,
        shards=[_as_json(shard, s.key, crc) for (shard, _), s, crc in zip(shards, specs, checksums)],
    )
    return report


def _specs(shards: list[Shard]) -> list[TensorSpec]:
    """File keys: the tensor's name, with a number where this rank holds several shards of it."""
    specs, used = [], set()
    for shard in shards:
        key, number = shard.name, 0
        while key in used or key == "__metadata__":
            number += 1
            key = f"{shard.name}#{number}"
        used.add(key)
        specs.append(TensorSpec(key, shard.dtype, shard.array_shape))
    return specs


def _as_json(shard: Shard, key: str, checksum: int) -> list[Any]:
    place = [shard.offset, shard.shape, shard.flat_start, shard.flat_stop]
    return [shard.name, shard.global_shape, shard.dtype, *place, key, checksum]


def _commit(
    root: Path, temp: Path, step: int, state: dict[str, Any], reports: list[dict[str, Any]]
) -> None:
    manifest = Manifest(
        step=step,
        serial=directory.next_serial(root),
        state=state,
        files={report["file"]: report["bytes"] for report in reports if report["file"] is not None},
        entries=_merge(reports),
    )
    _write_durably(temp / MANIFEST_NAME, encode(manifest))
    directory.sync_directory(temp)
    final = root / directory.step_name(step)
    if final.exists():
        _replace(final, temp, manifest)
    else:
        os.rename(temp, final)
    directory.sync_directory(root)


def _merge(reports: list[dict[str, Any]]) -> list[Entry]:
    """All ranks' entries grouped by tensor, after checking that each tensor is covered exactly once."""
    tensors: dict[str, list[tuple[str, Entry]]] = {}
    for rank, report in enumerate(reports):
        for *fields, key, checksum in report["shards"]:
            entry = Entry(Shard(*fields), report["file"], key, checksum)
            tensors.setdefault(entry.shard.name, []).append((f"rank {rank}", entry))
    for held in tensors.values():
        check_coverage([entry.shard for _, entry in held], [label for label, _ in held])
    return [entry for held in tensors.values() for _, entry in held]


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _replace(final: Path, temp: Path, manifest: Manifest) -> None:
    """Turn an existing checkpoint directory into the new one; replacing the manifest is the atomic step."""
    try:
        for name in manifest.files:
            os.rename(temp / name, final / name)
        directory.sync_directory(final)
        os.replace(temp / MANIFEST_NAME, final / MANIFEST_NAME)
    except BaseException:
        if (temp / MANIFEST_NAME).exists():  # the old manifest is still in force
            for name in manifest.files:
                (final / name).unlink(missing_ok=True)
        raise
    directory.sync_directory(final)
    with suppress(OSError):  # from here on only space is at stake
        for path in final.glob("rank-*.safetensors"):
            if path.name not in manifest.files:
                path.unlink()
        temp.rmdir()


def _discard(temp: Path | None) -> None:
    if temp is not None:
        shutil.rmtree(temp, ignore_errors=True)
