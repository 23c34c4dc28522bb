"""Normalisation over the last dim.

Kept for backward by the native CPU kernels, for n elements in rows of size H: x (n, of its dtype) and the
mean and inverse deviation of each row (2 n / H, fp32; RMSNorm's means are 0). The weight is kept as the
Parameter.

With MindSpore's operators on CPU a broadcast multiplication costs ten times a plain one, so factors are first
spread over the whole tensor by a product of a column and a row, which costs no more than a copy.
"""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_zero._compat import function_class
from ms_zero.kernels import cpu
from ms_zero.kernels.dispatch import select
from ms_zero.kernels.eager import EagerOrGraph
from ms_zero.kernels.saved import Saved


def _normalise(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    x, size = cpu.packed(x), x.shape[-1]
    assert weight.shape == (size,) and weight.is_contiguous(), weight.shape
    rows = x.size // size
    y, moments = cpu.like(x), cpu.floats(rows, 2)
    code, weight_code = cpu.dtype_code(x), cpu.dtype_code(weight)
    cpu.call("msz_norm", x, code, weight, bias, weight_code, y, moments, rows, size, eps)
    ctx.save_for_backward(x, weight, moments)
    return y


def _normalise_grad(ctx: Any, dy: Tensor, with_bias: bool) -> list[Tensor | None]:
    """Gradients of x, weight and bias, None for what needs none."""
    x, weight, moments = ctx.saved_tensors
    size = x.shape[-1]
    wanted = [*ctx.needs_input_grad[: 2 + with_bias], False][:3]
    given = (x, weight, weight)
    grads = [cpu.like(tensor) if want else None for tensor, want in zip(given, wanted, strict=True)]
    codes = cpu.dtype_code(x), weight, cpu.dtype_code(weight)
    rows = x.size // size
    cpu.call("msz_norm_grad", x, cpu.packed(dy), *codes, moments, with_bias, *grads, rows, size)
    return grads


class _LayerNormFunction(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        assert bias.shape == weight.shape and bias.dtype == weight.dtype and bias.is_contiguous(), bias.shape
        return _normalise(ctx, x, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return (*_normalise_grad(ctx, dy, with_bias=True), None)


class _RMSNormFunction(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return _normalise(ctx, x, weight, None, eps)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx, dweight, _ = _normalise_grad(ctx, dy, with_bias=False)
        return dx, dweight, None


def _saved(rows: int, size: int) -> tuple[Saved, ...]:
    return (Saved("x", rows * size), Saved("moments", 2 * rows, dtype="fp32", role="extra"))


class _LayerNormComposed(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.sum = ops.ReduceSum(keep_dims=True)
        self.rsqrt = ops.Rsqrt()
        self.outer = ops.MatMul()
        self.bias_add = ops.BiasAdd()
        rows_of_ones: dict[int, Tensor] = {}

        def ones(size: int) -> Tensor:
            if size not in rows_of_ones:
                rows_of_ones[size] = Tensor(np.ones((1, size), np.float32))
            return rows_of_ones[size]

        # constexpr: runs as Python in both modes (in graph mode at compile time), so each is built once.
        self.ones = ms.constexpr(ones)

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        size = x.shape[-1]
        wide = x.reshape(-1, size).astype(ms.float32)
        mean = self.sum(wide, -1) * (1.0 / size)
        centred = wide - self.outer(mean, self.ones(size))
        variance = self.sum(centred * centred, -1) * (1.0 / size)
        scale = self.outer(self.rsqrt(variance + self.eps), weight.astype(ms.float32).reshape(1, -1))
        wide = self.bias_add(centred * scale, bias.astype(ms.float32))
        return wide.astype(x.dtype).reshape(x.shape)


class _LayerNormNative(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.layer_norm = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=eps)

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self.layer_norm(x, weight, bias)[0]


def _layer_norm_native(eps: float) -> nn.Cell:
    def apply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return _LayerNormFunction.apply(x, weight, bias, eps)

    return EagerOrGraph(apply, _LayerNormComposed(eps))


class LayerNorm(nn.Cell):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim: x [..., H], weight and bias [H].

    Mean and biased variance are computed in fp32. The Ascend implementation (native LayerNorm) has not been
    run on an NPU.
    """

    def __init__(self, eps: float, target: str | None = None) -> None:
        super().__init__()
        implementations = {
            "CPU": _layer_norm_native,
            "CPU-portable": _LayerNormComposed,
            "GPU": _LayerNormNative,
            "Ascend": _LayerNormNative,
        }
        self.layer_norm = select("LayerNorm", implementations, target)(eps)
        #: Whether x may be of 16 bits with fp32 weights; else x, weights and result have one dtype.
        self.takes_fp32_weights = not isinstance(self.layer_norm, _LayerNormNative)

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Normalise x."""
        return self.layer_norm(x, weight, bias)

    @staticmethod
    def saved_elements(rows: int, size: int) -> tuple[Saved, ...]:
        """What the native CPU kernel keeps for backward of `rows` rows of `size` elements."""
        return _saved(rows, size)


class _RMSNormComposed(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.sum = ops.ReduceSum(keep_dims=True)
        self.rsqrt = ops.Rsqrt()
        self.outer = ops.MatMul()

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        size = x.shape[-1]
        wide = x.reshape(-1, size).astype(ms.float32)
        mean_square = self.sum(wide * wide, -1) * (1.0 / size)
        scale = self.outer(self.rsqrt(mean_square + self.eps), weight.astype(ms.float32).reshape(1, -1))
        return (wide * scale).astype(x.dtype).reshape(x.shape)


class _RMSNormNative(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.rms_norm = ops.auto_generate.RmsNorm(eps)

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        return self.rms_norm(x, weight)[0]


def _rms_norm_native(eps: float) -> nn.Cell:
    def apply(x: Tensor, weight: Tensor) -> Tensor:
        return _RMSNormFunction.apply(x, weight, eps)

    return EagerOrGraph(apply, _RMSNormComposed(eps))


class RMSNorm(nn.Cell):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim: x [..., H], weight [H]; the mean in fp32.

    The Ascend implementation (native RmsNorm) has not been run on an NPU.
    """

    def __init__(self, eps: float, target: str | None = None) -> None:
        super().__init__()
        implementations = {
            "CPU": _rms_norm_native,
            "CPU-portable": _RMSNormComposed,
            "GPU": _RMSNormComposed,
            "Ascend": _RMSNormNative,
        }
        self.rms_norm = select("RMSNorm", implementations, target)(eps)
        #: Whether x may be of 16 bits with fp32 weights; else x, weights and result have one dtype.
        self.takes_fp32_weights = not isinstance(self.rms_norm, _RMSNormNative)

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise x."""
        return self.rms_norm(x, weight)

    @staticmethod
    def saved_elements(rows: int, size: int) -> tuple[Saved, ...]:
        """What the native CPU kernel keeps for backward of `rows` rows of `size` elements."""
        return _saved(rows, size)
