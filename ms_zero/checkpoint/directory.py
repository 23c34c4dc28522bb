"""The folder that holds a run's checkpoints: names, durable changes, finding, pruning and cleaning.

::

    ROOT/step-00000010/                 a complete checkpoint: manifest.json and tensor files
    ROOT/.step-00000020.tmp-OWNER-ID/   being written; its owner is in the name
    ROOT/.step-00000005.del-ID/         being deleted; anyone may finish that

A temporary directory is removed by a later save only when its owner is known to be dead: it was made on this
machine, since this boot, in this pid namespace, by a process that no longer exists. One left by another
machine stays, because nothing here can tell whether that machine still writes; delete it by hand.
"""

import contextlib
import errno
import os
import re
import shutil
import socket
import uuid
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ms_zero.checkpoint.manifest import (
    Manifest,
    NotACheckpointError,
    UnknownVersionError,
    read_manifest,
)
from ms_zero.errors import UserError

_STEP = re.compile(r"step-(\d{8,})")
_TEMP = re.compile(r"\.step-\d{8,}\.tmp-([0-9a-f]{8})-(\d+)-(\d+)-[0-9a-f]{8}")
_DELETED = re.compile(r"\.step-\d{8,}\.del-[0-9a-f]{8}")


def step_name(step: int) -> str:
    """Directory name of a step's checkpoint."""
    return f"step-{step:08d}"


@dataclass(frozen=True)
class Survey:
    """The committed checkpoints under a root: complete ones from oldest to newest, and damaged ones."""

    complete: list[tuple[Path, Manifest]]
    damaged: list[tuple[Path, UserError]]


def survey(root: Path) -> Survey:
    """Look at every ``step-*`` directory; one without a manifest was never committed and is not mentioned.

    Raises:
        UserError: if the root cannot be listed.
    """
    found = Survey([], [])
    for path in _listed(root, _STEP):
        try:
            manifest = read_manifest(path)
            check_files(path, manifest)
        except NotACheckpointError:
            continue
        except UserError as error:
            found.damaged.append((path, error))
        else:
            found.complete.append((path, manifest))
    found.complete.sort(key=lambda item: (item[1].serial, item[1].step))
    return found


def check_files(directory: Path, manifest: Manifest) -> None:
    """Check that every tensor file is there with its full size.

    Raises:
        UserError: naming the file and the first tensor in it.
    """
    for name, expected in manifest.files.items():
        path = directory / name
        try:
            actual = path.stat().st_size
        except OSError as error:
            problem = f"cannot be opened: {error.strerror}"
        else:
            problem = f"has {actual} bytes of {expected}"
            if actual == expected:
                continue
        tensors = [entry.shard.name for entry in manifest.entries if entry.file == name]
        raise UserError(
            f"{path}: {problem}; it holds tensor {tensors[0]} and {len(tensors) - 1} more: "
            f"the checkpoint is incomplete, resume from another one"
        )


def latest(root: str | Path, on_skip: Callable[[str], None] | None = None) -> Path | None:
    """The complete checkpoint that was written last.

    Written last, not the highest step: after a run went back to step 10 and wrote step 20 again, a step 50
    left from before the return is not what to go on from.

    Args:
        root: folder of the run's checkpoints.
        on_skip: called with one line for every committed checkpoint that is damaged and therefore skipped.

    Returns:
        Its directory, or None if nothing was ever saved there.

    Raises:
        UserError: if the root cannot be read, if all its checkpoints are damaged, or if one needs another
            version of ms_zero: none of these may look like a fresh start.
    """
    found = survey(Path(root))
    for _, error in found.damaged:
        if isinstance(error, UnknownVersionError):
            raise error
        if on_skip is not None:
            on_skip(str(error))
    if not found.complete and found.damaged:
        path, error = found.damaged[-1]
        raise UserError(f"{root}: no usable checkpoint, {len(found.damaged)} damaged; {path.name}: {error}")
    return found.complete[-1][0] if found.complete else None


def next_serial(root: Path) -> int:
    """One more than the largest serial of the complete checkpoints."""
    return max((manifest.serial for _, manifest in survey(root).complete), default=0) + 1


def prune(root: str | Path, keep: int) -> list[Path]:
    """Delete the oldest complete checkpoints so that the ``keep`` written last remain.

    Damaged checkpoints neither count nor are deleted, so the newest complete one always survives. Call it on
    one rank, after a save. A deletion that is interrupted leaves no half checkpoint behind.

    Args:
        root: folder of the run's checkpoints.
        keep: how many to keep; 0 keeps all.

    Returns:
        The directories deleted.

    Raises:
        UserError: if ``keep`` is negative or a directory cannot be deleted.
    """
    root = Path(root)
    if keep < 0:
        raise UserError(f"checkpoint.keep is {keep}; expected 0 (keep all) or a positive number")
    removed = [path for path, _ in survey(root).complete[:-keep]] if keep else []
    try:
        for path in removed:
            # Renaming first: a directory that lost some of its files must not be taken for a checkpoint.
            os.rename(path, root / f".{path.name}.del-{uuid.uuid4().hex[:8]}")
        for path in _listed(root, _DELETED):
            shutil.rmtree(path)
    except OSError as error:
        raise UserError(f"{error.filename}: old checkpoint cannot be deleted: {error.strerror}") from error
    return removed


def make_temp(root: Path, step: int) -> Path:
    """Make the root if needed and a fresh temporary directory in it, named after this process."""
    make_directories(root)
    temp = root / f".{step_name(step)}.tmp-{_owner()}-{uuid.uuid4().hex[:8]}"
    temp.mkdir()
    return temp


def remove_stale(root: Path) -> None:
    """Remove temporary directories of processes that are known to be dead; see the module's rule."""
    machine = _machine()
    for path in _listed(root, _TEMP):
        owner_machine, pid, started = _TEMP.fullmatch(path.name).groups()
        if owner_machine == machine and _start_time(pid) != started:
            shutil.rmtree(path, ignore_errors=True)


def make_directories(path: Path) -> None:
    """Create a directory and its parents so that they survive a power failure."""
    missing = [p for p in (path, *path.parents) if not p.exists()]
    for directory in reversed(missing):
        directory.mkdir(exist_ok=True)
        sync_directory(directory.parent)


def sync_directory(path: Path) -> None:
    """Wait until the entries of a directory are on the disk, where the file system can promise that."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems
            raise
    finally:
        os.close(fd)


def _listed(root: Path, pattern: re.Pattern[str]) -> list[Path]:
    try:
        return sorted(path for path in root.iterdir() if pattern.fullmatch(path.name) and path.is_dir())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{root}: checkpoint folder cannot be read: {error.strerror}") from error


def _owner() -> str:
    pid = os.getpid()
    return f"{_machine()}-{pid}-{_start_time(str(pid)) or 0}"


def _machine() -> str:
    """Eight hex digits for this host, boot and pid namespace: where a process id has a meaning."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    if len(parts) < 3:  # not Linux: an id that nobody else has, so that nothing is ever judged stale
        return uuid.uuid4().hex[:8]
    return f"{zlib.crc32('|'.join(parts).encode()):08x}"


def _start_time(pid: str) -> str | None:
    """When a process of this machine began, in clock ticks since boot; None if there is none alive."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]
