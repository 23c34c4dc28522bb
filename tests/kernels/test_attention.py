import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_zero import kernels

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
def test_causal_attention(check_kernel, kv_heads):
    q, k, v = (RNG.standard_normal((2, 3, heads, 2)) for heads in (4, kv_heads, kv_heads))
    check_kernel(kernels.CausalAttention(0.7, "CPU"), attention, [q, k, v])


STARTS = np.array([[0, 0, 2], [0, 1, 1]], np.int32)


class WithinDocuments(nn.Cell):
    def __init__(self):
        super().__init__()
        self.mask, self.attention = kernels.DocumentMask("CPU"), kernels.CausalAttention(0.7, "CPU")

    def construct(self, q, k, v, starts):
        return self.attention(q, k, v, self.mask(starts, q))


@pytest.mark.parametrize("kv_heads", [4, 1])
def test_attention_within_documents(check_kernel, kv_heads):
    q, k, v = (RNG.standard_normal((2, 3, heads, 2)) for heads in (4, kv_heads, kv_heads))
    check_kernel(
        WithinDocuments(), lambda q, k, v: attention(q, k, v, starts=STARTS), [q, k, v], [Tensor(STARTS)]
    )


def test_batch_and_length_of_the_same_numbers_share_no_constant():
    """Two tokens and one head, then a batch of two with one head: (2, 1) means different things."""
    cell = WithinDocuments()
    q, k, v = RNG.standard_normal((3, 2, 2, 1, 2)).astype(np.float16)
    starts = np.array([[0, 1], [0, 0]], np.int32)
    for _ in range(2):
        plain = cell.attention(Tensor(q), Tensor(k), Tensor(v)).asnumpy()
        masked = cell(Tensor(q), Tensor(k), Tensor(v), Tensor(starts)).asnumpy()
        exact = [x.astype(np.float64) for x in (q, k, v)]
        assert np.abs(plain - attention(*exact)).max() < 5e-3
        assert np.abs(masked - attention(*exact, starts=starts)).max() < 5e-3


def test_one_kernel_serves_changing_shapes():
    cell = kernels.CausalAttention(0.7, "CPU")
    for batch, length in ((1, 5), (3, 2), (1, 5), (2, 1)):
        q = RNG.standard_normal((batch, length, 4, 2)).astype(np.float32)
        k, v = RNG.standard_normal((2, batch, length, 2, 2)).astype(np.float32)
        out = cell(Tensor(q), Tensor(k), Tensor(v)).asnumpy()
        assert np.abs(out - attention(*(x.astype(np.float64) for x in (q, k, v)))).max() < 1e-5


def test_shapes_may_change_in_graph_mode(graph_mode):
    test_one_kernel_serves_changing_shapes()


@pytest.mark.parametrize("dtype, tolerance", [(np.float32, 1e-5), (np.float16, 5e-3)])
def test_large_scores_stay_masked(dtype, tolerance):
    q, k, v = ((RNG.standard_normal((1, 6, 1, 8)) * 6).astype(dtype) for _ in range(3))
    out = kernels.CausalAttention(1.0, "CPU")(Tensor(q), Tensor(k), Tensor(v)).asnumpy()
    expected = attention(*(x.astype(np.float64) for x in (q, k, v)), 1.0)
    assert np.abs(out - expected).max() < tolerance * np.abs(expected).max()
