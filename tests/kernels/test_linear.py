import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops

from ms_zero import kernels
from ms_zero._compat import backward, clear_grads, gradient, leaf, tape
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


def gradients(target, frozen=(), waiting=None):
    """Of x, weight and bias of a product that is used twice; those that wait are computed at the end."""
    shapes = {"x": (6, 4), "weight": (4, 4), "bias": (4,)}
    values = {name: np.random.default_rng(7).standard_normal(shape) for name, shape in shapes.items()}
    x = leaf(Tensor(values["x"].astype(np.float32)), requires_grad=True)
    params = {
        name: Parameter(Tensor(values[name].astype(np.float32)), name=name) for name in ("weight", "bias")
    }
    for name in frozen:
        params[name].requires_grad = False
    linear = kernels.Linear(target)
    with tape(), kernels.putting_off(waiting):
        y = linear(ops.tanh(linear(x, **params)), **params)
    clear_grads(params.values())
    backward(y, Tensor(np.ones((6, 4), np.float32)))
    found = {name: gradient(param) for name, param in (("x", x), *params.items())}
    if waiting is not None:
        assert found["weight"] is None and found["bias"] is None
        for param, grad in waiting.take():
            known = found[param.name]
            found[param.name] = grad if known is None else known + grad
    return {name: None if grad is None else grad.asnumpy() for name, grad in found.items()}


def test_gradients_of_weights_may_wait(target):
    now, waiting = gradients(target), kernels.PutOff()
    later = gradients(target, waiting=waiting)
    assert waiting.params == []
    for name, grad in now.items():
        np.testing.assert_allclose(later[name], grad, rtol=1e-6, atol=1e-6, err_msg=name)
        assert np.abs(grad).max() > 0


def test_only_what_is_trained_waits(target):
    waiting = kernels.PutOff()
    with_frozen = gradients(target, frozen=("weight", "bias"), waiting=waiting)
    assert with_frozen["weight"] is None and with_frozen["bias"] is None
    np.testing.assert_allclose(with_frozen["x"], gradients(target)["x"], rtol=1e-6)
