"""Saved tensors in host memory between forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_zero.memory.packing import DEFAULT_MIN_BYTES, PackedActivations, pack_activations


def offload_activations(
    model: nn.Cell, *, cells: str | Sequence[str] | None = None, min_bytes: int = DEFAULT_MIN_BYTES
) -> PackedActivations:
    """Move what the chosen cells save to host memory, and back when backward needs it; exact.

    On a device with memory of its own both transfers wait for their end here; a copy stream that works ahead
    of backward would hide them (not run on an NPU). On CPU the ledger alone tells the two memories apart.
    Recompute first, then this: the inputs that recompute keeps are moved. For the arguments see
    `ms_zero.memory.packing.pack_activations`.
    """
    return pack_activations(model, HostCodec(), cells=cells, min_bytes=min_bytes)


class HostCodec:
    """A copy in host memory, of any floating-point or bool dtype."""

    def takes(self, tensor: Tensor) -> bool:
        """See `Codec`."""
        return tensor.is_floating_point() or tensor.dtype == ms.bool_

    def encode(self, tensor: Tensor) -> tuple[np.ndarray, int, int]:
        """See `Codec`."""
        kept = np.array(tensor.asnumpy(), order="C")
        return kept, 0, kept.nbytes

    def decode(self, kept: np.ndarray) -> Tensor:
        """See `Codec`."""
        return Tensor.from_numpy(kept.copy())
