"""Grouped products and weighted sums against numpy in float64, on the native and the composed forms."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor

from ms_zero import _compat, kernels
from ms_zero.errors import UserError

RNG = np.random.default_rng(7)
COUNTS = ((3, 0, 5, 1), (9, 0, 0, 0), (0, 0, 0, 9), (2, 3, 3, 1), (0, 0, 0, 0))
SIZE_IN, SIZE_OUT = 11, 7


def taped(cell, *arguments, upstream, wanted):
    """Result and gradients of the first `wanted` arguments, given the gradient of the result."""
    leaves = [Tensor(argument) for argument in arguments[:wanted]]
    for leaf in leaves:
        leaf.requires_grad_(True)
    with _compat.tape():
        out = cell(*leaves, *arguments[wanted:])
    _compat.backward((out,), (Tensor(upstream.astype(out.asnumpy().dtype)),))
    return out.asnumpy(), [leaf._grad.asnumpy() for leaf in leaves]


def grouped(x, weight, counts):
    groups = np.repeat(np.arange(len(counts)), counts)
    return np.einsum("ni,noi->no", x, weight[groups])


@pytest.mark.parametrize("target", ["CPU", "CPU-portable"])
def test_the_gradient_of_the_weight_may_wait(target):
    x = RNG.standard_normal((9, SIZE_IN)).astype(np.float32)
    weight = RNG.standard_normal((4, SIZE_OUT, SIZE_IN)).astype(np.float32)
    cell, upstream, found = kernels.GroupedLinear(target), Tensor(np.ones((9, SIZE_OUT), np.float32)), []
    for waiting in (None, kernels.PutOff()):
        leaf = _compat.leaf(Tensor(x), requires_grad=True)
        param = Parameter(Tensor(weight), name="weight")
        with _compat.tape(), kernels.putting_off(waiting):
            out = cell(leaf, param, COUNTS[0])
        _compat.backward(out, upstream)
        if waiting is None:
            grad = param._grad
        else:
            assert param._grad is None
            ((_, grad),) = waiting.take()
        found.append([leaf._grad.asnumpy(), grad.asnumpy()])
    assert all(np.array_equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("target", ["CPU", "CPU-portable"])
def test_each_row_meets_the_weight_of_its_group(target, counts):
    x = RNG.standard_normal((sum(counts), SIZE_IN)).astype(np.float32)
    weight = RNG.standard_normal((4, SIZE_OUT, SIZE_IN)).astype(np.float32)
    upstream = RNG.standard_normal((sum(counts), SIZE_OUT))
    cell = kernels.GroupedLinear(target)
    out, (dx, dweight) = taped(cell, x, weight, counts, upstream=upstream, wanted=2)
    groups = np.repeat(np.arange(4), counts)
    expected = np.zeros(weight.shape)
    np.add.at(expected, groups, upstream[:, :, None] * x[:, None, :])
    np.testing.assert_allclose(out, grouped(x.astype(np.float64), weight, counts), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.einsum("no,noi->ni", upstream, weight[groups]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dweight, expected, rtol=1e-5, atol=1e-5)
    assert not dweight[[group for group in range(4) if not counts[group]]].any()


@pytest.mark.parametrize("target", ["CPU", "CPU-portable"])
def test_half_precision_is_taken(target):
    x, weight = RNG.standard_normal((9, SIZE_IN)), RNG.standard_normal((4, SIZE_OUT, SIZE_IN))
    x, weight = x.astype(np.float16), weight.astype(np.float16)
    upstream = np.ones((9, SIZE_OUT))
    cell = kernels.GroupedLinear(target)
    out, grads = taped(cell, x, weight, COUNTS[0], upstream=upstream, wanted=2)
    assert out.dtype == np.float16 and all(grad.dtype == np.float16 for grad in grads)
    wide = grouped(x.astype(np.float64), weight.astype(np.float64), COUNTS[0])
    np.testing.assert_allclose(out, wide, rtol=2e-2, atol=2e-2)


def test_a_row_has_the_same_bits_whatever_stands_around_it():
    x = RNG.standard_normal((9, 64)).astype(np.float32)
    weight = RNG.standard_normal((4, 48, 64)).astype(np.float32)
    cell = kernels.GroupedLinear("CPU")
    whole = cell(Tensor(x), Tensor(weight), (3, 0, 5, 1)).asnumpy()
    part = cell(Tensor(x[3:4]), Tensor(weight), (0, 0, 1, 0)).asnumpy()
    assert part.tobytes() == whole[3:4].tobytes()


@pytest.mark.parametrize(
    ("shape", "counts"), [((4, 5), (1, 1, 2)), ((4, 6), (1, 1, 1)), ((4, 6), (2, 2)), ((4, 6, 1), (1, 1, 2))]
)
def test_what_does_not_fit_is_refused(shape, counts):
    weight = Tensor(np.zeros((3, 2, 6), np.float32))
    with pytest.raises(UserError, match=r"grouped linear: x .* do not fit"):
        kernels.GroupedLinear("CPU")(Tensor(np.zeros(shape, np.float32)), weight, counts)


PLACES = {
    "all kept": [[0, 3], [1, 4], [5, 2]],
    "some dropped": [[0, -1], [-1, -1], [2, 1]],
}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("target", ["CPU", "Ascend"])  # the latter's operators run on CPU too
def test_rows_are_added_up_by_weight(target, places, dtype):
    places = np.array(places, np.int32)
    num_rows = int(places.max()) + 1
    rows = RNG.standard_normal((num_rows, 5)).astype(dtype)
    weights = np.where(places < 0, 0, RNG.standard_normal(places.shape)).astype(np.float32)
    upstream = RNG.standard_normal((3, 5)).astype(dtype)
    cell = kernels.CombineRows(target)

    def run(rows, weights):
        return cell(rows, Tensor(places), weights=weights)

    out, (drows, dweights) = taped(run, rows, weights, upstream=upstream, wanted=2)
    wide = np.where(places[..., None] < 0, 0, rows.astype(np.float64)[places])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == np.float32 else {"rtol": 5e-3, "atol": 5e-3}
    np.testing.assert_allclose(out, (wide * weights[..., None]).sum(1), **tolerance)
    expected = np.zeros((num_rows, 5))
    for token, choice in zip(*np.nonzero(places >= 0)):
        expected[places[token, choice]] = upstream[token] * weights[token, choice]
    np.testing.assert_allclose(drows, expected, **tolerance)
    products = np.where(places < 0, 0, (wide * upstream[:, None]).sum(-1))
    np.testing.assert_allclose(dweights, products, **tolerance)
    assert (out.dtype, drows.dtype, dweights.dtype) == (dtype, dtype, np.float32)


def test_sums_of_half_precision_are_made_in_fp32():
    rows = np.array([[1.0], [2.0**-11], [2.0**-11]], np.float16)
    places, weights = Tensor([[0, 1, 2]], ms.int32), Tensor(np.ones((1, 3), np.float32))
    out = kernels.CombineRows("CPU")(Tensor(rows), places, weights=weights).asnumpy()
    assert out[0, 0] == np.float16(1 + 2.0**-10)  # each alone would be rounded away
