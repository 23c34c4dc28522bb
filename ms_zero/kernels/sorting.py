"""Choices of experts in the order of the experts: by numpy on CPU, by MindSpore's operators on the device.

On a device only the numbers of rows come to the host, one for each expert, for the shapes of what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from ms_zero.errors import UserError
from ms_zero.kernels.dispatch import select

DROPPED = -1
#: Values [..., n] -> the same in ascending order, fp32, and their places, of equal ones the first first.
Ascending = Callable[[Tensor], tuple[Tensor, Tensor]]
_MOST = 2**24


class Sorted(NamedTuple):
    """Rows sorted by expert, those of one expert in the order of their tokens.

    Attributes:
        tokens: the token of each row, int32 [M].
        places: the row of each choice, int32 [N, k]; -1 for a dropped one.
        counts: rows of each expert, on the host.
    """

    tokens: Tensor
    places: Tensor
    counts: tuple[int, ...]


def _sort_on_host(ids: Tensor, num_experts: int) -> Sorted:
    choices = ids.asnumpy()
    flat = choices.reshape(-1)
    kept = np.flatnonzero(flat >= 0)
    order = kept[np.argsort(flat[kept], kind="stable")].astype(np.int32)
    places = np.full(flat.shape, DROPPED, np.int32)
    places[order] = np.arange(len(order), dtype=np.int32)
    counts = np.bincount(flat[kept], minlength=num_experts)
    tokens = Tensor.from_numpy(order // np.int32(choices.shape[1]))
    return Sorted(tokens, Tensor.from_numpy(places.reshape(choices.shape)), tuple(counts.tolist()))


def _sort_on_device(ascending: Ascending) -> Callable[[Tensor, int], Sorted]:
    def sort(ids: Tensor, num_experts: int) -> Sorted:
        flat = ids.reshape(-1)
        keys = mint.where(flat < 0, num_experts, flat)  # dropped choices come last
        experts, order = ascending(keys)
        stops = stops_of(experts, num_experts).asnumpy()  # the only numbers that the host needs
        num_rows = int(stops[-1])
        places = inverse(order, ascending)
        places = mint.where(places < num_rows, places, DROPPED).astype(ms.int32)
        tokens = order[:num_rows].astype(ms.int32) // ids.shape[1]
        return Sorted(tokens, places.reshape(ids.shape), tuple(np.diff(stops, prepend=0).tolist()))

    return sort


def _by_stable_kernel(values: Tensor) -> tuple[Tensor, Tensor]:
    return mint.sort(_as_floats(values), dim=-1, stable=True)


def _by_any_kernel(values: Tensor) -> tuple[Tensor, Tensor]:
    """Sorts twice: where the kernel may mix up equal values, their number and place together are unique."""
    sort, size, values = ops.Sort(), values.shape[-1], _as_floats(values)
    ascending, _ = sort(values)
    numbers = mint.searchsorted(ascending, values)
    unique, _ = sort(numbers * size + ops.arange(0, size, dtype=ms.int64))
    return ascending, unique % size


def _as_floats(values: Tensor) -> Tensor:
    """Devices are quick with fp32, which holds all integers up to 2^24."""
    if values.shape[-1] > _MOST:
        raise UserError(
            f"experts: {values.shape[-1]} choices at once, at most {_MOST} can be sorted: use smaller "
            f"microbatches"
        )
    return values.astype(ms.float32)


def ascending_of(target: str | None) -> Ascending:
    """What sorts on a device, at most 2^24 values, and integers up to that."""
    implementations = {"CPU": _by_any_kernel, "GPU": _by_any_kernel, "Ascend": _by_stable_kernel}
    return select("Ascending", implementations, target)


def inverse(order: Tensor, ascending: Ascending) -> Tensor:
    """The permutation [..., n] that undoes another, int64."""
    return ascending(order)[1].astype(ms.int64)


def stops_of(experts: Tensor, num_experts: int) -> Tensor:
    """How many of sorted experts, fp32 [..., n], are at most 0, 1, ...: int64 [..., num_experts]."""
    numbers = mint.broadcast_to(
        ops.arange(0, num_experts, dtype=ms.float32), (*experts.shape[:-1], num_experts)
    )
    return mint.searchsorted(experts, numbers.contiguous(), right=True)


class SortByExpert(nn.Cell):
    """ids int32 [N, k], -1: dropped -> :class:`Sorted`. PyNative only. On Ascend and GPU not run yet."""

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        on_device = _sort_on_device(ascending_of(target))
        implementations = {"CPU": _sort_on_host, "GPU": on_device, "Ascend": on_device}
        self.sort = select("SortByExpert", implementations, target)

    def construct(self, ids: Tensor, num_experts: int) -> Sorted:
        """Sort."""
        return self.sort(ids, num_experts)
