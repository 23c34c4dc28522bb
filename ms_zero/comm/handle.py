"""The result of an asynchronous collective."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Handle(Generic[T]):
    """A collective that was issued; :meth:`wait` gives its result.

    On CPU the operation is complete when the handle is returned. On devices, `wait` makes later computation
    wait for the result, the host goes on. The input must not be written before `wait`.
    """

    def __init__(self, value: T, native: Any = None, finish: Callable[[T], T] | None = None) -> None:
        self._value = value
        self._native = native
        self._finish = finish

    def wait(self) -> T:
        """Return the result. May be called again; it returns the same object."""
        if self._native is not None:
            self._native.wait()
            self._native = None
        if self._finish is not None:
            self._value = self._finish(self._value)
            self._finish = None
        return self._value
