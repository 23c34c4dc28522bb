"""Choice of an implementation by device target.

A target is a device, or a device and a kind of implementation:

- ``CPU``: this project's C++ library where a kernel is in it, else MindSpore's operators;
- ``CPU-portable``: numpy and MindSpore's operators only, for machines without a C++ compiler;
- ``Ascend``, ``GPU``: MindSpore's operators;
- ``Ascend-custom``, ``GPU-custom``: this project's AscendC and CUDA kernels.

Nothing is chosen silently: what is asked for and missing is an error.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import mindspore as ms

from ms_zero.errors import UserError

PORTABLE, CUSTOM = "-portable", "-custom"
TARGETS = ("CPU", f"CPU{PORTABLE}", "GPU", "GPU-custom", "Ascend", "Ascend-custom")

T = TypeVar("T")

_DEFAULT: ContextVar[str | None] = ContextVar("ms_zero.kernels.target", default=None)


@contextmanager
def default_target(target: str) -> Iterator[None]:
    """Within the block None as a target means `target`, in this thread; an explicit target still wins.

    For whole runs on kernels that are not the device's usual ones: this project's own (``-custom``) where it
    has some, MindSpore's operators elsewhere. Raises UserError for an unknown target.
    """
    token = _DEFAULT.set(resolve_target(target))
    try:
        yield
    finally:
        _DEFAULT.reset(token)


def resolve_target(target: str | None) -> str:
    """Return `target`; for None that of :func:`default_target`, else MindSpore's current device target.

    Raises UserError for anything but one of TARGETS.
    """
    chosen = _DEFAULT.get() if target is None else target
    if chosen is None:
        chosen = ms.get_context("device_target")
    if chosen not in TARGETS:
        raise UserError(f"kernels: unknown device target {chosen!r}: expected one of {', '.join(TARGETS)}")
    return chosen


def select(kernel: str, implementations: Mapping[str, T], target: str | None) -> T:
    """Return the implementation of `kernel` for `target` (None: the current device target).

    A kernel that has only one form for a device needs no entry for the portable one: that form is made of
    MindSpore's operators. It serves a custom target of :func:`default_target` as well, but not one that is
    asked for here. Raises UserError when `implementations` has none for the target.
    """
    chosen = resolve_target(target)
    if chosen not in implementations:
        chosen = chosen.removesuffix(PORTABLE)
        chosen = chosen if target is not None else chosen.removesuffix(CUSTOM)
    if chosen not in implementations:
        available = ", ".join(sorted(implementations))
        raise UserError(f"kernels: {kernel} has no implementation for {chosen}: available for {available}")
    return implementations[chosen]
