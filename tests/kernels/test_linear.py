import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import kernels
from ms_zero.errors import UserError

RNG = np.random.default_rng(0)


def test_linear_without_bias(check_kernel, target):
    x, weight = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((5, 4))
    check_kernel(kernels.Linear(target), lambda x, w: x @ w.T, [x, weight])


def test_linear_with_bias(check_kernel, target):
    x, weight, bias = RNG.standard_normal((6, 4)), RNG.standard_normal((5, 4)), RNG.standard_normal(5)
    check_kernel(kernels.Linear(target), lambda x, w, b: x @ w.T + b, [x, weight, bias])


def test_what_does_not_fit_is_refused():
    x, weight, bias, other = (Tensor(np.zeros(s, np.float32)) for s in ((3, 4), (5, 4), (5,), (5, 3)))
    for args in ((x, other, None), (x.astype(ms.float16), weight, bias), (x, weight, x)):
        with pytest.raises(UserError, match=r"linear: x.* do not fit: expected one dtype"):
            kernels.Linear()(*args)


def test_no_row_at_all():
    x, weight, bias = (Tensor(np.ones(shape, np.float32)) for shape in ((2, 0, 4), (5, 4), (5,)))
    assert kernels.Linear()(x, weight, bias).shape == (2, 0, 5)
