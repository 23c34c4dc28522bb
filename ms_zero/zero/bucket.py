"""A bucket of parameters: their flat storage and their flat gradient.

Roles of the tensors (fp32 here; 1-D unless said otherwise):

- ``flat``: the parameters of the bucket, one after another, then padding. The model's parameters are views of
  it, so an in-place update of ``flat`` is seen by the model.
- pending gradients: what backward has delivered for the current microbatch, one tensor per slot.
- ``grad``: the accumulated gradient of the step on this rank, same length as ``flat``.
- chunk: the slice of a flat tensor that this rank owns (see ``layout.BucketLayout.chunk``).
"""

from collections.abc import Callable, Mapping

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from ms_zero.zero.layout import BucketLayout

# (parameter name, start, stop) -> the values of that flat range, fp32
ValueSource = Callable[[str, int, int], np.ndarray]


class Bucket:
    """Flat storage of the parameters of one layout and the accumulated gradient."""

    def __init__(self, layout: BucketLayout, params: Mapping[str, Parameter], values: ValueSource) -> None:
        """Move the parameters into one flat buffer.

        Args:
            layout: the slots; every slot's name must be a key of ``params``.
            params: logical name -> Parameter; their data become views of ``flat``.
            values: the initial values, asked for slot by slot.
        """
        self.layout = layout
        self.flat = Tensor(self.assemble(values))
        self.grad: Tensor | None = None
        self._pending: dict[str, Tensor] = {}
        for slot in layout.slots:
            params[slot.name].data = self.flat[slot.start : slot.stop].reshape(slot.shape)

    def load(self, values: ValueSource) -> None:
        """Overwrite the parameters in place."""
        self.flat.copy_(Tensor(self.assemble(values)))

    def assemble(self, values: ValueSource) -> np.ndarray:
        """The values of every slot and zero padding as one fp32 array."""
        buffer = np.zeros(self.layout.padded_size, np.float32)
        for slot in self.layout.slots:
            buffer[slot.start : slot.stop] = values(slot.name, 0, slot.stop - slot.start)
        return buffer

    def deliver(self, name: str, grad: Tensor) -> bool:
        """Take one parameter's gradient of the current microbatch; True when all slots have theirs."""
        assert name not in self._pending, f"two gradients for {name} in one backward"
        self._pending[name] = grad
        return len(self._pending) == len(self.layout.slots)

    def accumulate(self) -> None:
        """Add the pending gradients to ``grad``; a slot without one (unused parameter) counts as zero."""
        parts = [self._flat_gradient(slot.name, slot.stop - slot.start) for slot in self.layout.slots]
        padding = self.layout.padded_size - self.layout.size
        if padding:
            parts.append(_zeros(padding))
        flat = ops.cat(parts) if len(parts) > 1 else parts[0]
        self._pending.clear()
        self.grad = flat if self.grad is None else self.grad + flat

    def _flat_gradient(self, name: str, numel: int) -> Tensor:
        grad = self._pending.get(name)
        return _zeros(numel) if grad is None else grad.reshape((-1,))


def _zeros(numel: int) -> Tensor:
    return Tensor(np.zeros(numel, np.float32), ms.float32)
