"""Matrix product with a weight stored [out, in].

Kept for backward by the native CPU kernel: x (of its dtype) and the weight as the Parameter itself.

The native products are this project's own, not MindSpore's: as fast per core (ops/linear/cpu/product.cc), but
they use all threads for small sizes too, take bf16, add the bias on the way, and each row's bits depend on
that row and the weight alone.
"""

from typing import Any

from mindspore import Tensor, mint, nn, ops

from ms_zero._compat import function_class
from ms_zero.errors import UserError
from ms_zero.kernels import cpu
from ms_zero.kernels.dispatch import select
from ms_zero.kernels.eager import EagerOrGraph
from ms_zero.kernels.saved import Saved


class _LinearFunction(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x = cpu.packed(x)
        _check_linear(x, weight, bias)
        ctx.save_for_backward(x, weight)
        y = mint.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
        cpu.call("msz_linear", x, weight, bias, y, cpu.dtype_code(x), *_sizes(x, weight))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, code, sizes = cpu.packed(dy), cpu.dtype_code(x), _sizes(x, weight)
        dx, dweight, dbias = None, None, None
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        if wants_x:
            dx = cpu.like(x)
            cpu.call("msz_linear_grad_input", dy, weight, dx, code, *sizes)
        if wants_weight:
            dweight = cpu.like(weight)
            cpu.call("msz_linear_grad_weight", dy, x, dweight, code, *sizes)
        if wants_bias:
            dbias = mint.empty(weight.shape[:1], dtype=weight.dtype)
            cpu.call("msz_sum_rows", dy, dbias, code, sizes[0], sizes[2])
        return dx, dweight, dbias


def _sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Rows, in, out."""
    size_out, size_in = weight.shape
    return x.size // max(1, size_in), size_in, size_out


def _check_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    fits = weight.ndim == 2 and x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype
    if bias is not None:
        fits = fits and bias.shape == weight.shape[:1] and bias.dtype == weight.dtype
    if not fits:
        given = ", ".join(f"{t.dtype} {list(t.shape)}" for t in (x, weight, bias) if t is not None)
        raise UserError(
            f"linear: x, weight and bias do not fit: expected one dtype, [..., in], [out, in] and [out], "
            f"got {given}"
        )
    assert weight.is_contiguous() and (bias is None or bias.is_contiguous())


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
