"""Training while operations wait in MindSpore's queue: for a worker whose first operation comes before ours.

Importing this module decides it for the whole process: MindSpore 2.10.0 looks at its launch setting once.
"""

import numpy as np
from mindspore import Tensor, ops

from tests.zero.strangers import train

Tensor(np.ones(1, np.float32)) + 1


def train_queued(comm):
    """Whether operations are queued here, and what training gives."""
    return [operations_are_queued(), train(comm)]


def operations_are_queued():
    """A wrong index is found when the operation runs: at once, or when it is waited for."""
    values, index = Tensor(np.ones((2, 3), np.float32)), Tensor(np.array([[0], [9]], np.int32))
    try:
        found = ops.GatherD()(values, 1, index)
    except RuntimeError:
        return False
    try:
        found.asnumpy()
    except RuntimeError:
        return True
    raise AssertionError("a wrong index passed")
