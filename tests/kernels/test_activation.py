import numpy as np

from ms_zero import kernels

X = np.random.default_rng(0).standard_normal((3, 2, 5)) * 3


def test_gelu_is_the_tanh_form(check_kernel, target):
    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    check_kernel(kernels.GELU(target), gelu, [X])


def test_swiglu(check_kernel, target):
    def swiglu(gate, up):
        return gate / (1 + np.exp(-gate)) * up

    check_kernel(kernels.SwiGLU(target), swiglu, [X, X[::-1]])
