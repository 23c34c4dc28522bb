"""Each differentiable collective against the gradient worked out by hand, on 2 and 4 workers.

Where the loss is the sum of the members' parts, member i weighs its output with ``weight(i)``; the gradient
of the collective is then the transposed collective applied to the weights, computed here with numpy.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from ms_zero import _compat
from ms_zero.comm import autograd
from ms_zero.testing import run_workers


def array(seed, shape):
    return np.random.RandomState(seed).randint(-4, 5, shape).astype(np.float32)


def inputs(group, shape):
    return [array(r, shape) for r in group.ranks]


def weights(group, shape):
    return [array(1000 + r, shape) for r in group.ranks]


def forward_backward(function, x, weight):
    """(output, gradient of sum(output * weight) for x); x is not a leaf, as in a model."""
    leaf = Tensor(x)
    leaf.requires_grad_(True)
    with _compat.tape():
        out = function(leaf * 1.0)
        loss = (out * Tensor(weight)).sum()
    _compat.backward(loss)
    return out.asnumpy(), leaf._grad.asnumpy()


def check(function, x, weight, expected_output, expected_grad):
    out, grad = forward_backward(function, x, weight)
    np.testing.assert_array_equal(out, expected_output)
    np.testing.assert_array_equal(grad, expected_grad)


def check_copy_and_reduce(comm, group):
    xs, ws, me = inputs(group, (3, 4)), weights(group, (3, 4)), group.index
    check(lambda x: autograd.copy_to_group(x, comm, group), xs[me], ws[me], xs[me], np.sum(ws, axis=0))
    check(lambda x: autograd.reduce_from_group(x, comm, group), xs[me], ws[me], np.sum(xs, axis=0), ws[me])


def check_gather_and_scatter(comm, group, dim):
    n, me = group.size, group.index
    small, large = (4, 3, 4), tuple(d * n if i == dim % 3 else d for i, d in enumerate((4, 3, 4)))
    xs, ws = inputs(group, small), weights(group, large)
    grad = np.split(np.sum(ws, axis=0), n, axis=dim)[me]
    check(lambda x: autograd.all_gather(x, comm, group, dim), xs[me], ws[me], np.concatenate(xs, dim), grad)
    xs, ws = inputs(group, large), weights(group, small)
    out = np.split(np.sum(xs, axis=0), n, axis=dim)[me]
    grad = np.concatenate(ws, dim)
    check(lambda x: autograd.reduce_scatter(x, comm, group, dim), xs[me], ws[me], out, grad)


def check_all_to_all(comm, group, counts):
    def transpose(arrays, counts, me):
        return np.concatenate([np.split(a, np.cumsum(c)[:-1])[me] for a, c in zip(arrays, counts)])

    me, columns = group.index, list(zip(*counts))
    xs = [array(r, (sum(counts[i]), 3)) for i, r in enumerate(group.ranks)]
    ws = [array(1000 + r, (sum(columns[i]), 3)) for i, r in enumerate(group.ranks)]
    check(lambda x: autograd.all_to_all(x, comm, group, counts[me], columns[me]), xs[me], ws[me],
          transpose(xs, counts, me), transpose(ws, columns, me))  # fmt: skip


def check_broadcast_and_shift(comm, group):
    xs, ws, me, n = inputs(group, (5, 2)), weights(group, (5, 2)), group.index, group.size
    src = n - 1
    grad = np.sum(ws, axis=0) if me == src else np.zeros((5, 2))
    check(lambda x: autograd.broadcast(x, group.ranks[src], comm, group), xs[me], ws[me], xs[src], grad)
    for shift in (1, -1, 2):
        before, after = (me - shift) % n, (me + shift) % n
        check(lambda x: autograd.ring_shift(x, comm, group, shift), xs[me], ws[me], xs[before], ws[after])  # noqa: B023


def check_all(comm, group):
    check_copy_and_reduce(comm, group)
    for dim in (0, 1, -1):
        check_gather_and_scatter(comm, group, dim)
    check_all_to_all(comm, group, [[2] * group.size] * group.size)
    check_all_to_all(comm, group, [[(i + 2 * j) % 3 for j in range(group.size)] for i in range(group.size)])
    check_broadcast_and_shift(comm, group)


def worker_pairs(comm):
    check_all(comm, comm.world)
    if comm.world_size == 4:
        check_all(comm, comm.new_group((comm.rank % 2, comm.rank % 2 + 2)))
    return True


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_gradients_are_the_transposed_collectives(world_size):
    assert run_workers(world_size, worker_pairs, timeout_s=90) == [True] * world_size


def worker_tensor_parallel_mlp(comm):
    """Column-parallel then row-parallel matrix product: output and gradients of the whole, exact integers."""
    n, r = comm.world_size, comm.rank
    x, first, second = array(1, (4, 8)), array(2, (8, 4 * n)), array(3, (4 * n, 8))
    w1, w2 = Tensor(np.split(first, n, 1)[r].copy()), Tensor(np.split(second, n, 0)[r].copy())
    leaves = [Tensor(x), w1, w2]
    for leaf in leaves:
        leaf.requires_grad_(True)
    with _compat.tape():
        hidden = ops.relu(ops.matmul(autograd.copy_to_group(leaves[0] * 1.0, comm, comm.world), w1))
        loss = autograd.reduce_from_group(ops.matmul(hidden, w2), comm, comm.world).sum()
    _compat.backward(loss)
    pre = x @ first
    d_hidden = (np.ones((4, 8)) @ second.T) * (pre > 0)
    assert float(loss.asnumpy()) == (np.maximum(pre, 0) @ second).sum()
    np.testing.assert_array_equal(leaves[0]._grad.asnumpy(), d_hidden @ first.T)
    np.testing.assert_array_equal(w1._grad.asnumpy(), np.split(x.T @ d_hidden, n, 1)[r])
    d_second = np.maximum(pre, 0).T @ np.ones((4, 8))
    np.testing.assert_array_equal(w2._grad.asnumpy(), np.split(d_second, n, 0)[r])
    return True


def test_tensor_parallel_layer_equals_the_whole_layer():
    assert run_workers(2, worker_tensor_parallel_mlp) == [True, True]


def worker_two_graphs(comm):
    """Forward of two microbatches, then backward of both: contexts must not be shared."""
    x = Tensor(np.full(4, comm.rank + 1.0, np.float32))
    x.requires_grad_(True)
    losses = []
    for scale in (1.0, 10.0):
        with _compat.tape():
            losses.append((autograd.all_gather(x * scale, comm, comm.world) * (comm.rank + 1.0)).sum())
    for loss in losses:
        _compat.backward(loss)
    return x._grad.asnumpy().tolist()


def test_two_graphs_alive_at_once():
    assert run_workers(2, worker_two_graphs) == [[33.0] * 4] * 2


def worker_bfloat16(comm):
    x = ops.cast(Tensor(np.full((2, 2), comm.rank + 1.0, np.float32)), ms.bfloat16)
    x.requires_grad_(True)
    with _compat.tape():
        out = autograd.all_gather(x * 1, comm, comm.world, dim=1)
        loss = ops.cast(out, ms.float32).sum()
    _compat.backward(loss)
    return [str(out.dtype), str(x._grad.dtype), ops.cast(x._grad, ms.float32).asnumpy().tolist()]


def test_bfloat16_keeps_its_dtype_both_ways():
    assert run_workers(2, worker_bfloat16) == [["BFloat16", "BFloat16", [[2, 2], [2, 2]]]] * 2
