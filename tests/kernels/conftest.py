"""One check for every differentiable kernel: forward and gradients, in three ways of running it."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ms_zero import _compat


@pytest.fixture(scope="session", autouse=True)
def cpu():
    if _compat.device_target() != "CPU":  # refused once an operation has run, as in tests of other folders
        ms.set_device("CPU")
    _compat.launch_blocking()


@pytest.fixture
def graph_mode():
    ms.set_context(mode=ms.GRAPH_MODE)
    yield
    ms.set_context(mode=ms.PYNATIVE_MODE)


class Weighted(nn.Cell):
    """sum(cell(*args) * weight), to differentiate any output."""

    def __init__(self, cell, weight):
        super().__init__()
        self.cell, self.weight = cell, Tensor(weight)

    def construct(self, *args):
        return ops.ReduceSum()(self.cell(*args) * self.weight)


def complex_step_gradients(scalar, arrays):
    """Gradients of an analytic function of float64 arrays, to machine precision: Im f(x + ih) / h."""
    step = 1e-30
    gradients = [np.zeros(array.shape) for array in arrays]
    for position, array in enumerate(arrays):
        moved = [other.astype(np.complex128) for other in arrays]
        for index in np.ndindex(array.shape):
            moved[position][index] += 1j * step
            gradients[position][index] = scalar(*moved).imag / step
            moved[position][index] = array[index]
    return gradients


def run(how, cell, weight, tensors, constants):
    """The weighted sum of the output and its gradients with respect to `tensors`."""
    if how == "tape":
        leaves = [Tensor(t) for t in tensors]
        for leaf in leaves:
            leaf.requires_grad_(True)
        with _compat.tape():
            out = Weighted(cell, weight)(*leaves, *constants)
        _compat.backward(out)
        return out, [leaf._grad for leaf in leaves]
    ms.set_context(mode=ms.GRAPH_MODE if how == "graph" else ms.PYNATIVE_MODE)
    try:
        positions = tuple(range(len(tensors)))
        arguments = [Tensor(t) for t in tensors]
        total, found = ms.value_and_grad(Weighted(cell, weight), positions)(*arguments, *constants)
        return total, found if isinstance(found, tuple) else (found,)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.fixture(params=["CPU", "CPU-portable"])
def target(request):
    """The two kinds of implementation for the CPU."""
    return request.param


@pytest.fixture(params=["tape", "value_and_grad", "graph"])
def check_kernel(request):
    """check(cell, reference, arrays, constants): fp32 against float64 within `rtol` of the largest value."""

    def check(cell, reference, arrays, constants=(), rtol=3e-6):
        arrays = [array.astype(np.float32) for array in arrays]
        exact = [array.astype(np.float64) for array in arrays]
        expected = reference(*exact)
        weight = np.random.default_rng(5).standard_normal(expected.shape).astype(np.float32)
        gradients = complex_step_gradients(lambda *values: (reference(*values) * weight).sum(), exact)
        out = cell(*[Tensor(array) for array in arrays], *constants).asnumpy()
        assert out.shape == expected.shape
        assert np.abs(out - expected).max() <= rtol * np.abs(expected).max()
        total, found = run(request.param, cell, weight, arrays, constants)
        terms = expected * weight
        assert abs(float(total.asnumpy()) - terms.sum()) <= rtol * np.abs(terms).sum()
        for position, (left, right) in enumerate(zip(found, gradients, strict=True)):
            assert left.shape == right.shape
            error = np.abs(left.asnumpy() - right).max()
            assert error <= rtol * np.abs(right).max(), f"gradient {position}: error {error}"

    return check
