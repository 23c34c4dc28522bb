"""Parameters and optimizer state of a sharded model as checkpoint shards, independent of the layout.

Everything is fp32 under logical names: "model.<parameter>" (the master weights where there are any),
"optim.<kind>.<parameter>". A checkpoint written under one stage, degree or precision loads under any other.
"""

from collections.abc import Iterator, Mapping

import mindspore as ms
import numpy as np

from ms_zero.checkpoint import Checkpoint, Shard
from ms_zero.optim.optimizer import MASTER, Optimizer
from ms_zero.zero.bucket import Bucket, ValueSource
from ms_zero.zero.convert import as_dtype
from ms_zero.zero.sharded import Sharded


def gradient_shards(sharded: Sharded) -> Iterator[tuple[Shard, np.ndarray]]:
    """This rank's part of the reduced gradient, loss scale taken out, between reduction and update."""
    for bucket in sharded.buckets:
        reduced = as_dtype(bucket.reduced, ms.float32).asnumpy() / np.float32(sharded.loss_scale)
        yield from _pieces(sharded, "", bucket, reduced, bucket.chunk)


def state_shards(sharded: Sharded, optimizer: Optimizer) -> Iterator[tuple[Shard, np.ndarray]]:
    """This rank's part of parameters and optimizer state; together the ranks cover all once."""
    for name, param in sharded.kept.items():
        if sharded.saves_kept(name):
            values = as_dtype(param, ms.float32).asnumpy().reshape(-1)
            yield _shard(sharded, "model.", name, 0, values.size), values
    for bucket in sharded.all_buckets:
        if not (bucket.has_gradient and MASTER in optimizer.kinds):
            values = as_dtype(bucket.store, ms.float32).asnumpy()
            yield from _pieces(sharded, "model.", bucket, values, bucket.stored)
    for index, bucket in enumerate(sharded.buckets):
        for kind in optimizer.kinds:
            values = optimizer.read(index, kind)
            yield from _pieces(sharded, _prefix(kind), bucket, values, sharded.owned(index))


def load_state(
    sharded: Sharded,
    optimizer: Optimizer,
    checkpoint: Checkpoint,
    elsewhere: Mapping[str, bool] | None = None,
) -> None:
    """Overwrite parameters and optimizer state with those of a checkpoint; `num_updates` is the caller's.

    ``elsewhere``: parameters that other ranks load, by name, and whether they are trained.

    Raises:
        UserError: the checkpoint lacks a tensor, has one more, or one of another shape.
    """
    names = {name: name in sharded.trained for name in (*sharded.names, *sharded.kept)}
    names |= elsewhere or {}
    trained = [name for name, is_trained in names.items() if is_trained]
    state = {f"{_prefix(kind)}{name}" for kind in optimizer.kinds for name in trained}
    checkpoint.check_names(state | {f"model.{name}" for name in names})
    weights = _stored_values(checkpoint, "model.", sharded)
    sharded.close_windows()
    for name, param in sharded.kept.items():
        sharded.write_kept(name, weights(name, 0, param.size))
    for bucket in sharded.all_buckets:
        bucket.fill(weights)
    for index, bucket in enumerate(sharded.buckets):
        for kind in optimizer.kinds:
            source = _stored_values(checkpoint, _prefix(kind), sharded)
            optimizer.write(index, kind, bucket.assemble(source, *sharded.owned(index)))


def _prefix(kind: str) -> str:
    """Of the checkpoint names of a kind of state: master weights are the model's weights."""
    return "model." if kind == MASTER else f"optim.{kind}."


def _pieces(
    sharded: Sharded, prefix: str, bucket: Bucket, values: np.ndarray, held: tuple[int, int]
) -> Iterator[tuple[Shard, np.ndarray]]:
    """What this rank saves of a bucket, one shard per parameter; ``values`` are those of ``held``."""
    for piece in bucket.layout.pieces(*sharded.saves(bucket)):
        first = piece.slot.start + piece.start - held[0]
        shard = _shard(sharded, prefix, piece.slot.name, piece.start, piece.stop)
        yield shard, values[first : first + piece.stop - piece.start]


def _shard(sharded: Sharded, prefix: str, name: str, start: int, stop: int) -> Shard:
    """A flat range of a parameter as it is on this rank."""
    shape = sharded.names[name] if name in sharded.names else tuple(sharded.kept[name].shape)
    box = sharded.placements.box(name, shape)
    return Shard(prefix + name, box.global_shape, "float32", box.offset, box.shape, start, stop)


def _stored_values(checkpoint: Checkpoint, prefix: str, sharded: Sharded) -> ValueSource:
    """Values of parameters as read from a checkpoint."""

    def read(name: str, start: int, stop: int) -> np.ndarray:
        return checkpoint.read(_shard(sharded, prefix, name, start, stop)).reshape(-1)

    return read
