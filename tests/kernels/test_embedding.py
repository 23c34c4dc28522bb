import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ms_zero import _compat, kernels
from ms_zero.errors import UserError

RNG = np.random.default_rng(0)
INDICES = Tensor(np.array([[0, 4, 2], [4, 4, 1]], np.int32))


class ByIndices(nn.Cell):
    """The kernel with its constant last, as `check_kernel` passes it."""

    def __init__(self, target=None):
        super().__init__()
        self.embedding = kernels.Embedding(target)

    def construct(self, weight, indices):
        return self.embedding(weight, indices)


@pytest.mark.parametrize("target", ["CPU", "CPU-portable"])
def test_rows_and_their_gradients(check_kernel, target):
    indices = INDICES.asnumpy()
    check_kernel(ByIndices(target), lambda w: w[indices], [RNG.standard_normal((6, 3))], [INDICES])


def taped(weight, indices, dy):
    with _compat.tape():
        out = kernels.Embedding()(weight, indices)
    _compat.backward(out, Tensor(dy))
    grad, weight._grad = weight._grad, None
    return out, grad


def test_gradients_of_fp16_rows_are_added_in_fp32():
    """2048 + 1 is 2048 in fp16: added one by one, the ones would be lost."""
    weight = Parameter(Tensor(np.ones((2, 4), np.float16)))
    dy = np.ones((101, 4), np.float16)
    dy[0] = 2048
    out, grad = taped(weight, Tensor(np.zeros(101, np.int32)), dy)
    assert out.dtype == grad.dtype == ms.float16
    np.testing.assert_array_equal(grad.asnumpy(), [[2148] * 4, [0] * 4])


def test_the_dtype_is_that_of_the_data_a_parameter_has_now():
    weight = Parameter(Tensor(np.ones((5, 7), np.float32)))
    for dtype in (np.float32, np.float16, np.float32):
        weight.data = Tensor(np.full((5, 7), 1.5, dtype))
        out, _ = taped(weight, INDICES, np.ones((2, 3, 7), dtype))
        assert out.asnumpy().dtype == dtype
        assert kernels.Embedding()(weight, INDICES).asnumpy().dtype == dtype


def test_a_table_shared_with_a_product_gets_both_gradients_in_fp16():
    weight = Parameter(Tensor(np.ones((5, 4), np.float32)))
    weight.data = Tensor(np.ones((5, 4), np.float16))
    with _compat.tape():
        rows = kernels.Embedding()(weight, INDICES)
        out = kernels.Linear()(rows, weight)
    _compat.backward(out, ops.ones_like(out))
    # Each of 6 rows of ones reaches each column; row i is used count[i] times with a gradient of 5.
    count = np.bincount(INDICES.asnumpy().reshape(-1), minlength=5)
    np.testing.assert_array_equal(weight._grad.asnumpy(), 6 + 5 * count[:, None].repeat(4, 1))


def test_the_weight_is_not_kept():
    weight = Parameter(Tensor(RNG.standard_normal((5, 4)).astype(np.float32)))
    with _compat.tape():
        out = kernels.Embedding()(weight, INDICES)
    weight.data = Tensor(np.zeros(1, np.float32))
    _compat.backward(out, ops.ones_like(out))
    assert weight._grad.shape == (5, 4)


@pytest.mark.parametrize("bad", [-1, 5])
def test_an_index_outside_of_the_table_is_refused(bad):
    indices = INDICES.asnumpy().copy()
    indices[0, 0] = bad
    with pytest.raises(UserError, match=r"indices range from .* rows 0 to 4: is the vocabulary"):
        kernels.Embedding()(Parameter(Tensor(np.ones((5, 2), np.float32))), Tensor(indices))


def test_no_index_at_all():
    weight = Parameter(Tensor(np.ones((5, 2), np.float32)))
    out = kernels.Embedding()(weight, Tensor(np.zeros((0,), np.int32)))
    assert out.shape == (0, 2)


@pytest.mark.parametrize("values", [[0.5, 1.0], [np.nan, 1.0], [True, False]])
def test_indices_that_are_no_integers_are_refused(values):
    indices = Tensor(np.array(values, None if isinstance(values[0], bool) else np.float32))
    with pytest.raises(UserError, match=r"indices are .*: expected integers"):
        kernels.Embedding()(Parameter(Tensor(np.ones((5, 2), np.float32))), indices)


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_keeps_the_indices_alone(dtype):
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    weight, indices = Parameter(Tensor(np.ones((5, 4), np.float32))), Tensor(INDICES.asnumpy().astype(dtype))
    with ms.saved_tensors_hooks(pack, lambda tensor: tensor), _compat.tape():
        kernels.Embedding()(weight, indices)
    others = [(t.size, str(t.dtype)) for t in kept if t.data_ptr() != weight.data_ptr()]
    saved = kernels.Embedding.saved_elements(indices.size)
    assert others == [(each.elements, "Int32") for each in saved]
    assert (kept[-1].data_ptr() == indices.data_ptr()) is (dtype == np.int32)
