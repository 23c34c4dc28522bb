"""Choice of an implementation by device target.

A target is a device, or a device and a kind of implementation:

- ``CPU``: this project's C++ library where a kernel is in it, else MindSpore's operators;
- ``CPU-portable``: numpy and MindSpore's operators only, for machines without a C++ compiler;
- ``Ascend``, ``GPU``: MindSpore's operators;
- ``Ascend-custom``, ``GPU-custom``: this project's AscendC and CUDA kernels.

Nothing is chosen silently: what is asked for and missing is an error.
"""

from collections.abc import Mapping
from typing import TypeVar

import mindspore as ms

from ms_zero.errors import UserError

PORTABLE = "-portable"
TARGETS = ("CPU", f"CPU{PORTABLE}", "GPU", "GPU-custom", "Ascend", "Ascend-custom")

T = TypeVar("T")


def resolve_target(target: str | None) -> str:
    """Return `target`, or MindSpore's current device target when it is None.

    Raises UserError for anything but one of TARGETS.
    """
    chosen = ms.get_context("device_target") if target is None else target
    if chosen not in TARGETS:
        raise UserError(f"kernels: unknown device target {chosen!r}: expected one of {', '.join(TARGETS)}")
    return chosen


def select(kernel: str, implementations: Mapping[str, T], target: str | None) -> T:
    """Return the implementation of `kernel` for `target` (None: the current device target).

    A kernel that has only one form for a device needs no entry for the portable one: that form is made of
    MindSpore's operators. Raises UserError when `implementations` has none for the target.
    """
    chosen = resolve_target(target)
    if chosen.endswith(PORTABLE) and chosen not in implementations:
        chosen = chosen.removesuffix(PORTABLE)
    if chosen not in implementations:
        available = ", ".join(sorted(implementations))
        raise UserError(f"kernels: {kernel} has no implementation for {chosen}: available for {available}")
    return implementations[chosen]
