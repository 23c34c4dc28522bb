"""Dropout whose masks are the same in every layout.

Element i of a sample at one dropout is kept or dropped by element i of the random stream (seed, name of the
dropout, step, number of the sample), whichever rank, microbatch or row the sample lies in. A rank that holds
some of the tokens of a sample draws their elements alone.

A value is dropped when 16 random bits are below rate * 2**16, so a rate is rounded to a multiple of 2**-16;
what is kept is divided by the exact probability of being kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from ms_zero import rng
from ms_zero._compat import device_target, function_class, host_view
from ms_zero.errors import UserError

_LEVELS = 1 << 16
_PER_WORD = 4  # decisions in a 64-bit word


@dataclass(frozen=True)
class DropoutPosition:
    """What masks depend on, besides the dropout and the place within a sample.

    Attributes:
        seed: of the run.
        step: of the optimizer.
        sample_numbers: one for each row of the batch.
        token_spans: ranges [start, stop) of the whole sample's tokens that a row holds, in order; None: all.
    """

    seed: int
    step: int
    sample_numbers: tuple[int, ...]
    token_spans: tuple[tuple[int, int], ...] | None = None


class DropoutState:
    """The position of one model's next forward pass, shared by its dropouts.

    It starts without a position, and a forward pass then is refused: dropout is never off by accident.
    """

    def __init__(self) -> None:
        self._position: DropoutPosition | None = None
        self._is_off = False

    def set_position(
        self,
        *,
        seed: int,
        step: int,
        sample_numbers: Sequence[int],
        token_spans: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """Say what the next forward pass is about; see `DropoutPosition`. Call it for each microbatch."""
        spans = None if token_spans is None else tuple((int(start), int(stop)) for start, stop in token_spans)
        self._position = DropoutPosition(seed, step, tuple(int(number) for number in sample_numbers), spans)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Forward passes inside drop nothing (evaluation)."""
        before, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = before

    @property
    def position(self) -> DropoutPosition | None:
        """The position; None inside `off`.

        Raises:
            UserError: none was set.
        """
        if self._is_off:
            return None
        if self._position is None:
            raise UserError(
                "dropout: no position: call set_position(seed=, step=, sample_numbers=) of the model's "
                "dropout_state before each forward pass, or evaluate inside `with dropout_state.off():`"
            )
        return self._position

    def capture(self) -> Any:
        """The state now, for a second forward pass."""
        return self._position, self._is_off

    def restore(self, captured: Any) -> None:
        """Return to a captured state."""
        self._position, self._is_off = captured


class Dropout(nn.Cell):
    """Set elements to 0 with probability `rate` and scale the others so that the mean stays.

    PyNative only. The masks are drawn on the host; on another device they are copied there, one byte an
    element (not run on an NPU).

    Args:
        rate: in [0, 1), rounded to a multiple of 2**-16.
        state: where in training the model is.

    Raises:
        UserError: a rate out of range; when called, without a position or with another number of samples.
    """

    def __init__(self, rate: float, state: DropoutState) -> None:
        super().__init__()
        self.threshold = dropout_threshold(rate)
        self.state = self.replayed_state = state
        self.stream = ""

    def construct(self, x: Tensor) -> Tensor:
        """Map x [B, T, ...] to the same shape; B samples of T tokens."""
        position = self.state.position
        if position is None or self.threshold == 0:
            return x
        if len(position.sample_numbers) != x.shape[0]:
            raise UserError(
                f"dropout: {len(position.sample_numbers)} sample numbers for a batch of {x.shape[0]} samples:"
                f" give set_position one for each"
            )
        mask = keep_mask(self.threshold, self.stream, position, tuple(x.shape[1:]))
        return _Masked.apply(x, Tensor.from_numpy(mask), dropout_scale(self.threshold))


def dropout_threshold(rate: float) -> int:
    """The number of 2**16 equally probable values that are dropped."""
    if not 0.0 <= rate < 1.0:
        raise UserError(f"model: dropout {rate} is not in [0, 1)")
    return min(round(rate * _LEVELS), _LEVELS - 1)


def dropout_scale(threshold: int) -> float:
    """What values that are kept are multiplied by."""
    return _LEVELS / (_LEVELS - threshold)


def keep_mask(
    threshold: int, stream: str, position: DropoutPosition, shape: tuple[int, ...]
) -> np.ndarray:
    """Which elements of a batch are kept: bool [samples, *shape], `shape` being that of one row."""
    tokens, width = shape[0], prod(shape[1:])
    spans = ((0, tokens),) if position.token_spans is None else position.token_spans
    assert sum(stop - start for start, stop in spans) == tokens, (spans, shape)
    mask = np.empty((len(position.sample_numbers), tokens * width), bool)
    for row, number in zip(mask, position.sample_numbers, strict=True):
        name = f"dropout/{stream}/{position.step}/{number}"
        at = 0
        for start, stop in spans:
            size = (stop - start) * width
            values = _uint16(position.seed, name, start * width, stop * width)
            np.greater_equal(values, np.uint16(threshold), out=row[at : at + size])
            at += size
    return mask.reshape(-1, *shape)


def _uint16(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Elements of a stream of 16-bit numbers, four from each 64-bit word."""
    first = start // _PER_WORD
    words = rng.uniform_bits(seed, name, first, -(-stop // _PER_WORD))
    return words.astype("<u8", copy=False).view("<u2")[start - first * _PER_WORD : stop - first * _PER_WORD]


def name_dropouts_by_path(model: nn.Cell) -> None:
    """Give each dropout the stream of its path in `model`, which it keeps wherever it is moved."""
    for path, cell in model.cells_and_names():
        if isinstance(cell, Dropout):
            cell.stream = path


class _Masked(function_class):
    """x * mask * scale; keeps the mask, one byte an element, and nothing of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        ctx.save_for_backward(mask)
        return x * _factor(mask, scale, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return grad * _factor(mask, ctx.scale, grad), None, None


def _factor(mask: Tensor, scale: float, like: Tensor) -> Tensor:
    if device_target() == "CPU":  # the cast from bool costs eight times the product
        return Tensor.from_numpy(np.multiply(host_view(mask), np.float32(scale))).astype(like.dtype)
    return mask.astype(like.dtype) * scale
