"""A model in plain MindSpore, and functions that arrange it, for the front end's process as well."""

import numpy as np
from mindspore import Tensor, nn, ops, set_seed

from ms_zero import graph
from ms_zero.mesh import Mesh

WIDTH, LAYERS = 16, 2


class Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm([WIDTH])
        self.up, self.down = nn.Dense(WIDTH, 4 * WIDTH, activation="relu"), nn.Dense(4 * WIDTH, WIDTH)

    def construct(self, x):
        return x + self.down(self.up(self.norm(x)))


class Regressor(nn.Cell):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.layers = nn.CellList([Block() for _ in range(LAYERS)])
        self.head = nn.Dense(WIDTH, 8)

    def construct(self, ids):
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class SummedLoss(nn.Cell):
    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model, self.square, self.sum = model, ops.Square(), ops.ReduceSum()

    def construct(self, ids, target):
        return self.sum(self.square(self.model(ids) - target))


STRATEGIES = {
    "model.table": graph.Vocabulary(),
    "model.layers.*.up": graph.Column(),
    "model.layers.*.down": graph.Row(),
    "model.head.matmul": graph.Operator(((("dp", "tp"), None), (None, None))),
}


def arrangement(mesh, *, propagate=False, strategies=STRATEGIES, **others):
    names = {"first": ("model.table",), "blocks": ("model.layers.*",), "last": ("model.head",)}
    return graph.Arrangement(mesh=mesh, strategies=strategies, propagate=propagate, **(names | others))


def build(degrees=None, rows=16, clip_norm=0.0, optimizer="sgd", comm=None, **others):
    set_seed(1)
    batch = Tensor(np.zeros(rows, np.int32)), Tensor(np.zeros((rows, 8), np.float32))
    arranged = arrangement(Mesh(**(degrees or {})), **others)
    network = SummedLoss(Regressor())
    return graph.parallelise(network, batch, arranged, clip_norm=clip_norm, optimizer=optimizer, comm=comm)


def build_propagated(degrees, **others):
    """With strategies of the layers only."""
    strategies = {name: STRATEGIES[name] for name in ("model.layers.*.up", "model.layers.*.down")}
    return build(degrees, propagate=True, strategies=strategies, **others)


def build_refused():
    """A strategy that only the compiler can refuse: of one dim for a tensor of two."""
    return build({"dp_shard": 2}, strategies={"square": graph.Operator((("dp",),))})


def build_something_else():
    return SummedLoss(Regressor())
