"""The manifest: which tensor lies where, and the state of the run. One JSON file, checked as a whole.

Layout of ``manifest.json``, version 1::

    {"format": "ms_zero checkpoint", "version": 1, "crc32": CRC-32 of the content's JSON text,
     "content": {"step": int, "serial": int, "state": {...},
                 "files": {FILE: bytes, ...},
                 "tensors": {NAME: {"dtype": ..., "shape": [...], "shards": [
                     {"file": FILE, "key": ..., "offset": [...], "shape": [...], "range": [start, stop],
                      "crc32": ...}, ...]}, ...}}}
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ms_zero.checkpoint.layout import Shard
from ms_zero.errors import UserError

MANIFEST_NAME = "manifest.json"
FORMAT = "ms_zero checkpoint"
VERSION = 1


class NotACheckpointError(UserError):
    """The directory has no manifest: not a checkpoint, or one that was never committed."""


class UnknownVersionError(UserError):
    """The checkpoint was written by a version of ms_zero that this one cannot read."""


@dataclass(frozen=True)
class Entry:
    """A stored shard: its file, its key in that file and the CRC-32 of its bytes."""

    shard: Shard
    file: str
    key: str
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint directory holds.

    Attributes:
        step: optimizer steps done.
        serial: grows by one with every checkpoint written into the same root; the newest has the largest.
        state: the run's state, JSON values only.
        files: name and size in bytes of every tensor file.
        entries: every stored shard.
    """

    step: int
    serial: int
    state: dict[str, Any]
    files: Mapping[str, int]
    entries: Sequence[Entry]


def encode(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``."""
    tensors: dict[str, Any] = {}
    for entry in manifest.entries:
        shard = entry.shard
        tensor = tensors.setdefault(
            shard.name, {"dtype": shard.dtype, "shape": shard.global_shape, "shards": []}
        )
        tensor["shards"].append(
            {
                "file": entry.file,
                "key": entry.key,
                "offset": shard.offset,
                "shape": shard.shape,
                "range": [shard.flat_start, shard.flat_stop],
                "crc32": entry.crc32,
            }
        )
    content = {
        "step": manifest.step,
        "serial": manifest.serial,
        "state": manifest.state,
        "files": dict(manifest.files),
        "tensors": tensors,
    }
    head = {"format": FORMAT, "version": VERSION, "crc32": _checksum(content), "content": content}
    return _dump(head).encode()


def read_manifest(directory: Path) -> Manifest:
    """Read and check the manifest of a checkpoint directory.

    Raises:
        NotACheckpointError: if there is none.
        UnknownVersionError: if another version of the format is needed.
        UserError: if it is unreadable or damaged.
    """
    path = directory / MANIFEST_NAME
    try:
        document = json.loads(path.read_bytes(), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise NotACheckpointError(f"{directory}: not a checkpoint: there is no {MANIFEST_NAME}") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: damaged: not valid JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise UserError(f"{path}: not the manifest of an ms_zero checkpoint")
    if document.get("version") != VERSION:
        raise UnknownVersionError(
            f"{path}: format version {document.get('version')!r}, this ms_zero reads version {VERSION}; "
            f"use the ms_zero that wrote it or a newer one"
        )
    content = document.get("content")
    if _checksum(content) != document.get("crc32"):
        raise UserError(f"{path}: damaged: its checksum does not match its content")
    try:
        return _decode(content)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{path}: content is not as expected ({error!r})") from error


def _decode(content: dict[str, Any]) -> Manifest:
    entries = []
    for name, tensor in content["tensors"].items():
        for stored in tensor["shards"]:
            shard = Shard(
                name,
                tensor["shape"],
                tensor["dtype"],
                stored["offset"],
                stored["shape"],
                *stored["range"],
            )
            entries.append(Entry(shard, stored["file"], stored["key"], int(stored["crc32"])))
    files = content["files"]
    for name in [*files, *(entry.file for entry in entries)]:
        if Path(name).name != name or name not in files:
            raise UserError(f"names the file {name!r}, which is not a listed file of the checkpoint")
    return Manifest(content["step"], content["serial"], content["state"], files, entries)


def check_state(value: Any, where: str = "state") -> None:
    """Check that JSON gives the value back unchanged.

    Floats survive exactly (shortest round-trip notation). Tuples, integer keys, numpy values and NaN or
    infinity do not survive and are refused instead of being changed on the way.

    Raises:
        UserError: naming the first place that would change.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise UserError(f"{where}: key {key!r} is a {type(key).__name__}; JSON keys are strings")
            check_state(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            check_state(item, f"{where}[{index}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{where}: is {value}, which JSON cannot hold; store None or a string")
    elif value is not None and type(value) not in (str, int, float, bool):
        raise UserError(
            f"{where}: is a {type(value).__name__}; a checkpoint's state holds dict, list, str, int, float, "
            f"bool and None"
        )


def state_checksums(state: dict[str, Any]) -> dict[str, int]:
    """Per top-level key a CRC-32 of the value's JSON text: equal values have equal checksums."""
    return {key: zlib.crc32(json.dumps(value, sort_keys=True).encode()) for key, value in state.items()}


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _checksum(content: Any) -> int:
    return zlib.crc32(_dump(content).encode())


def _dump(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
