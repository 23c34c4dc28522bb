"""Matrix product with a weight stored [out, in].

Kept for backward: x (of its dtype) and the weight as the Parameter itself.
"""

from typing import Any

from mindspore import Tensor, mint, nn, ops

from ms_zero._compat import function_class
from ms_zero.kernels import cpu
from ms_zero.kernels.dispatch import select
from ms_zero.kernels.eager import EagerOrGraph
from ms_zero.kernels.saved import Saved

# Primitives hold no state between calls.
_TIMES_TRANSPOSED = ops.MatMul(transpose_a=False, transpose_b=True)
_TIMES = ops.MatMul()
_TRANSPOSED_TIMES = ops.MatMul(transpose_a=True, transpose_b=False)


class _LinearFunction(function_class):
    """MindSpore's products; the bias is added in place and its gradient summed by the library."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = _TIMES_TRANSPOSED(x.reshape(-1, x.shape[-1]), weight)
        if bias is not None:
            assert bias.dtype == y.dtype and bias.is_contiguous(), (bias.dtype, y.dtype)
            cpu.call("msz_bias_add", y, bias, cpu.dtype_code(y), *y.shape)
        return y.reshape((*x.shape[:-1], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows = cpu.packed(dy).reshape(-1, dy.shape[-1])
        dx = _TIMES(rows, weight).reshape(x.shape) if wants_x else None
        dweight = _TRANSPOSED_TIMES(rows, x.reshape(-1, x.shape[-1])) if wants_weight else None
        return dx, dweight, _sum_rows(rows) if wants_bias else None


def _sum_rows(rows: Tensor) -> Tensor:
    sums = mint.empty(rows.shape[1:], dtype=rows.dtype)
    cpu.call("msz_sum_rows", rows, sums, cpu.dtype_code(rows), *rows.shape)
    return sums


class _LinearComposed(nn.Cell):
    """The product takes the weight as it is stored: autograd keeps the parameter and no transposed copy."""

    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul(transpose_a=False, transpose_b=True)
        self.bias_add = ops.BiasAdd()

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.matmul(x.reshape(-1, x.shape[-1]), weight)
        if bias is not None:
            y = self.bias_add(y, bias)
        return y.reshape((*x.shape[:-1], weight.shape[0]))


def _linear_native() -> nn.Cell:
    return EagerOrGraph(_LinearFunction.apply, _LinearComposed())


class Linear(nn.Cell):
    """y = x W^T + b: x [..., in], weight [out, in], bias [out] or None -> [..., out]."""

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        implementations = {
            "CPU": _linear_native,
            "CPU-portable": _LinearComposed,
            "GPU": _LinearComposed,
            "Ascend": _LinearComposed,
        }
        self.linear = select("Linear", implementations, target)()

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Apply the product."""
        return self.linear(x, weight, bias)

    @staticmethod
    def saved_elements(rows: int, in_features: int) -> tuple[Saved, ...]:
        """What is kept for backward of x [rows, in_features]."""
        return (Saved("x", rows * in_features),)
