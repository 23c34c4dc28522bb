"""Sharded models whose gradients the tests set themselves."""

import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_zero.comm import ProcessMesh, local
from ms_zero.mesh import Mesh
from ms_zero.zero import shard


class Parameters(nn.Cell):
    """A cell that only holds parameters."""

    def __init__(self, **values):
        super().__init__()
        for name, value in values.items():
            setattr(self, name, Parameter(Tensor(np.asarray(value, np.float32)), name=name))

    def construct(self, x):
        return x


def sharded(policy="fp32", stage=0, **values):
    """On one worker; parameters with two dims are one group (True), the others another (False)."""
    return shard(Parameters(**values), ProcessMesh(Mesh(), local()), stage=stage, policy=policy)


def give(model, **grads):
    """Set the reduced gradients by parameter name."""
    for bucket in model.buckets:
        values = bucket.assemble(lambda name, a, b: np.ravel(grads[name])[a:b], *bucket.chunk)
        bucket.reduced = Tensor(np.asarray(values, np.float32))


def weights(model):
    return {name: value.asnumpy().astype(np.float32) for name, value in model.whole_values()}
