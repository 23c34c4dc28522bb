"""Several recorded graphs at once, as the microbatches of a pipeline are."""

import numpy as np
from mindspore import Tensor

from ms_zero._compat import backward, gradient, leaf
from ms_zero.kernels import Linear, PutOff, putting_off
from tests.zero.recorder import INPUT, Followed, follow, forward, loss_of


def reduced(model):
    return [bucket.reduced.asnumpy().copy() for bucket in model.buckets]


def test_each_graph_opens_closes_and_reduces_as_one_alone_does():
    model, comm = follow()
    model.backward(forward(model), last=False)
    alone = comm.take()
    model.drop_gradients()
    graphs = {}
    for name in "abc":
        model.select(name)
        graphs[name] = forward(model, INPUT * (1.0 + "abc".index(name)))
    forwards = len(comm.take()) // 3
    for name in "bac":
        model.select(name)
        model.backward(graphs[name], last=name == "c")
        assert comm.take() == alone[forwards:]
        assert not any(unit.is_open for unit in model.units)
    model.reduce()
    together = reduced(model)
    model.drop_gradients()
    for name in "bac":
        model.backward(forward(model, INPUT * (1.0 + "abc".index(name))), last=name == "c")
    model.reduce()
    assert all(np.array_equal(*pair) for pair in zip(together, reduced(model), strict=True))


def test_gradients_of_weights_that_are_put_off_are_those_of_one_backward():
    cell = Followed()
    for block in cell.blocks:
        block.matmul = Linear()  # puts off; the rest of the model does not
    model, comm = follow(cell=cell)
    model.backward(forward(model))
    model.reduce()
    whole = reduced(model)
    model.drop_gradients()
    comm.take()
    waiting = PutOff()
    x = leaf(INPUT, requires_grad=True)
    model.select("split")
    with model.record(), putting_off(waiting):
        loss = loss_of(model, x)
    with model.putting_off():
        backward(loss, Tensor(np.float32(1)))
    assert not any(unit.is_open for unit in model.units)
    assert not any(event.startswith("reduce") for event in comm.take())
    towards = gradient(x).asnumpy().copy()
    assert np.abs(towards).max() > 0 and np.isfinite(towards).all()
    assert [param.name for param in waiting.params] == [f"blocks.{n}.weight" for n in (2, 1, 0)]
    model.finish(waiting, last=True)
    assert not waiting.params
    assert not any(event.startswith("gather") for event in comm.take())  # weights are not needed any more
    model.reduce()
    assert all(np.array_equal(*pair) for pair in zip(whole, reduced(model), strict=True))
