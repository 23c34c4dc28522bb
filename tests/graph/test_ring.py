"""The ring of graphs is causal attention and its gradient: executed on CPU, one rank after the other.

Its operators have no CPU kernel; numpy stands for them. A rank waits for no other: what the rank before sends
in a message depends on earlier messages only, so that all ranks are run again until every message is known.
"""

import numpy as np
import pytest
from mindspore import Tensor

from ms_zero.comm import Group
from ms_zero.graph import ring
from ms_zero.graph.strategies import Grid

HEADS, KV_HEADS, WIDTH, LENGTH = 4, 2, 16, 24
SCALE = 1 / np.sqrt(WIDTH)


def scores_of(q, k, causal):
    """q [B, T, H, D], k [B, S, Hkv, D] -> [B, H, T, S]."""
    keys = np.repeat(k, q.shape[2] // k.shape[2], 2)
    scores = np.einsum("bthd,bshd->bhts", q, keys) * SCALE
    return np.where(np.tri(q.shape[1], k.shape[1]) > 0, scores, -1e30) if causal else scores


def flash(causal):
    """FlashAttentionScore."""

    def run(q, k, v, *others):
        q, k, v = (x.asnumpy() for x in (q, k, v))
        scores = scores_of(q, k, causal)
        top = scores.max(-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        values = np.repeat(v, q.shape[2] // v.shape[2], 2)
        out = np.einsum("bhts,bshd->bthd", weights / total, values)
        return tuple(Tensor(x.astype(np.float32)) for x in (top.repeat(8, -1), total.repeat(8, -1), top, out))

    return run


def flash_grad(causal):
    """FlashAttentionScoreGrad: of the final maxima, sums and output."""

    def run(q, k, v, dy, pse, drop, padding, mask, top, total, softmax, out):
        q, k, v, dy, top, total, out = (x.asnumpy() for x in (q, k, v, dy, top, total, out))
        repeats = q.shape[2] // k.shape[2]
        weights = np.exp(scores_of(q, k, causal) - top[..., :1]) / total[..., :1]
        values, keys = np.repeat(v, repeats, 2), np.repeat(k, repeats, 2)
        inner = np.einsum("bthd,bshd->bhts", dy, values) - np.einsum("bthd,bthd->bht", dy, out)[..., None]
        inner = weights * inner * SCALE
        dk, dv = np.einsum("bhts,bthd->bshd", inner, q), np.einsum("bhts,bthd->bshd", weights, dy)
        dk, dv = (x.reshape(*k.shape[:3], repeats, -1).sum(3) for x in (dk, dv))
        dq = np.einsum("bhts,bshd->bthd", inner, keys)
        return tuple(Tensor(x.astype(np.float32)) for x in (dq, dk, dv))

    return run


class Exchange:
    """Stands for AlltoAllV: answers with what the rank before sent in its last run, first with zeros."""

    def __init__(self, index, size, before, after):
        self.index, self.size, self.before, self.after = index, size, before, after

    def __call__(self, message, sent, received):
        length = message.shape[0]
        assert sent[(self.index + 1) % self.size] == received[self.index - 1] == length
        assert sum(sent) == sum(received) == length
        number = len(self.after)
        self.after.append(message.asnumpy())
        known = self.before[number] if number < len(self.before) else np.zeros(length, np.float32)
        return Tensor(known.reshape(-1)[:length] if known.size >= length else np.zeros(length, np.float32))


def run_all(cells, calls):
    """Each rank's call, until all have what others sent."""
    size, sent = len(cells), [[] for _ in cells]
    while True:
        heard, sent = sent, [[] for _ in cells]
        for index, cell in enumerate(cells):
            cell.exchange = cell.exchange_back = Exchange(index, size, heard[index - 1], sent[index])
        found = [call() for call in calls]
        same = all(len(a) == len(b) and all(map(np.array_equal, a, b)) for a, b in zip(heard, sent))
        if same:
            return found, sent


@pytest.fixture
def cells_of(monkeypatch):
    class Unused:
        def __init__(self, group):
            pass

        def add_prim_attr(self, *args):
            pass

    monkeypatch.setattr(ring.ops, "AlltoAllV", Unused)

    def make(size):
        found = []
        for index in range(size):
            group = Group("cp", tuple(range(size)), index, "cp")
            cell = ring.RingAttention(HEADS, WIDTH, Grid(cp=size, context="ring", ring=group))
            cell.causal, cell.attend = flash(True), flash(False)
            cell.causal_grad, cell.attend_grad = flash_grad(True), flash_grad(False)
            found.append(cell)
        return found

    return make


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_ranks_together_attend_and_differentiate_like_one(cells_of, size):
    rng, cells, order = np.random.default_rng(0), cells_of(size), ring.ring_order(LENGTH, size)
    q, dout = (rng.standard_normal((2, LENGTH, HEADS, WIDTH)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((2, LENGTH, KV_HEADS, WIDTH)).astype(np.float32) for _ in range(2))
    top, total, _, out = flash(True)(*map(Tensor, (q, k, v)))
    whole = flash_grad(True)(*map(Tensor, (q, k, v, dout)), None, None, None, None, top, total, None, out)

    parts = [[Tensor(x) for x in np.split(x[:, order], size, 1)] for x in (q, k, v, dout)]
    ours = list(zip(*parts, strict=True))
    forward = [lambda cell=cell, x=x: cell.forward(*x[:3]) for cell, x in zip(cells, ours, strict=True)]
    results, sent = run_all(cells, forward)
    joined = np.concatenate([result[0].asnumpy() for result in results], 1)
    np.testing.assert_allclose(joined, out.asnumpy()[:, order], atol=1e-5)
    # A rank sends its keys and values on, and those that came by, but not back to whom they belong.
    block = 2 * 2 * LENGTH // size * KV_HEADS * WIDTH
    assert [[message.size for message in messages] for messages in sent] == [[block] * (size - 1)] * size

    backward = [
        lambda cell=cell, x=x, y=y: cell.backward(*x[:3], y, (x[3], None, None))
        for cell, x, y in zip(cells, ours, results, strict=True)
    ]
    grads, sent = run_all(cells, backward)
    assert [len(messages) for messages in sent] == [2 * (size - 1)] * size
    for number, want in enumerate(whole):
        joined = np.concatenate([grad[number].asnumpy() for grad in grads], 1)
        np.testing.assert_allclose(joined, want.asnumpy()[:, order], atol=1e-5)


def test_the_order_of_a_ring_gives_every_rank_an_early_and_a_late_chunk():
    assert ring.ring_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert sorted(ring.ring_order(24, 3)) == list(range(24))
