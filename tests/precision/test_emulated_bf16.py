"""bf16 emulated on CPU against a numpy model that rounds at the same places, and against torch's bf16."""

import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_zero.precision.autocast import apply
from ms_zero.precision.cast import round_array
from ms_zero.precision.policy import policy

GRID = policy("bf16")
ROWS, WIDTH, HIDDEN = 6, 16, 8


class TwoLayers(nn.Cell):
    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Dense(WIDTH, HIDDEN), nn.ReLU(), nn.Dense(HIDDEN, WIDTH)

    def construct(self, x):
        return self.down(self.act(self.up(x)))


class NormedResidual(nn.Cell):
    """A block inside a root, so that the sum is rounded."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm((WIDTH,)), TwoLayers()

    def construct(self, x):
        return x + self.inner(self.norm(x))


class Stack(nn.Cell):
    def __init__(self, blocks):
        super().__init__()
        self.blocks = nn.CellList([NormedResidual() for _ in range(blocks)])

    def construct(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def coarse(rng, shape, step, limit):
    """Multiples of `step` within the limit: fp32 sums of their products are exact in any order."""
    return (rng.integers(-limit / step, limit / step + 1, shape) * step).astype(np.float32)


@pytest.fixture
def example():
    """Weights, input and output gradient of TwoLayers whose fp32 sums are exact; results are off the grid."""
    rng = np.random.default_rng(0)
    weights = {
        "up.weight": coarse(rng, (HIDDEN, WIDTH), 1 / 16, 1),
        "up.bias": coarse(rng, HIDDEN, 1 / 16, 1),
        "down.weight": coarse(rng, (WIDTH, HIDDEN), 1 / 16, 1),
        "down.bias": coarse(rng, WIDTH, 1 / 16, 1),
    }
    return weights, coarse(rng, (ROWS, WIDTH), 1 / 16, 4), coarse(rng, (ROWS, WIDTH), 1 / 16, 4)


def rounded_two_layers(weights, x, dout, r):
    """Output and gradients of TwoLayers; r rounds what leaves an operation."""
    a = r(x @ weights["up.weight"].T + weights["up.bias"])
    h = np.maximum(a, 0)
    y = r(h @ weights["down.weight"].T + weights["down.bias"])
    dh = r(dout @ weights["down.weight"])
    da = dh * (a > 0)
    grads = {
        "up.weight": da.T @ x,
        "up.bias": da.sum(0),
        "down.weight": dout.T @ h,
        "down.bias": dout.sum(0),
        "x": r(da @ weights["up.weight"]),
    }
    return y, grads


def run(net, weights, x, dout, gradients):
    for name, parameter in net.parameters_and_names():
        parameter.set_data(Tensor(weights[name]))
    x = Tensor(x)
    x.requires_grad_(True)
    y, grads = gradients(net, x, seed=Tensor(dout))
    found = {name: grad.asnumpy() for name, grad in grads.items()}
    return y.asnumpy(), {**found, "x": x._grad.asnumpy()}


def test_two_layers_equal_numpy_bitwise(example, gradients):
    net = TwoLayers()
    apply(net, GRID, "CPU")
    y, grads = run(net, *example, gradients)
    expected, expected_grads = rounded_two_layers(*example, round_array)
    unrounded, unrounded_grads = rounded_two_layers(*example, lambda values: values)
    np.testing.assert_array_equal(y, expected)
    assert not np.array_equal(y, unrounded)
    for name, grad in grads.items():
        np.testing.assert_array_equal(grad, expected_grads[name], err_msg=name)
    assert not np.array_equal(grads["x"], unrounded_grads["x"])


def layer_norm(x, gamma, beta, eps=1e-7):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + np.float32(eps)) * gamma + beta


def linear(x, weights, path):
    return x @ weights[f"{path}.weight"].T + weights[f"{path}.bias"]


def test_a_stack_with_norms_and_residuals_equals_numpy_but_for_ties():
    """Sums in another order differ in fp32, which decides what is near the middle of two bf16 values."""
    net, rng, r = Stack(3), np.random.default_rng(1), round_array
    weights = {
        name: r(rng.standard_normal(parameter.shape).astype(np.float32) * np.float32(0.3))
        for name, parameter in net.parameters_and_names()
    }
    for name, parameter in net.parameters_and_names():
        parameter.set_data(Tensor(weights[name]))
    apply(net, GRID, "CPU")
    x = rng.standard_normal((500, WIDTH)).astype(np.float32)
    found = net(Tensor(x)).asnumpy()
    x = r(x)
    for i in range(3):
        block = f"blocks.{i}"
        h = r(layer_norm(x, weights[f"{block}.norm.gamma"], weights[f"{block}.norm.beta"]))
        h = np.maximum(r(linear(h, weights, f"{block}.inner.up")), 0)
        x = r(x + r(linear(h, weights, f"{block}.inner.down")))
    equal = found == x
    assert equal.mean() > 0.99
    scale = np.abs(x).max(-1, keepdims=True)
    assert (np.abs(found - x) / scale).max() < 2 * 2.0**-8


NAMES = {"0.weight": "up.weight", "0.bias": "up.bias", "2.weight": "down.weight", "2.bias": "down.bias"}


def in_torch(torch, weights):
    net = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, WIDTH)
    )
    net.load_state_dict({key: torch.from_numpy(weights[name]) for key, name in NAMES.items()})
    return net


def test_torch_in_bf16_gives_the_same_bits(example, gradients):
    torch = pytest.importorskip("torch")
    weights, x, dout = example
    net = TwoLayers()
    apply(net, GRID, "CPU")
    y, grads = run(net, weights, x, dout, gradients)

    other = in_torch(torch, weights).to(torch.bfloat16)
    leaf = torch.from_numpy(x).to(torch.bfloat16).requires_grad_(True)
    out = other(leaf)
    out.backward(torch.from_numpy(dout).to(torch.bfloat16))
    np.testing.assert_array_equal(y, out.detach().float().numpy())
    np.testing.assert_array_equal(grads["x"], leaf.grad.float().numpy())
    for key, parameter in other.named_parameters():
        # Torch rounds gradients of weights; here that is left to whoever reduces them.
        found = round_array(grads[NAMES[key]])
        np.testing.assert_array_equal(found, parameter.grad.float().numpy(), err_msg=key)


def test_torch_autocast_is_as_far_from_fp32_as_we_are():
    """The same network in torch's autocast on CPU: nearly the same bits, errors of one size."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(2)
    net, exact = TwoLayers(), TwoLayers()
    weights = {
        name: rng.standard_normal(parameter.shape).astype(np.float32)
        for name, parameter in net.parameters_and_names()
    }
    x = rng.standard_normal((2000, WIDTH)).astype(np.float32)
    for name, parameter in net.parameters_and_names():
        parameter.set_data(Tensor(round_array(weights[name])))
    for name, parameter in exact.parameters_and_names():
        parameter.set_data(Tensor(weights[name]))
    apply(net, GRID, "CPU")
    ours, reference = net(Tensor(x)).asnumpy(), exact(Tensor(x)).asnumpy()

    other = in_torch(torch, weights)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        theirs = other(torch.from_numpy(x)).float().numpy()
    assert (ours == theirs).mean() > 0.98
    our_error, their_error = (np.sqrt(((y - reference) ** 2).mean()) for y in (ours, theirs))
    assert 0.98 < our_error / their_error < 1.02
