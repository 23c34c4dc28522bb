"""The ring of graphs is causal attention and its gradient: executed on CPU, one rank after the other.

Its operators have no CPU kernel; numpy stands for them. A rank waits for no other: what the rank before sends
in a message depends on earlier messages only, so that all ranks are run again until every message is known.
"""

from functools import partial

import numpy as np
import pytest
from mindspore import Tensor

from ms_zero.comm import Group
from ms_zero.graph import ring
from ms_zero.graph.strategies import Grid

HEADS, KV_HEADS, WIDTH, LENGTH = 4, 2, 16, 24
SCALE = 1 / np.sqrt(WIDTH)


def scores_of(q, k, hidden):
    """q [B, T, H, D], k [B, S, Hkv, D], hidden [B, 1, T, S] or None -> [B, H, T, S]."""
    keys = np.repeat(k, q.shape[2] // k.shape[2], 2)
    scores = np.einsum("bthd,bshd->bhts", q, keys) * SCALE
    return scores if hidden is None else np.where(hidden, -np.inf, scores)


def hidden_of(causal, q, k, mask):
    """Where a query sees no key: FlashAttentionScore has a compressed mask in its causal mode."""
    if causal:
        return np.tri(q.shape[1], k.shape[1]) == 0
    return None if mask is None else mask.asnumpy() > 0


def flash(causal):
    """FlashAttentionScore; a query without a key gets nan for everything."""

    def run(q, k, v, pse=None, drop=None, padding=None, mask=None):
        hidden = hidden_of(causal, q, k, mask)
        q, k, v = (x.asnumpy() for x in (q, k, v))
        scores = scores_of(q, k, hidden)
        top = scores.max(-1, keepdims=True)
        with np.errstate(invalid="ignore"):
            weights = np.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        values = np.repeat(v, q.shape[2] // v.shape[2], 2)
        out = np.einsum("bhts,bshd->bthd", weights / total, values)
        return tuple(Tensor(x.astype(np.float32)) for x in (top.repeat(8, -1), total.repeat(8, -1), top, out))

    return run


def flash_grad(causal):
    """FlashAttentionScoreGrad: of the final maxima, sums and output."""

    def run(q, k, v, dy, pse, drop, padding, mask, top, total, softmax, out):
        hidden = hidden_of(causal, q, k, mask)
        q, k, v, dy, top, total, out = (x.asnumpy() for x in (q, k, v, dy, top, total, out))
        repeats = q.shape[2] // k.shape[2]
        weights = np.exp(scores_of(q, k, hidden) - top[..., :1]) / total[..., :1]
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


# Documents of 5 and 19 tokens, and of 1, 12, 10 and 1: blocks of which a query sees some keys, all, or none.
BORDERS = ((5, 19), (1, 12, 10, 1))


def starts_of(borders):
    return np.concatenate([np.full(size, sum(borders[:at])) for at, size in enumerate(borders)])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("has_documents", [False, True])
def test_all_ranks_together_attend_and_differentiate_like_one(cells_of, size, has_documents):
    rng, cells, order = np.random.default_rng(0), cells_of(size), ring.ring_order(LENGTH, size)
    q, dout = (rng.standard_normal((2, LENGTH, HEADS, WIDTH)).astype(np.float32) for _ in range(2))
    k, v = (rng.standard_normal((2, LENGTH, KV_HEADS, WIDTH)).astype(np.float32) for _ in range(2))
    starts = np.stack(list(map(starts_of, BORDERS))).astype(np.int32) * has_documents
    places = np.arange(LENGTH)
    mask = Tensor((places < starts[:, None, :, None]) | (places > places[:, None]))
    top, total, _, out = flash(False)(*map(Tensor, (q, k, v)), mask=mask)
    whole = flash_grad(False)(*map(Tensor, (q, k, v, dout)), None, None, None, mask, top, total, None, out)

    parts = [[Tensor(x) for x in np.split(x[:, order], size, 1)] for x in (q, k, v, starts, dout)]
    ours = [x[:4] if has_documents else x[:3] for x in zip(*parts, strict=True)]
    names = ("forward_documents", "backward_documents") if has_documents else ("forward", "backward")
    run, back = ([getattr(cell, name) for cell in cells] for name in names)
    results, sent = run_all(cells, [partial(f, *x) for f, x in zip(run, ours, strict=True)])
    joined = np.concatenate([result[0].asnumpy() for result in results], 1)
    np.testing.assert_allclose(joined, out.asnumpy()[:, order], atol=1e-5)
    # A rank sends its keys and values on, and those that came by, but not back to whom they belong.
    block = 2 * 2 * LENGTH // size * KV_HEADS * WIDTH
    assert [[message.size for message in messages] for messages in sent] == [[block] * (size - 1)] * size

    last = zip(back, ours, results, parts[-1], strict=True)
    grads, sent = run_all(cells, [partial(f, *x, y, (dy, None, None)) for f, x, y, dy in last])
    assert [len(messages) for messages in sent] == [2 * (size - 1)] * size
    for number, want in enumerate(whole):
        joined = np.concatenate([grad[number].asnumpy() for grad in grads], 1)
        np.testing.assert_allclose(joined, want.asnumpy()[:, order], atol=1e-5)


def test_the_order_of_a_ring_gives_every_rank_an_early_and_a_late_chunk():
    assert ring.ring_order(8, 2).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert sorted(ring.ring_order(24, 3)) == list(range(24))
