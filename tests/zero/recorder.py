"""A communicator of one worker that writes down what is gathered and reduced, and a model to follow."""

import numpy as np
from mindspore import Parameter, Tensor, nn, ops

from ms_zero.comm import Communicator, ProcessMesh
from ms_zero.comm.backend import SingleBackend
from ms_zero.mesh import Mesh
from ms_zero.zero import Options, shard

WIDTH, DEPTH = 4, 3


class Recorder(Communicator):
    """Lists "gather NAME" and "reduce NAME"; a unit is known by the number of its elements."""

    def __init__(self):
        super().__init__(SingleBackend(), 0, 1)
        self.events, self.names = [], {}

    def all_gather_async(self, x, group):
        self.events.append(f"gather {self.names.get(x.size, x.size)}")
        return super().all_gather_async(x, group)

    def reduce_scatter_async(self, x, group, op="sum"):
        self.events.append(f"reduce {self.names.get(x.size, x.size)}")
        return super().reduce_scatter_async(x, group, op)

    def take(self):
        """The events since the last call."""
        events, self.events = self.events, []
        return events


class Block(nn.Cell):
    """A residual matrix and `number` elements that make its size its own."""

    def __init__(self, number):
        super().__init__()
        values = np.random.default_rng(number).standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.3
        self.weight = Parameter(Tensor(values), name="weight")
        self.extra = Parameter(Tensor(np.full(1 + number, 0.1, np.float32)), name="extra")
        self.matmul = ops.MatMul(False, True)

    def construct(self, x):
        return x + self.matmul(x, self.weight) * self.extra.sum()


class Followed(nn.Cell):
    """An input matrix of the root, and blocks; `calls` says which of them run in which order."""

    def __init__(self, calls=range(DEPTH)):
        super().__init__()
        self.blocks = nn.CellList([Block(number) for number in range(DEPTH)])
        self.first = Parameter(Tensor(np.eye(WIDTH, dtype=np.float32)), name="first")
        self.calls = calls

    def construct(self, x):
        x = ops.MatMul()(x, self.first)
        for number in self.calls:
            x = self.blocks[number](x)
        return x


INPUT = Tensor(np.random.default_rng(9).standard_normal((3, WIDTH)).astype(np.float32))


def follow(stage=3, cell=None, **options):
    """(model, recorder); events of the construction are not in the list."""
    cell, comm = cell or Followed(), Recorder()
    options = Options(stage, **{"prefetch": 0, **options})
    # One group of parameters, so that a unit is one bucket.
    model = shard(
        cell, ProcessMesh(Mesh(), comm), stage=stage, options=options, group_of=lambda name: None
    )
    for unit in model.units:
        comm.names[sum(place.slot.stop - place.slot.start for place in unit.places)] = unit.name
    for unit in model.units:
        for part in unit.cells:
            part.register_forward_hook(lambda *_, name=unit.name: comm.events.append(f"forward {name}"))
            part.register_backward_hook(lambda *_, name=unit.name: comm.events.append(f"backward {name}"))
    comm.take()
    return model, comm


def loss_of(model, x=INPUT):
    return (model(x) ** 2).mean()


def forward(model, x=INPUT):
    with model.record():
        return loss_of(model, x)


def step(model, optimizer=None):
    """One step; drops its gradient where there is no optimizer."""
    model.backward(forward(model))
    if optimizer is None:
        model.drop_gradients()
    else:
        optimizer.step(lr=0.1)
