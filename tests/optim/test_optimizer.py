import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import _compat
from ms_zero.optim.optimizer import SGD, AdamW


@pytest.fixture(scope="module", autouse=True)
def blocking():
    _compat.launch_blocking()


def flats():
    return [Tensor(np.full(n, 2.0, np.float32)) for n in (3, 5)]


def grads(value):
    return [Tensor(np.full(n, value, np.float32)) for n in (3, 5)]


def test_weight_decay_applies_to_the_marked_tensors_only():
    for make in (AdamW, SGD):
        params = flats()
        make(params, [True, False], weight_decay=0.5).step(grads(0.0), lr=0.1)
        np.testing.assert_allclose(params[0].asnumpy(), 2.0 * (1 - 0.05), rtol=1e-6)
        np.testing.assert_array_equal(params[1].asnumpy(), 2.0)


def test_adamw_keeps_moments_and_counts_updates():
    optimizer = AdamW(flats(), [False, False], beta1=0.5, beta2=0.75, eps=1e-8)
    optimizer.step(grads(4.0), lr=0.1)
    optimizer.step(grads(0.0), lr=0.1)
    np.testing.assert_allclose(optimizer.state["exp_avg"][0].asnumpy(), 1.0)
    np.testing.assert_allclose(optimizer.state["exp_avg_sq"][1].asnumpy(), 3.0)
    assert optimizer.num_updates == 2


def test_gradients_are_scaled_before_use():
    params = flats()
    SGD(params, [False, False]).step(grads(4.0), lr=1.0, grad_scale=0.25)
    np.testing.assert_allclose(params[0].asnumpy(), 1.0)
    optimizer = AdamW(flats(), [False, False], beta1=0.5)
    optimizer.step(grads(4.0), lr=1.0, grad_scale=0.25)
    np.testing.assert_allclose(optimizer.state["exp_avg"][0].asnumpy(), 0.5)
