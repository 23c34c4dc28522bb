"""Rows of a table by index.

Kept for backward by the CPU kernel: the indices.
"""

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_zero._compat import function_class
from ms_zero.errors import UserError
from ms_zero.kernels.dispatch import select
from ms_zero.kernels.eager import EagerOrGraph
from ms_zero.kernels.rounding import convert

# Primitives hold no state between calls.
_GATHER = ops.Gather()
_SUM_BY_ROW = ops.UnsortedSegmentSum()


class _EmbeddingFunction(function_class):
    """MindSpore's gather; gradients of a row are added up in fp32, whatever the dtype of the table."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor) -> Tensor:
        _check(indices, weight.shape[0])
        ctx.save_for_backward(indices)
        ctx.rows = weight.shape[0]
        # Through a view: an operator that infers abstractly remembers the dtype that a Parameter first had.
        return _GATHER(weight.view(weight.shape), indices, 0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None
        (indices,) = ctx.saved_tensors
        rows = dy.reshape(-1, dy.shape[-1])
        if dy.dtype == ms.float32:
            return _SUM_BY_ROW(rows, indices.reshape(-1), ctx.rows), None
        grad = _SUM_BY_ROW(convert(rows, ms.float32), indices.reshape(-1), ctx.rows)
        return convert(grad, dy.dtype), None


def _check(indices: Tensor, rows: int) -> None:
    values = indices.asnumpy()
    if values.size and (values.min() < 0 or values.max() >= rows):
        raise UserError(
            f"embedding: indices range from {values.min()} to {values.max()}, the table has rows 0 to "
            f"{rows - 1}: is the vocabulary of the data larger than the model's?"
        )


class _EmbeddingComposed(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.Gather()

    def construct(self, weight: Tensor, indices: Tensor) -> Tensor:
        return self.gather(weight, indices, 0)


def _embedding_native() -> nn.Cell:
    return EagerOrGraph(_EmbeddingFunction.apply, _EmbeddingComposed())


class Embedding(nn.Cell):
    """weight [rows, H], indices int32 [...] -> [..., H].

    An index outside of the table raises UserError in PyNative on CPU; elsewhere the result is undefined.
    """

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        implementations = {
            "CPU": _embedding_native,
            "CPU-portable": _EmbeddingComposed,
            "GPU": _EmbeddingComposed,
            "Ascend": _EmbeddingComposed,
        }
        self.embedding = select("Embedding", implementations, target)()

    def construct(self, weight: Tensor, indices: Tensor) -> Tensor:
        """Look up."""
        return self.embedding(weight, indices)
