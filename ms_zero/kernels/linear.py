"""Matrix product with a weight stored [out, in].

Kept for backward by the native CPU kernel: x (of its dtype) and the weight as the Parameter itself.

The native products are this project's own, not MindSpore's: as fast per core (ops/linear/cpu/product.cc), but
they use all threads for small sizes too, take bf16, add the bias on the way, and each row's bits depend on
that row and the weight alone.

The gradients of weight and bias can be put off, see `ms_zero.kernels.deferred`: x and dy are kept until then.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mindspore import Parameter, Tensor, mint, nn, ops

from ms_zero._compat import function_class
from ms_zero.errors import UserError
from ms_zero.kernels import cpu
from ms_zero.kernels.deferred import PutOff, put_off_to
from ms_zero.kernels.dispatch import select
from ms_zero.kernels.eager import EagerOrGraph, RunsInPython
from ms_zero.kernels.saved import Saved


class _LinearFunction(function_class):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, waits: "_Waits | None"
    ) -> Tensor:
        x = cpu.packed(x)
        _check_linear(x, weight, bias)
        ctx.waits = waits
        ctx.save_for_backward(x, weight)
        y = mint.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype)
        cpu.call("msz_linear", x, weight, bias, y, cpu.dtype_code(x), *_sizes(x, weight))
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy, sizes = cpu.packed(dy), _sizes(x, weight)
        dx = None
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if wants_x:
            dx = cpu.like(x)
            cpu.call("msz_linear_grad_input", dy, weight, dx, cpu.dtype_code(x), *sizes)
        made = {}
        if wants_weight:
            made["weight"] = partial(_native_grad_weight, dy, x, sizes)
        if wants_bias:
            made["bias"] = partial(_native_grad_bias, dy, sizes)
        return dx, *_now_or_later(made, ctx.waits), None


def _native_grad_weight(dy: Tensor, x: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    dweight = mint.empty((sizes[2], sizes[1]), dtype=x.dtype)
    cpu.call("msz_linear_grad_weight", dy, x, dweight, cpu.dtype_code(x), *sizes)
    return dweight


def _native_grad_bias(dy: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    dbias = mint.empty((sizes[2],), dtype=dy.dtype)
    cpu.call("msz_sum_rows", dy, dbias, cpu.dtype_code(dy), sizes[0], sizes[2])
    return dbias


@dataclass(frozen=True)
class _Waits:
    """Where gradients wait, and whose they are."""

    waiting: PutOff
    params: Mapping[str, Parameter]


def _waits(weight: Tensor, bias: Tensor | None) -> _Waits | None:
    waiting = put_off_to(weight)
    return None if waiting is None else _Waits(waiting, {"weight": weight, "bias": bias})


def _now_or_later(
    made: Mapping[str, Callable[[], Tensor]], waits: _Waits | None
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of weight and bias; None for one that is not wanted, or waits."""
    if waits is None:
        return tuple(made[name]() if name in made else None for name in ("weight", "bias"))
    for name, compute in made.items():
        waits.waiting.add(waits.params[name], compute)
    return None, None


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


class _ProductsFunction(function_class):
    """The composed form with gradients of weight and bias that wait."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, waits: _Waits, cell: "_LinearComposed"
    ) -> Tensor:
        ctx.waits, ctx.cell = waits, cell
        ctx.save_for_backward(x, weight)
        return cell.product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        cell, rows = ctx.cell, dy.reshape(-1, dy.shape[-1])
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        dx = cell.grad_input(rows, weight).reshape(x.shape) if wants_x else None
        made = {}
        if wants_weight:
            made["weight"] = lambda: cell.grad_weight(rows, x.reshape(-1, x.shape[-1]))
        if wants_bias:
            made["bias"] = lambda: rows.sum(0)
        return dx, *_now_or_later(made, ctx.waits), None, None


class _LinearComposed(nn.Cell):
    """The product takes the weight as it is stored: autograd keeps the parameter and no transposed copy."""

    def __init__(self) -> None:
        super().__init__()
        self.matmul = ops.MatMul(transpose_a=False, transpose_b=True)
        self.bias_add = ops.BiasAdd()
        self.grad_input = ops.MatMul()
        self.grad_weight = ops.MatMul(transpose_a=True)
        self.runs_in_python = RunsInPython()
        self.eager = partial(_composed, self)

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.runs_in_python():
            return self.eager(x, weight, bias)
        return self.product(x, weight, bias)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self.matmul(x.reshape(-1, x.shape[-1]), weight)
        if bias is not None:
            y = self.bias_add(y, bias)
        return y.reshape((*x.shape[:-1], weight.shape[0]))


def _composed(cell: _LinearComposed, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    waits = _waits(weight, bias)
    if waits is None:
        return cell.product(x, weight, bias)
    return _ProductsFunction.apply(x, weight, bias, waits, cell)


def _linear_native() -> nn.Cell:
    return EagerOrGraph(_native, _LinearComposed())


def _native(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return _LinearFunction.apply(x, weight, bias, _waits(weight, bias))


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
