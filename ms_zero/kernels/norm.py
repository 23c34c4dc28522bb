"""Normalisation over the last dim."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_zero.kernels.dispatch import select


class LayerNorm(nn.Cell):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim: x [..., H], weight and bias [H]."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.layer_norm = ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=eps)

    def construct(self, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """Normalise x."""
        return self.layer_norm(x, weight, bias)[0]


class _RMSNormComposed(nn.Cell):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.mean = ops.ReduceMean(keep_dims=True)
        self.rsqrt = ops.Rsqrt()

    def construct(self, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.astype(ms.float32)
        normed = wide * self.rsqrt(self.mean(wide * wide, -1) + self.eps)
        return normed.astype(x.dtype) * weight


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
