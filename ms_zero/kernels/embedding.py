"""Rows of a table by index.

Kept for backward by the CPU kernel: the indices.
"""

from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, nn, ops

from ms_zero._compat import function_class
from ms_zero.errors import UserError
from ms_zero.kernels import cpu
from ms_zero.kernels.dispatch import select
from ms_zero.kernels.eager import EagerOrGraph
from ms_zero.kernels.rounding import convert
from ms_zero.kernels.saved import Saved

_INTEGERS = (ms.int32, ms.int64, ms.int16, ms.int8, ms.uint8)


class _EmbeddingFunction(function_class):
    """Gradients of a row are added up in fp32 and in order, whatever the dtype of the table."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor) -> Tensor:
        _check(indices, weight)
        indices = cpu.packed(indices if indices.dtype == ms.int32 else indices.astype(ms.int32))
        ctx.save_for_backward(indices)
        ctx.rows, size = weight.shape
        out = mint.empty((*indices.shape, size), dtype=weight.dtype)
        code = cpu.dtype_code(weight)
        cpu.call("msz_rows", cpu.packed(weight), indices, out, code, indices.size, size)
        return out

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None]:
        if not ctx.needs_input_grad[0]:
            return None, None
        (indices,) = ctx.saved_tensors
        dy, size = cpu.packed(dy), dy.shape[-1]
        grad = cpu.floats(ctx.rows, size)
        code = cpu.dtype_code(dy)
        cpu.call("msz_sum_by_index", dy, code, indices, grad, indices.size, ctx.rows, size)
        return grad if dy.dtype == ms.float32 else convert(grad, dy.dtype), None


def _check(indices: Tensor, weight: Tensor) -> None:
    if weight.ndim != 2:
        raise UserError(f"embedding: the table is {list(weight.shape)}: expected [rows, H]")
    if indices.dtype not in _INTEGERS:
        raise UserError(f"embedding: indices are {indices.dtype}: expected integers, best int32")
    values, rows = indices.asnumpy(), weight.shape[0]
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

    Indices of other integer dtypes are converted. What is no integer or outside of the table raises UserError
    in PyNative on CPU; elsewhere the result is undefined.
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

    @staticmethod
    def saved_elements(indices: int) -> tuple[Saved, ...]:
        """What the native CPU kernel keeps for backward: the indices, themselves if they are packed int32."""
        return (Saved("indices", indices, dtype="int32"),)
