"""Tables of the rotary position embedding."""

import math
from typing import Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_zero.errors import UserError


class RopeScaling(Protocol):
    """Llama-3 frequency scaling.

    Wavelengths above original_max_seq_len / low_freq_factor are stretched by `factor`, those below
    original_max_seq_len / high_freq_factor are kept, and between the two the frequency is interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_seq_len: int


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Return the angles per position, float64 [head_dim / 2]: theta^(-2i / head_dim), scaled."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if scaling is None:
        return frequencies
    periods = scaling.original_max_seq_len * frequencies / (2.0 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((periods - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


class RotaryTables(nn.Cell):
    """cos and sin of position x frequency for half-rotation: fp32 [T, head_dim] each, computed in float64."""

    def __init__(
        self, head_dim: int, max_seq_len: int, *, theta: float, scaling: RopeScaling | None = None
    ) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.gather = ops.Gather()
        frequencies = inverse_frequencies(head_dim, theta, scaling)
        cache: dict[tuple[int, bool], Tensor] = {}

        def table(length: int, is_cos: bool) -> Tensor:
            if length > max_seq_len:
                raise UserError(
                    f"model: a sequence of {length} tokens exceeds max_seq_len {max_seq_len}: "
                    f"shorten the sequence or raise max_seq_len"
                )
            if (length, is_cos) not in cache:
                angles = np.tile(np.outer(np.arange(length), frequencies), 2)
                values = np.cos(angles) if is_cos else np.sin(angles)
                cache[length, is_cos] = Tensor(values.astype(np.float32))
            return cache[length, is_cos]

        # constexpr: runs as Python in both modes (in graph mode at compile time), so each is built once.
        self.table = ms.constexpr(table)

    def construct(self, input_ids: Tensor, position_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) for input_ids [B, T] at positions int32 [T] or [B, T] (0 ... T-1 if None).

        They have the shape of the positions and head_dim.
        Raises UserError for T > max_seq_len.
        """
        if position_ids is None:
            length = input_ids.shape[-1]
            return self.table(length, True), self.table(length, False)
        cos, sin = self.table(self.max_seq_len, True), self.table(self.max_seq_len, False)
        return self.gather(cos, position_ids, 0), self.gather(sin, position_ids, 0)
