"""Two products on 8 ranks, built in the process of the front end."""

import numpy as np
from mindspore import Parameter, Tensor, context, nn, ops
from mindspore.parallel import Layout
from mindspore.parallel.auto_parallel import AutoParallel


class TwoProducts(nn.Cell):
    """Columns, then rows of the weights cut over tp."""

    def __init__(self, rows):
        super().__init__()
        layout = Layout((2, 2, 2), ("dp", "cp", "tp"))
        self.w = Parameter(Tensor(np.ones((64, 128), np.float32)), name="w")
        self.w2 = Parameter(Tensor(np.ones((128, 64), np.float32)), name="w2")
        tokens = ("dp", "cp")
        self.first = ops.MatMul().shard((layout(tokens, "None"), layout("None", "tp")))
        self.second = ops.MatMul().shard(
            (layout(tokens, "tp"), layout("tp", "None")), (layout(("dp", "cp", "tp"), "None"),)
        )
        self.square, self.sum = ops.Square().shard(((rows, 1),)), ops.ReduceSum()

    def construct(self, x):
        return self.sum(self.square(self.second(self.first(x, self.w), self.w2)))


class Gradients(nn.Cell):
    """The gradients of the weights."""

    def __init__(self, network):
        super().__init__()
        self.gradients = ops.value_and_grad(network, None, network.trainable_params())

    def construct(self, x):
        return self.gradients(x)


def two_products(rows=8, old_api=False):
    if old_api:
        context.set_context(save_graphs=0)
    network = Gradients(TwoProducts(rows))
    network.set_train()
    cell = AutoParallel(network, "semi_auto")
    cell.dataset_strategy("full_batch")
    return cell, (Tensor(np.ones((16, 64), np.float32)),)
