import numpy as np

from ms_zero import kernels

RNG = np.random.default_rng(0)


def test_linear_without_bias(check_kernel, target):
    x, weight = RNG.standard_normal((2, 3, 4)), RNG.standard_normal((5, 4))
    check_kernel(kernels.Linear(target), lambda x, w: x @ w.T, [x, weight])


def test_linear_with_bias(check_kernel, target):
    x, weight, bias = RNG.standard_normal((6, 4)), RNG.standard_normal((5, 4)), RNG.standard_normal(5)
    check_kernel(kernels.Linear(target), lambda x, w, b: x @ w.T + b, [x, weight, bias])
