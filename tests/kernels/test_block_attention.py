"""Attention that meets its keys block by block, against attention to all of them."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero.kernels import Attended, BlockAttention, BlockGradients, Where

RNG = np.random.default_rng(3)
SCALE = 0.6


def whole(q, k, v, places, starts, grad):
    """Result, log sums and gradients in fp64; `places`: positions of the queries."""
    group, keys = q.shape[2] // k.shape[2], np.arange(k.shape[1])
    k, v = (np.repeat(x, group, 2) for x in (k, v))
    scores = SCALE * np.einsum("bqhd,bkhd->bhqk", q, k)
    hidden = (keys[None, None] > places[None, :, None]) | (keys[None, None] < starts[:, :, None])
    scores = np.where(hidden[:, None], -np.inf, scores)
    log_sums = np.log(np.exp(scores).sum(-1))
    weights = np.exp(scores - log_sums[..., None])
    out = np.einsum("bhqk,bkhd->bqhd", weights, v)
    dv = np.einsum("bhqk,bqhd->bkhd", weights, grad)
    products = np.einsum("bqhd,bqhd->bhq", out, grad)
    dscores = weights * (np.einsum("bqhd,bkhd->bhqk", grad, v) - products[..., None]) * SCALE
    dq = np.einsum("bhqk,bkhd->bqhd", dscores, k)
    dk = np.einsum("bhqk,bqhd->bkhd", dscores, q)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    return out, log_sums, dq, dk, dv


def blockwise(attention, q, k, v, places, starts, grad, blocks, dtype):
    """The same, over blocks of keys in the order given."""
    def tensor(x):
        return Tensor(x.astype(np.float32)).astype(dtype)

    q, grad = tensor(q), tensor(grad)
    parts = [(keys, tensor(k[:, keys]), tensor(v[:, keys])) for keys in map(np.array, blocks)]
    queries, starts = Tensor(places.astype(np.int32)), Tensor(starts)
    where = [Where(queries, Tensor(keys.astype(np.int32)), starts) for keys, _, _ in parts]
    attended = attention.begin(q)
    for place, (_, keys, values) in zip(where, parts, strict=True):
        attended = attention.add(attended, q, keys, values, place)
    result = Attended(attended.out.astype(dtype), attended.log_sums)
    dq = Tensor(np.zeros(q.shape, np.float32))
    dk, dv = (np.zeros(k.shape, np.float32) for _ in range(2))
    for place, (index, keys, values) in zip(where, parts, strict=True):
        zeros = [Tensor(np.zeros(keys.shape, np.float32)) for _ in range(2)]
        grads = BlockGradients(dq, *zeros)
        grads = attention.add_gradients(grads, q, keys, values, grad, result, place)
        dq, dk[:, index], dv[:, index] = grads.q, grads.k.asnumpy(), grads.v.asnumpy()
    return attended.out.asnumpy(), attended.log_sums.asnumpy(), dq.asnumpy(), dk, dv


@pytest.mark.parametrize(("dtype", "tolerance"), [(ms.float32, 5e-6), (ms.float16, 5e-3)])
def test_blocks_in_any_order_give_what_all_keys_give(target, dtype, tolerance):
    if dtype == ms.float32 and target != "CPU":
        tolerance = 1e-4  # the framework's exp
    attention, length = BlockAttention(SCALE, target), 150
    places = np.concatenate([np.arange(10, 80), np.arange(100, 130)])  # two chunks, more than a tile
    q, grad = RNG.standard_normal((2, 2, len(places), 4, 5))
    k, v = RNG.standard_normal((2, 2, length, 2, 5))
    starts = np.array([[0] * len(places), np.minimum(places, 37)]).astype(np.int32)
    blocks = [range(90, 150), [*range(20), *range(70, 90)], range(20, 70)]  # the first is partly the future
    found = blockwise(attention, q, k, v, places, starts, grad, blocks, dtype)
    exact = (x.astype(np.float32).astype(np.float64) for x in (q, k, v))
    if dtype == ms.float16:
        exact = (x.astype(np.float16).astype(np.float64) for x in (q, k, v))
    for mine, right in zip(found, whole(*exact, places, starts, grad), strict=True):
        assert np.abs(mine - right).max() < tolerance * max(1.0, np.abs(right).max())


def test_a_query_without_keys_has_nothing_and_gives_nothing(target):
    attention = BlockAttention(SCALE, target)
    q, k, v, grad = (Tensor(x) for x in RNG.standard_normal((4, 1, 3, 2, 4)).astype(np.float32))
    where = Where(Tensor(np.arange(3, dtype=np.int32)), Tensor(np.arange(1, 4, dtype=np.int32)))
    attended = attention.add(attention.begin(q), q, k, v, where)
    assert (attended.out.asnumpy()[:, 0] == 0).all()
    assert np.isposinf(attended.log_sums.asnumpy()[:, :, 0]).all()
    assert np.isfinite(attended.log_sums.asnumpy()[:, :, 1:]).all()
    zeros = [Tensor(np.zeros((1, 3, 2, 4), np.float32)) for _ in range(3)]
    grads = attention.add_gradients(BlockGradients(*zeros), q, k, v, grad, attended, where)
    assert (grads.q.asnumpy()[:, 0] == 0).all()
    assert all(np.isfinite(each.asnumpy()).all() for each in (grads.q, grads.k, grads.v))
    assert (grads.k.asnumpy()[:, 2] == 0).all()  # the key at 3 is nobody's past
