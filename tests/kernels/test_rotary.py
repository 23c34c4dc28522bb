import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import kernels

RNG = np.random.default_rng(0)


def test_rotary_embedding(check_kernel, target):
    x, angles = RNG.standard_normal((2, 3, 2, 4)), RNG.standard_normal((3, 4))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def rotate(x):
        half = x.shape[-1] // 2
        turned = np.concatenate([-x[..., half:], x[..., :half]], -1)
        return x * cos[:, None].astype(np.float64) + turned * sin[:, None].astype(np.float64)

    check_kernel(kernels.RotaryEmbedding(target), rotate, [x], constants=[Tensor(cos), Tensor(sin)])


def test_samples_with_positions_of_their_own(check_kernel, target):
    x, angles = RNG.standard_normal((2, 3, 2, 4)), RNG.standard_normal((2, 3, 4))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def rotate(x):
        turned = np.concatenate([-x[..., 2:], x[..., :2]], -1)
        return x * cos[:, :, None].astype(np.float64) + turned * sin[:, :, None].astype(np.float64)

    check_kernel(kernels.RotaryEmbedding(target), rotate, [x], constants=[Tensor(cos), Tensor(sin)])


def test_one_kernel_serves_changing_shapes(target):
    cell = kernels.RotaryEmbedding(target)
    for length, heads, head_dim in ((3, 2, 4), (5, 1, 4), (3, 2, 6)):
        x = RNG.standard_normal((2, length, heads, head_dim)).astype(np.float32)
        ones, zeros = np.ones((length, head_dim), np.float32), np.zeros((length, head_dim), np.float32)
        assert np.array_equal(cell(Tensor(x), Tensor(ones), Tensor(zeros)).asnumpy(), x)


def test_tables_for_another_batch_are_refused():
    x, table = Tensor(np.ones((4, 5, 2, 8), np.float32)), Tensor(np.ones((2, 5, 8), np.float32))
    with pytest.raises(AssertionError):
        kernels.RotaryEmbedding("CPU")(x, table, table)
