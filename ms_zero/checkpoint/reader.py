"""Reading: any shard of any layout, assembled from whatever shards are stored."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ms_zero.checkpoint import tensorfile
from ms_zero.checkpoint.directory import check_files, survey
from ms_zero.checkpoint.layout import Shard, intersections
from ms_zero.checkpoint.manifest import Entry, Manifest, NotACheckpointError, read_manifest
from ms_zero.checkpoint.tensorfile import TensorSpec
from ms_zero.errors import UserError


def open_checkpoint(path: str | Path) -> "Checkpoint":
    """Open a checkpoint directory for reading.

    Raises:
        UserError: if it is missing, not a checkpoint, of an unknown version, incomplete or damaged.
    """
    path = Path(path)
    if not path.is_dir():
        raise UserError(f"{path}: no such checkpoint directory")
    try:
        manifest = read_manifest(path)
    except NotACheckpointError as error:
        inside = survey(path).complete
        if not inside:
            raise
        raise NotACheckpointError(f"{error}; it holds checkpoints: did you mean {inside[-1][0]}?") from None
    check_files(path, manifest)
    return Checkpoint(path, manifest)


class Checkpoint:
    """A complete checkpoint. Nothing is read before :meth:`read`; what is read is checked.

    Attributes:
        path: its directory.
        step: optimizer steps done.
        state: the state that was saved.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path = path
        self.step = manifest.step
        self.state: dict[str, Any] = manifest.state
        self._entries: dict[str, list[Entry]] = {}
        for entry in manifest.entries:
            self._entries.setdefault(entry.shard.name, []).append(entry)
        self._headers: dict[str, dict[str, tuple[TensorSpec, int]]] = {}

    def names(self) -> tuple[str, ...]:
        """Names of the stored tensors."""
        return tuple(self._entries)

    def whole(self, name: str) -> Shard:
        """The shard that is the whole tensor ``name``: its global shape and dtype."""
        first = self._stored(name)[0].shard
        return Shard.whole(name, first.global_shape, first.dtype)

    def check_names(self, expected: Iterable[str]) -> None:
        """Check that exactly the expected tensors are stored.

        Raises:
            UserError: naming some of those that are missing or left over.
        """
        expected = set(expected)
        problems = [
            f"{len(names)} tensors {what}: {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}"
            for what, names in (
                ("are missing", expected - self._entries.keys()),
                ("are stored but not in this run", self._entries.keys() - expected),
            )
            if names
        ]
        if problems:
            raise UserError(f"{self.path}: does not fit this run: {'; '.join(problems)}")

    def read(self, shard: Shard) -> np.ndarray:
        """Read any shard of a stored tensor; values are the stored bits, never converted.

        Returns:
            A new array [shard.array_shape] of the storage dtype (bfloat16 as its bits in uint16).

        Raises:
            UserError: if the tensor is not stored, has another shape or dtype, or if its file is missing, cut
                short or damaged.
        """
        stored = self._stored(shard.name)
        first = stored[0].shard
        if (first.global_shape, first.dtype) != (shard.global_shape, shard.dtype):
            raise UserError(
                f"{self.path}: tensor {shard.name} is stored as {first.dtype}{list(first.global_shape)}, "
                f"this run needs {shard.dtype}{list(shard.global_shape)}; use the model it was saved from"
            )
        values = np.empty(shard.size, tensorfile.storage_dtype(shard.name, shard.dtype))
        copied = 0
        for entry in stored:
            shared = intersections(shard, entry.shard)
            if shared:
                source = self._load(entry)
                copied += sum(box.copy(values, source) for box in shared)
        if copied != shard.size:
            raise UserError(
                f"{self.path}: tensor {shard.name}: {copied} of {shard.size} elements are stored; "
                f"the manifest was edited or damaged"
            )
        return values.reshape(shard.array_shape)

    def _stored(self, name: str) -> list[Entry]:
        if name not in self._entries:
            near = difflib.get_close_matches(name, self._entries, n=1)
            hint = f"; the nearest is {near[0]}" if near else ""
            raise UserError(f"{self.path}: tensor {name} is not in this checkpoint{hint}")
        return self._entries[name]

    def _load(self, entry: Entry) -> np.ndarray:
        """The values of a stored shard, [shard.size]."""
        path, shard = self.path / entry.file, entry.shard
        try:
            if entry.file not in self._headers:
                self._headers[entry.file] = tensorfile.read_header(path)
            found = self._headers[entry.file].get(entry.key)
            if found is None or (found[0].dtype, found[0].shape) != (shard.dtype, shard.array_shape):
                raise UserError(f"{path}: its header does not hold {entry.key} as the manifest says: damaged")
            return tensorfile.read(path, *found, checksum=entry.crc32)
        except UserError as error:
            raise UserError(f"tensor {shard.name}: {error}") from error
