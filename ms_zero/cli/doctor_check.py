"""The result of one check of ``ms-zero doctor``."""

from dataclasses import dataclass
from typing import Literal

Status = Literal["ok", "warning", "problem", "skipped"]


@dataclass(frozen=True)
class Check:
    """What was looked at, how it is, and for a warning or a problem how to fix it."""

    name: str
    status: Status
    message: str
    fix: str = ""


def ok(name: str, message: str) -> Check:
    """Make the result of a check that has nothing to complain about."""
    return Check(name, "ok", message)


def skipped(name: str, why: str) -> Check:
    """Make the result of a check that was not made."""
    return Check(name, "skipped", why)


def warning(name: str, message: str, fix: str) -> Check:
    """Make the result of a check whose finding may slow or confuse, but does not prevent training."""
    return Check(name, "warning", message, fix)


def problem(name: str, message: str, fix: str) -> Check:
    """Make the result of a check whose finding prevents training or makes it wrong."""
    return Check(name, "problem", message, fix)
