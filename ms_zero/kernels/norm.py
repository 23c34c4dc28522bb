"""Normalisation over the last dim.

On CPU a broadcast multiplication costs ten times a plain one, so factors are first spread over the whole
tensor by a product of a column and a row, which costs no more than a copy.
"""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_zero.kernels.dispatch import select


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
        return self.bias_add((centred * scale).astype(x.dtype), bias).reshape(x.shape)


class _LayerNormNative(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.layer_norm = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=eps)

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return self.layer_norm(x, weight, bias)[0]


class LayerNorm(nn.Cell):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim: x [..., H], weight and bias [H].

    Mean and biased variance are computed in fp32. The Ascend implementation (native LayerNorm) has not been
    run on an NPU.
    """

    def __init__(self, eps: float, target: str | None = None) -> None:
        super().__init__()
        implementations = {"CPU": _LayerNormComposed, "GPU": _LayerNormNative, "Ascend": _LayerNormNative}
        self.layer_norm = select("LayerNorm", implementations, target)(eps)

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Normalise x."""
        return self.layer_norm(x, weight, bias)


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


class RMSNorm(nn.Cell):
    """x / sqrt(mean(x^2) + eps) * weight over the last dim: x [..., H], weight [H]; the mean in fp32.

    The Ascend implementation (native RmsNorm) has not been run on an NPU.
    """

    def __init__(self, eps: float, target: str | None = None) -> None:
        super().__init__()
        implementations = {"CPU": _RMSNormComposed, "GPU": _RMSNormComposed, "Ascend": _RMSNormNative}
        self.rms_norm = select("RMSNorm", implementations, target)(eps)

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        """Normalise x."""
        return self.rms_norm(x, weight)
