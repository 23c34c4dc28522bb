import resource

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_zero import kernels
from ms_zero.errors import UserError

RNG = np.random.default_rng(0)


def attention(q, k, v, scale=0.7, starts=None):
    """[B, T, H, D] by plain loops over sequences and heads; position t sees starts[b, t] to t."""
    starts = np.zeros(q.shape[:2], np.int32) if starts is None else starts
    out = np.zeros(q.shape, np.result_type(q, k, v))
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for t in range(q.shape[1]):
                seen = slice(starts[b, t], t + 1)
                scores = scale * k[b, seen, h // group] @ q[b, t, h]
                weights = np.exp(scores - scores.real.max())
                out[b, t, h] = weights @ v[b, seen, h // group] / weights.sum()
    return out


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_causal_attention(check_kernel, kv_heads, target):
    q, k, v = (RNG.standard_normal((2, 3, heads, 2)) for heads in (4, kv_heads, kv_heads))
    check_kernel(kernels.CausalAttention(0.7, target), attention, [q, k, v])


STARTS = np.array([[0, 0, 2], [0, 1, 1]], np.int32)


class WithinDocuments(nn.Cell):
    def __init__(self, target):
        super().__init__()
        self.mask, self.attention = kernels.DocumentMask(target), kernels.CausalAttention(0.7, target)

    def construct(self, q, k, v, starts):
        return self.attention(q, k, v, self.mask(starts, q))


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_attention_within_documents(check_kernel, kv_heads, target):
    q, k, v = (RNG.standard_normal((2, 3, heads, 2)) for heads in (4, kv_heads, kv_heads))

    def within_documents(q, k, v):
        return attention(q, k, v, starts=STARTS)

    check_kernel(WithinDocuments(target), within_documents, [q, k, v], [Tensor(STARTS)])


def test_batch_and_length_of_the_same_numbers_share_no_constant(target):
    """Two tokens and one head, then a batch of two with one head: (2, 1) means different things."""
    cell = WithinDocuments(target)
    q, k, v = RNG.standard_normal((3, 2, 2, 1, 2)).astype(np.float16)
    starts = np.array([[0, 1], [0, 0]], np.int32)
    for _ in range(2):
        plain = cell.attention(Tensor(q), Tensor(k), Tensor(v)).asnumpy()
        masked = cell(Tensor(q), Tensor(k), Tensor(v), Tensor(starts)).asnumpy()
        exact = [x.astype(np.float64) for x in (q, k, v)]
        assert np.abs(plain - attention(*exact)).max() < 5e-3
        assert np.abs(masked - attention(*exact, starts=starts)).max() < 5e-3


def test_one_kernel_serves_changing_shapes(target):
    cell = kernels.CausalAttention(0.7, target)
    for batch, length in ((1, 5), (3, 2), (1, 5), (2, 1)):
        q = RNG.standard_normal((batch, length, 4, 2)).astype(np.float32)
        k, v = RNG.standard_normal((2, batch, length, 2, 2)).astype(np.float32)
        out = cell(Tensor(q), Tensor(k), Tensor(v)).asnumpy()
        assert np.abs(out - attention(*(x.astype(np.float64) for x in (q, k, v)))).max() < 1e-5


def test_shapes_may_change_in_graph_mode(graph_mode, target):
    test_one_kernel_serves_changing_shapes(target)


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (np.float16, 5e-3)])
def test_large_scores_stay_masked(dtype, tolerance, target):
    q, k, v = ((RNG.standard_normal((1, 6, 1, 8)) * 6).astype(dtype) for _ in range(3))
    out = kernels.CausalAttention(1.0, target)(Tensor(q), Tensor(k), Tensor(v)).asnumpy()
    expected = attention(*(x.astype(np.float64) for x in (q, k, v)), 1.0)
    assert np.abs(out - expected).max() < tolerance * np.abs(expected).max()


def test_positions_across_tiles(target):
    """More than one tile of the native kernel, a head of odd size, documents that begin anywhere."""
    length = 150
    shapes = [(2, length, heads, 5) for heads in (4, 2, 2, 4)]
    q, k, v, weight = (RNG.standard_normal(shape).astype(np.float32) for shape in shapes)
    starts = np.zeros((2, length), np.int32)
    starts[0, 70:], starts[1, 3:], starts[1, 64:], starts[1, 149:] = 70, 3, 64, 149
    cell, mask = kernels.CausalAttention(0.7, target), kernels.DocumentMask(target)

    def loss(q, k, v, starts):
        return (cell(q, k, v, mask(starts, q)) * Tensor(weight)).sum()

    found = ms.value_and_grad(loss, (0, 1, 2))(*map(Tensor, (q, k, v, starts)))
    expected, gradients = attention_gradients(*(x.astype(np.float64) for x in (q, k, v, weight)), 0.7, starts)
    assert abs(float(found[0].asnumpy()) - (expected * weight).sum()) < 1e-4
    for left, right in zip(found[1], gradients, strict=True):
        assert np.abs(left.asnumpy() - right).max() < 3e-6 * np.abs(right).max()


def attention_gradients(q, k, v, weight, scale, starts):
    """Output, and the gradients of sum(output * weight), with the whole matrix of probabilities."""
    group, keys = q.shape[2] // k.shape[2], np.arange(q.shape[1])
    wide_k, wide_v = (np.repeat(x, group, 2) for x in (k, v))
    hidden = (keys > keys[:, None]) | (keys < starts[:, :, None])
    scores = np.where(hidden[:, None], -np.inf, scale * np.einsum("bthd,bshd->bhts", q, wide_k))
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("bthd,bshd->bhts", weight, wide_v)
    ds = scale * p * (dp - (dp * p).sum(-1, keepdims=True))
    dk, dv = np.einsum("bhts,bthd->bshd", ds, q), np.einsum("bhts,bthd->bshd", p, weight)
    narrow = [x.reshape(*k.shape[:3], group, -1).sum(3) for x in (dk, dv)]
    return np.einsum("bhts,bshd->bthd", p, wide_v), (np.einsum("bhts,bshd->bthd", ds, wide_k), *narrow)


def test_memory_is_linear_in_the_sequence():
    """The scores of 16384 positions are 1 GiB, q, k and v 3 MiB."""
    q, k, v = (Tensor(RNG.standard_normal((1, 16384, 1, 16)).astype(np.float32)) for _ in range(3))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ms.value_and_grad(lambda *args: kernels.CausalAttention(0.25)(*args).sum(), (0, 1, 2))(q, k, v)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 1024


def test_tensors_that_do_not_fit_are_refused():
    q, k = Tensor(np.zeros((1, 3, 4, 2), np.float32)), Tensor(np.zeros((1, 3, 3, 2), np.float32))
    with pytest.raises(UserError, match=r"attention: q .*\[1, 3, 4, 2\].*H a multiple of Hkv"):
        kernels.CausalAttention(1.0)(q, k, k)
    with pytest.raises(UserError, match=r"attention: .*one dtype"):
        kernels.CausalAttention(1.0)(q, q, q.astype(ms.float16))


def test_starts_that_make_no_sense_read_nothing_outside():
    q, k, v = (Tensor(RNG.standard_normal((1, 70, 2, 8)).astype(np.float32)) for _ in range(3))
    attention = kernels.CausalAttention(0.3, "CPU")
    lowest = attention(q, k, v, Tensor(np.full((1, 70), -(2**31), np.int32)))
    assert np.array_equal(lowest.asnumpy(), attention(q, k, v).asnumpy())
    behind = attention(q, k, v, Tensor(np.full((1, 70), 2**31 - 1, np.int32)))
    assert not behind.asnumpy().any()
