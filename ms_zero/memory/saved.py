"""Measuring what a forward pass keeps for backward."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore import Tensor

from ms_zero._compat import tape


@dataclass(frozen=True)
class SavedTensor:
    """One storage that backward will read; `shape` and `dtype` are those of the first tensor on it."""

    shape: tuple[int, ...]
    dtype: ms.Type
    bytes: int


def measure_saved(forward: Callable[[], Any]) -> tuple[list[SavedTensor], Any]:
    """Run `forward` under a tape; return each new storage that is kept for backward, and what it returned.

    Storages that exist before (weights, inputs, cached constants: run the forward once to build these) do
    not count, nor does a storage count twice. What an autograd function keeps without ``save_for_backward``
    is not seen. Other saved-tensor hooks inside `forward`, as offload registers them, take precedence.
    """
    # Held to the end: a storage that was freed meanwhile would lend its address to a new one.
    present = [tensor for tensor in live_tensors() if not tensor.is_meta]
    before = {_storage(tensor)[0] for tensor in present}
    found: dict[int, tuple[Tensor, int]] = {}

    def pack(tensor: Tensor) -> Tensor:
        address, size = _storage(tensor)
        detached = tensor.data
        if address not in before and size:
            found.setdefault(address, (detached, size))  # held, so that no address is used twice
        return detached

    with ms.saved_tensors_hooks(pack, lambda tensor: tensor), tape():
        result = forward()
    return [SavedTensor(tuple(t.shape), t.dtype, size) for t, size in found.values()], result


def live_tensors() -> list[Tensor]:
    """Every tensor that Python code can reach, parameters included."""
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), Tensor)]


def _storage(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.size()
