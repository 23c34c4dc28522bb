"""Activation functions.

Kept for backward by the native CPU kernels, in elements of the input's dtype:

| kernel | kept | elements |
|---|---|---|
| GELU | x | n |
| SwiGLU | gate, up | 2 n |
"""

import math
from typing import Any

from mindspore import Tensor, nn, ops

from ms_zero._compat import function_class
from ms_zero.kernels import cpu
from ms_zero.kernels.dispatch import select
from ms_zero.kernels.eager import EagerOrGraph
from ms_zero.kernels.saved import Saved


class _GELUFunction(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x = cpu.packed(x)
        ctx.save_for_backward(x)
        y = cpu.like(x)
        cpu.call("msz_gelu", x, y, cpu.dtype_code(x), x.size)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx = cpu.like(x)
        cpu.call("msz_gelu_grad", x, cpu.packed(dy), dx, cpu.dtype_code(x), x.size)
        return dx


class _GELUBySigmoid(nn.Cell):
    """x * sigmoid(2 u), the same function as 0.5 x (1 + tanh u).

    On CPU the built-in GeLU costs four times as much and the built-in tanh is off by 1e-4.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = ops.Sigmoid()
        self.linear = 2.0 * math.sqrt(2.0 / math.pi)
        self.cubic = self.linear * 0.044715

    def construct(self, x: Tensor) -> Tensor:
        return x * self.sigmoid(x * (x * x * self.cubic + self.linear))


def _gelu_native() -> nn.Cell:
    return EagerOrGraph(_GELUFunction.apply, _GELUBySigmoid())


class GELU(nn.Cell):
    """GELU in its tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), elementwise.

    The Ascend implementation (native GeLU) has not been run on an NPU.
    """

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        implementations = {
            "CPU": _gelu_native,
            "CPU-portable": _GELUBySigmoid,
            "GPU": _GELUBySigmoid,
            "Ascend": ops.GeLU,
        }
        self.gelu = select("GELU", implementations, target)()

    def construct(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return self.gelu(x)

    @staticmethod
    def saved_elements(elements: int) -> tuple[Saved, ...]:
        """What the native CPU kernel keeps for backward of `elements` values."""
        return (Saved("x", elements),)


class _SwiGLUFunction(function_class):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = cpu.packed(gate), cpu.packed(up)
        assert gate.shape == up.shape and gate.dtype == up.dtype, (gate.shape, up.shape, gate.dtype, up.dtype)
        ctx.save_for_backward(gate, up)
        y = cpu.like(gate)
        cpu.call("msz_swiglu", gate, up, y, cpu.dtype_code(gate), gate.size)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dgate, dup = cpu.like(gate), cpu.like(up)
        code = cpu.dtype_code(gate)
        cpu.call("msz_swiglu_grad", gate, up, cpu.packed(dy), dgate, dup, code, gate.size)
        return dgate, dup


class _SwiGLUBySigmoid(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.sigmoid = ops.Sigmoid()

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        return gate * self.sigmoid(gate) * up


class _SwiGLUNative(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.concat = ops.Concat(-1)
        self.swiglu = ops.auto_generate.Swiglu()

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.swiglu(self.concat((gate, up)), -1)


def _swiglu_native() -> nn.Cell:
    return EagerOrGraph(_SwiGLUFunction.apply, _SwiGLUBySigmoid())


class SwiGLU(nn.Cell):
    """silu(gate) * up, elementwise on two tensors of one shape (Shazeer 2020, arXiv:2002.05202).

    The Ascend implementation (native Swiglu) has not been run on an NPU.
    """

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        implementations = {
            "CPU": _swiglu_native,
            "CPU-portable": _SwiGLUBySigmoid,
            "GPU": _SwiGLUBySigmoid,
            "Ascend": _SwiGLUNative,
        }
        self.swiglu = select("SwiGLU", implementations, target)()

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        """Apply the function."""
        return self.swiglu(gate, up)

    @staticmethod
    def saved_elements(elements: int) -> tuple[Saved, ...]:
        """What the native CPU kernel keeps for backward of `elements` products."""
        return (Saved("gate", elements), Saved("up", elements))
