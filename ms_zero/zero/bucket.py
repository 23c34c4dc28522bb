"""A bucket of parameters: their flat storage on this rank and the gradients on their way to it.

Roles of the tensors (1-D, padded so that they cut into equal chunks, one per rank of the shard group):

- ``store``: the parameters of the bucket, one after another, in the stored dtype: all of them, or under
  stage 3 this rank's chunk only.
- full: all of them whatever the stage. Under stage 3 it exists only inside a window (see ``windows``).
- pending gradients: what backward has delivered for the current microbatch, one tensor per parameter.
- held gradient: gradients of this rank added up over microbatches, same length as full; only when
  microbatches are not synchronised.
- reduced gradient: this rank's chunk of the sum over all ranks.

The parameters themselves are views of full, or of a cast of it.
"""

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_zero import kernels
from ms_zero.zero.convert import as_dtype
from ms_zero.zero.groups import Groups
from ms_zero.zero.layout import BucketLayout

# (parameter name, start, stop) -> the values of that flat range, fp32
ValueSource = Callable[[str, int, int], np.ndarray]


class Bucket:
    """Flat storage of the parameters of one layout, and their gradients."""

    def __init__(
        self,
        layout: BucketLayout,
        values: ValueSource,
        *,
        dtype: ms.Type,
        groups: Groups,
        is_sharded: bool,
        on_host: bool,
        has_gradient: bool,
    ) -> None:
        """Fill the store.

        Args:
            layout: the slots.
            values: the initial values, asked for range by range and never for more than the store holds.
            dtype: of the store.
            groups: who shares the parameters; this rank owns the chunk of its place in the shard group.
            is_sharded: whether the store is only that chunk.
            on_host: whether the store is in host memory.
            has_gradient: whether the parameters are trained.
        """
        self.layout, self.dtype, self.groups, self.has_gradient = layout, dtype, groups, has_gradient
        self._item_bytes = 4 if dtype == ms.float32 else 2
        self.is_sharded = is_sharded
        self.chunk = layout.chunk(groups.shard.index)
        self.stored = self.chunk if is_sharded else (0, layout.padded_size)
        initial = self.encode(self.assemble(values, *self.stored))
        # On CPU host and device are one memory; the store is still kept apart and copied like another's.
        self._host = initial.asnumpy().copy() if on_host else None
        self._device = None if on_host else initial
        self.held: Tensor | None = None
        self.reduced: Tensor | None = None
        self._pending: dict[str, Tensor] = {}

    @property
    def on_host(self) -> bool:
        """Whether the store is in host memory."""
        return self._host is not None

    @property
    def store(self) -> Tensor:
        """The stored parameters: the store itself, or a copy of it on the device if it is in host memory."""
        return Tensor.from_numpy(self._host.copy()) if self.on_host else self._device

    def write(self, values: Tensor) -> None:
        """Overwrite the store; ``values`` may be the store."""
        if self.on_host:
            self._host[...] = values.asnumpy()
        elif values is not self._device:
            kernels.overwrite(self._device, values)

    def fill(self, values: ValueSource) -> None:
        """Overwrite the store."""
        self.write(self.encode(self.assemble(values, *self.stored)))

    def encode(self, values: np.ndarray) -> Tensor:
        """A new tensor of the stored dtype."""
        return as_dtype(Tensor(values), self.dtype)

    def assemble(self, values: ValueSource, start: int, stop: int) -> np.ndarray:
        """The range ``[start, stop)`` of full as fp32, padded with zeros."""
        buffer = np.zeros(stop - start, np.float32)
        for piece in self.layout.pieces(start, stop):
            first = piece.slot.start + piece.start - start
            buffer[first : first + piece.stop - piece.start] = values(
                piece.slot.name, piece.start, piece.stop
            )
        return buffer

    def deliver(self, name: str, grad: Tensor) -> None:
        """Add to the gradient of one parameter in the current microbatch."""
        known = self._pending.get(name)
        self._pending[name] = grad if known is None else known + grad

    def flatten(self, dtype: ms.Type) -> Tensor:
        """Take the pending gradients as one tensor; a parameter without one (unused) counts as zero."""
        parts = [self._flat_gradient(slot.name, slot.stop - slot.start, dtype) for slot in self.layout.slots]
        padding = self.layout.padded_size - self.layout.size
        if padding:
            parts.append(_zeros(padding, dtype))
        self._pending.clear()
        return kernels.concat(parts) if len(parts) > 1 else parts[0]

    @property
    def full_bytes(self) -> int:
        """Bytes of full."""
        return self.layout.padded_size * self._item_bytes

    def drop_gradients(self) -> None:
        """Forget everything about gradients."""
        self._pending.clear()
        self.held = self.reduced = None

    def buffers(self) -> dict[str, int]:
        """Bytes that this bucket holds: "weights", "host_weights" and "gradients"."""
        stored = (self.stored[1] - self.stored[0]) * self._item_bytes
        gradients = [*self._pending.values(), self.held, self.reduced]
        return {
            "weights": 0 if self.on_host else stored,
            "host_weights": stored if self.on_host else 0,
            "gradients": sum(grad.nbytes for grad in gradients if grad is not None),
        }

    def _flat_gradient(self, name: str, numel: int, dtype: ms.Type) -> Tensor:
        grad = self._pending.get(name)
        return _zeros(numel, dtype) if grad is None else as_dtype(grad.reshape((-1,)), dtype)


def _zeros(numel: int, dtype: Any) -> Tensor:
    return as_dtype(Tensor(np.zeros(numel, np.float32)), dtype)
