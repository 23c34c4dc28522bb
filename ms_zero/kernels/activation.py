"""Activation functions."""

import math

from mindspore import Tensor, nn, ops

from ms_zero.kernels.dispatch import select


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


class GELU(nn.Cell):
    """GELU in its tanh form: 0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), elementwise.

    The Ascend implementation (native GeLU) has not been run on an NPU.
    """

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        implementations = {"CPU": _GELUBySigmoid, "GPU": _GELUBySigmoid, "Ascend": ops.GeLU}
        self.gelu = select("GELU", implementations, target)()

    def construct(self, x: Tensor) -> Tensor:
        """Apply the function."""
        return self.gelu(x)


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


class SwiGLU(nn.Cell):
    """silu(gate) * up, elementwise on two tensors of one shape (Shazeer 2020, arXiv:2002.05202).

    The Ascend implementation (native Swiglu) has not been run on an NPU.
    """

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        implementations = {"CPU": _SwiGLUBySigmoid, "GPU": _SwiGLUBySigmoid, "Ascend": _SwiGLUNative}
        self.swiglu = select("SwiGLU", implementations, target)()

    def construct(self, gate: Tensor, up: Tensor) -> Tensor:
        """Apply the function."""
        return self.swiglu(gate, up)
