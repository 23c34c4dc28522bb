"""Choice of an implementation by device target."""

from collections.abc import Mapping
from typing import TypeVar

import mindspore as ms

from ms_zero.errors import UserError

TARGETS = ("CPU", "GPU", "Ascend")

T = TypeVar("T")


def resolve_target(target: str | None) -> str:
    """Return `target`, or MindSpore's current device target when it is None.

    Raises UserError for anything but "CPU", "GPU" and "Ascend".
    """
    chosen = ms.get_context("device_target") if target is None else target
    if chosen not in TARGETS:
        raise UserError(f"kernels: unknown device target {chosen!r}: expected one of {', '.join(TARGETS)}")
    return chosen


def select(kernel: str, implementations: Mapping[str, T], target: str | None) -> T:
    """Return the implementation of `kernel` for `target` (None: the current device target).

    Raises UserError when `implementations` has none for it.
    """
    chosen = resolve_target(target)
    if chosen not in implementations:
        available = ", ".join(sorted(implementations))
        raise UserError(f"kernels: {kernel} has no implementation for {chosen}: available for {available}")
    return implementations[chosen]
