"""A small model with everything that is awkward to shard, and plain training of it in plain MindSpore."""

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

VOCAB, WIDTH, DEPTH = 11, 6, 3
#: What is trained on: rows of token ids and labels, by step.
ROWS, LENGTH = 12, 5


class Block(nn.Cell):
    """A residual matrix with a 0-dim gate and, in odd blocks, a bias that only some inputs reach."""

    def __init__(self, rng, number):
        super().__init__()
        weight = rng.standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.3
        self.weight = Parameter(Tensor(weight), name=f"w{number}")
        self.gate = Parameter(Tensor(np.float32(0.5 + number)), name=f"g{number}")
        self.bias = Parameter(Tensor(rng.standard_normal(WIDTH).astype(np.float32)), name=f"b{number}")
        self.matmul = ops.MatMul(False, True)

    def construct(self, x, use_bias=False):
        y = self.matmul(x, self.weight) * self.gate
        if use_bias:
            y = y + self.bias
        return x + y


class Silent(nn.Cell):
    """A unit without parameters."""

    def construct(self, x):
        return x * 1.0


class Embedding(nn.Cell):
    def __init__(self, rng):
        super().__init__()
        self.table = Parameter(Tensor(rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)), name="table")

    def construct(self, ids):
        return ops.Gather()(self.table, ids, 0)


class Head(nn.Cell):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def construct(self, x):
        return ops.MatMul(False, True)(x, self.table)


class Awkward(nn.Cell):
    """Tied table, frozen scale, 0-dim gates, an unused parameter, odd sizes, a bias used now and then."""

    def __init__(self, seed=3):
        super().__init__()
        rng = np.random.default_rng(seed)
        self.embed = Embedding(rng)
        self.blocks = nn.CellList([Block(rng, number) for number in range(DEPTH)])
        self.silent = nn.CellList([Silent(), Silent()])
        self.head = Head(self.embed.table)
        self.scale = Parameter(Tensor(np.full(1, 0.5, np.float32)), name="scale", requires_grad=False)
        self.unused = Parameter(Tensor(rng.standard_normal((3, 5)).astype(np.float32)), name="unused")
        self.use_bias = True

    def construct(self, ids):
        x = self.embed(ids.reshape(-1)) * self.scale
        for block in self.blocks:
            x = block(x, self.use_bias)
        for cell in self.silent:
            x = cell(x)
        return self.head(x)


def batch(step):
    """int32 ids and labels [ROWS, LENGTH] of a step."""
    rng = np.random.default_rng(step)
    ids, labels = rng.integers(0, VOCAB, (2, ROWS, LENGTH)).astype(np.int32)
    return ids, labels


def loss_of(model, ids, labels):
    """Mean cross entropy."""
    logits = model(Tensor(ids)).astype(ms.float32)
    picked = ops.GatherD()(ops.LogSoftmax(-1)(logits), 1, Tensor(labels.reshape(-1, 1)))
    return -picked.sum() / labels.size


def plain_training(steps, lr, seed=3):
    """Losses, gradients of the last step and final parameters of SGD on the whole batch."""
    model = Awkward(seed)
    params = model.trainable_params()
    losses = []
    for step in range(steps):
        ids, labels = batch(step)

        def loss(ids=ids, labels=labels):
            return loss_of(model, ids, labels)

        value, grads = ms.value_and_grad(loss, None, params)()
        losses.append(float(value.asnumpy()))
        for param, grad in zip(params, grads, strict=True):
            param.set_data(Tensor(param.asnumpy() - np.float32(lr) * grad.asnumpy()))
    names = {id(param): name for name, param in model.parameters_and_names()}
    gradients = {names[id(p)]: g.asnumpy() for p, g in zip(params, grads, strict=True)}
    return losses, gradients, {name: param.asnumpy() for name, param in model.parameters_and_names()}
