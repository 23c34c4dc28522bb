"""Dropout in compiled steps: the masks of the eager engine, drawn on the host before each microbatch.

A compiled graph cannot draw them: they are 64-bit Philox numbers that depend on sample and step only, see
`ms_zero.models.dropout`. So each dropout of a model becomes a product with a Parameter of one byte an
element, which the host sets. These are no part of the model: checkpoints leave them out.
"""

from __future__ import annotations

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_zero.models.dropout import Dropout, DropoutPosition, dropout_scale, keep_mask


class GivenDropout(nn.Cell):
    """Drops what its mask says while it trains; maps x [B, T, H] to the same shape.

    Args:
        plain: whose rate and stream it has.
        shape: of x.
    """

    def __init__(self, plain: Dropout, shape: tuple[int, int, int]) -> None:
        super().__init__()
        self.threshold, self.stream = plain.threshold, plain.stream
        self.scale = dropout_scale(plain.threshold)
        self.mask = Parameter(Tensor(np.ones(shape, np.uint8)), requires_grad=False)

    def construct(self, x: Tensor) -> Tensor:
        """Return x times the mask."""
        if not self.training:
            return x
        return x * (self.mask.astype(ms.float32) * self.scale).astype(x.dtype)


class GivenMasks:
    """The dropouts of a model, with the same masks on any rank and in any microbatch.

    Args:
        model: with `ms_zero.models.dropout.Dropout` cells, which are replaced.
        seed: of the run.
        shape: samples, tokens and width of a microbatch.
    """

    def __init__(self, model: nn.Cell, seed: int, shape: tuple[int, int, int]) -> None:
        self._seed, self._cells = seed, list[GivenDropout]()
        for _, parent in list(model.cells_and_names()):
            for name, cell in list(parent.name_cells().items()):
                if isinstance(cell, Dropout):
                    given = GivenDropout(cell, shape)
                    setattr(parent, name, given)  # names the mask anew
                    given.mask.name = f"{given.stream}.mask"
                    self._cells.append(given)

    def draw(self, step: int, sample_numbers: Sequence[int]) -> None:
        """Set the masks of a microbatch: of these samples in this attempted step."""
        position = DropoutPosition(self._seed, step, tuple(sample_numbers))
        for cell in self._cells:
            mask = keep_mask(cell.threshold, cell.stream, position, tuple(cell.mask.shape[1:]))
            cell.mask.set_data(Tensor(mask.astype(np.uint8)))

    def holds(self, param: Parameter) -> bool:
        """Whether a parameter is a mask."""
        return any(param is cell.mask for cell in self._cells)
