import mindspore as ms
import numpy as np
from mindspore import Tensor

from ms_zero import kernels

RNG = np.random.default_rng(0)
X, WEIGHT, BIAS = RNG.standard_normal((2, 3, 6)) * 4 + 2, RNG.standard_normal(6), RNG.standard_normal(6)


def layer_norm(x, weight, bias, eps=1e-3):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def rms_norm(x, weight, eps=1e-3):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def test_layer_norm(check_kernel, target):
    check_kernel(kernels.LayerNorm(1e-3, target), layer_norm, [X, WEIGHT, BIAS])


def test_rms_norm(check_kernel, target):
    check_kernel(kernels.RMSNorm(1e-3, target), rms_norm, [X, WEIGHT])


def test_layer_norm_keeps_precision_far_from_zero(target):
    x = (RNG.standard_normal((4, 256)) + 1000).astype(np.float32)
    weight, bias = np.ones(256, np.float32), np.zeros(256, np.float32)
    out = kernels.LayerNorm(1e-5, target)(Tensor(x), Tensor(weight), Tensor(bias)).asnumpy()
    assert np.abs(out - layer_norm(x.astype(np.float64), weight, bias, 1e-5)).max() < 1e-3


def test_norms_keep_the_dtype_and_square_in_fp32(target):
    x = (RNG.standard_normal((3, 16)) * 1000).astype(np.float16)  # the square exceeds fp16
    weight, bias = np.ones(16, np.float16), np.zeros(16, np.float16)
    for cell, extra, reference in (
        (kernels.RMSNorm(1e-5, target), [weight], rms_norm),
        (kernels.LayerNorm(1e-5, target), [weight, bias], layer_norm),
    ):
        out = cell(Tensor(x), *map(Tensor, extra))
        assert out.dtype == ms.float16
        expected = reference(x.astype(np.float64), *extra, 1e-5)
        assert np.abs(out.asnumpy() - expected).max() < 4e-3
