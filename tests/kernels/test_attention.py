import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import kernels

RNG = np.random.default_rng(0)


def attention(q, k, v, scale=0.7):
    """[B, T, H, D] by plain loops over sequences and heads."""
    out = np.zeros(q.shape, np.result_type(q, k, v))
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for t in range(q.shape[1]):
                scores = scale * k[b, : t + 1, h // group] @ q[b, t, h]
                weights = np.exp(scores - scores.real.max())
                out[b, t, h] = weights @ v[b, : t + 1, h // group] / weights.sum()
    return out


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_causal_attention(check_kernel, kv_heads):
    q, k, v = (RNG.standard_normal((2, 3, heads, 2)) for heads in (4, kv_heads, kv_heads))
    check_kernel(kernels.CausalAttention(0.7, "CPU"), attention, [q, k, v])


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
