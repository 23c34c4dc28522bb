"""Gradients of weights that wait: what the W actions of a pipeline schedule compute.

A forward inside :func:`putting_off` lets its backward compute the gradients of inputs alone, and leave behind
what those of the weights are made of. Kernels that cannot do so compute both in one backward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from mindspore import Parameter, Tensor


class PutOff:
    """Gradients of parameters that wait, in the order in which backward came across them."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Parameter, Callable[[], Tensor]]] = []

    def add(self, param: Parameter, compute: Callable[[], Tensor]) -> None:
        """Let the gradient of a parameter wait; a parameter that is used several times has several."""
        self._waiting.append((param, compute))

    @property
    def params(self) -> list[Parameter]:
        """Whose gradients wait, one entry each."""
        return [param for param, _ in self._waiting]

    def take(self) -> Iterator[tuple[Parameter, Tensor]]:
        """Compute them one by one, letting go of what each was made of."""
        self._waiting.reverse()
        while self._waiting:
            param, compute = self._waiting.pop()
            yield param, compute()


_CURRENT: ContextVar[PutOff | None] = ContextVar("ms_zero.put_off", default=None)


@contextmanager
def putting_off(waiting: PutOff | None) -> Iterator[None]:
    """Let the backward of what runs forward inside leave gradients of weights in `waiting`, if given."""
    token = _CURRENT.set(waiting)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def put_off_to(weight: Tensor) -> PutOff | None:
    """Where the gradient of a weight may wait; None: backward has to compute it."""
    return _CURRENT.get() if isinstance(weight, Parameter) else None
