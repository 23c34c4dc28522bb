"""Stage 0 on one process: storage, accumulation, parameters without gradients, and issue order."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ms_zero._compat import backward, tape
from ms_zero.comm import local
from ms_zero.zero.data_parallel import DataParallel

SHAPES = {"first": (3, 4), "scale": (), "second": (5, 3), "unused": (7,), "bias": (5,)}


def start_value(name, start, stop):
    size = int(np.prod(SHAPES[name], dtype=int))
    return np.random.default_rng(len(name)).standard_normal(size).astype(np.float32)[start:stop]


class Net(nn.Cell):
    """bias + second @ sigmoid(scale * first @ x); `second` is used twice, `unused` never."""

    def __init__(self):
        super().__init__()
        for name, shape in SHAPES.items():
            setattr(self, name, Parameter(Tensor(np.zeros(shape, np.float32)), name=name))
        self.matmul = ops.MatMul(False, True)

    def construct(self, x):
        hidden = ops.sigmoid(self.matmul(x, self.first) * self.scale)
        twice = self.matmul(hidden, self.second) + self.matmul(hidden * hidden, self.second)
        return (twice + self.bias).sum()


def numpy_gradients(x, values):
    first, second, scale = (values[name].astype(np.float64) for name in ("first", "second", "scale"))
    pre = x @ first.T
    hidden = 1 / (1 + np.exp(-pre * scale))
    ones = np.ones((len(x), 5))
    d_hidden = (ones @ second) * (1 + 2 * hidden)
    d_pre = d_hidden * hidden * (1 - hidden)
    return {
        "first": (d_pre * scale).T @ x,
        "scale": (d_pre * pre).sum(),
        "second": ones.T @ (hidden + hidden**2),
        "unused": np.zeros(7),
        "bias": ones.sum(0),
    }


def build(bucket_elements, comm=None):
    comm = comm or local()
    net = Net()
    params = dict(net.parameters_and_names())
    parallel = DataParallel(
        params,
        start_value,
        comm=comm,
        group=comm.world,
        bucket_elements=bucket_elements,
        key_of=lambda name: name == "bias",
    )
    return net, parallel


def accumulate(net, parallel, microbatches):
    for number, x in enumerate(microbatches, 1):
        with tape():
            loss = net(Tensor(x))
        with parallel.microbatch(last=number == len(microbatches)):
            backward(loss)
    return parallel.reduce()


def by_name(parallel, tensors):
    found = {}
    for bucket, tensor in zip(parallel.buckets, tensors, strict=True):
        for slot in bucket.layout.slots:
            found[slot.name] = tensor.asnumpy()[slot.start : slot.stop].reshape(slot.shape)
    return found


def batches(count):
    return np.random.default_rng(7).standard_normal((count, 2, 4)).astype(np.float32)


@pytest.mark.parametrize("bucket_elements", [1, 14, 1000])
@pytest.mark.parametrize("count", [1, 3, 4])
def test_gradients_of_microbatches_add_up(bucket_elements, count):
    net, parallel = build(bucket_elements)
    values = {name: param.asnumpy() for name, param in net.parameters_and_names()}
    expected = numpy_gradients(batches(count).reshape(-1, 4).astype(np.float64), values)
    for _ in range(2):  # the second step must not see the first
        found = by_name(parallel, parallel.gather(accumulate(net, parallel, batches(count))))
        for name, gradient in expected.items():
            np.testing.assert_allclose(found[name], gradient, rtol=1e-5, atol=1e-6, err_msg=name)


def test_parameters_are_views_that_see_updates_of_the_flat_tensor():
    net, parallel = build(1000)
    for name, param in net.parameters_and_names():
        np.testing.assert_array_equal(param.asnumpy().reshape(-1), start_value(name, 0, None))
    for bucket in parallel.buckets:
        bucket.flat.copy_(bucket.flat * 2)
    for name, param in net.parameters_and_names():
        np.testing.assert_array_equal(param.asnumpy().reshape(-1), 2 * start_value(name, 0, None))
    for bucket in parallel.buckets:
        bucket.load(start_value)
    np.testing.assert_array_equal(net.first.asnumpy().reshape(-1), start_value("first", 0, None))


def test_the_full_gradient_is_not_kept_on_the_parameter():
    net, parallel = build(1000)
    accumulate(net, parallel, batches(2))
    assert all(param._grad is None for param in net.get_parameters())
    assert all(bucket.grad is None for bucket in parallel.buckets)


class RecordingComm:
    """Delegates to a one-process communicator and records what is issued."""

    def __init__(self):
        self.inner = local()
        self.world = self.inner.world
        self.sizes = []

    def reduce_scatter_async(self, x, group):
        self.sizes.append(x.size)
        return self.inner.reduce_scatter_async(x, group)


def test_buckets_are_issued_once_a_step_in_bucket_order_whatever_backward_does():
    comm = RecordingComm()
    net, parallel = build(1, comm)
    order = [bucket.layout.padded_size for bucket in parallel.buckets]
    # "unused" never completes by itself, yet stands before others in the order.
    first_names = [bucket.layout.slots[0].name for bucket in parallel.buckets]
    assert first_names == ["bias", "unused", "second", "scale", "first"]
    accumulate(net, parallel, batches(3))
    assert comm.sizes == order
    accumulate(net, parallel, batches(1))
    assert comm.sizes == order * 2


def test_a_gradient_that_arrives_twice_in_one_backward_is_an_error():
    _, parallel = build(1000)
    bucket = parallel.buckets[0]
    name = bucket.layout.slots[0].name
    grad = Tensor(np.zeros(SHAPES[name], np.float32), ms.float32)
    bucket.deliver(name, grad)
    with pytest.raises(AssertionError, match=name):
        bucket.deliver(name, grad)
