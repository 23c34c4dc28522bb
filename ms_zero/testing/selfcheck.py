"""Self-checks of an installation: does mindspore run here, and do workers agree on collectives?

``python -m ms_zero.testing.selfcheck`` imports mindspore, runs one operation and prints what it has found as
a line of JSON. ``ms-zero doctor`` runs it in a process of its own, which may crash or hang.
"""

import json
import sys
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import device_context

from ms_zero.comm import Communicator

Outcome = tuple[Any, Any]  # what a worker has, what it should have


def probe() -> dict[str, Any]:
    """Run an operation on the CPU; returns the versions and how many devices of each target are available."""
    total = (ms.Tensor(np.arange(4, dtype=np.float32)) + 1).sum().asnumpy()
    if total != 10.0:
        raise RuntimeError(f"sum(arange(4) + 1) gave {total}, expected 10")
    modules = {"CPU": device_context.cpu, "GPU": device_context.gpu, "Ascend": device_context.ascend}
    devices = {
        name: module.device_count() if module.is_available() else 0 for name, module in modules.items()
    }
    return {"mindspore": ms.__version__, "numpy": np.__version__, "devices": devices}


def check_collectives(comm: Communicator) -> list[str]:
    """Run every collective of `comm` over all workers on known numbers; returns what was checked.

    Raises RuntimeError naming the first collective with a wrong result.
    """
    checks = (_all_reduce, _all_gather, _reduce_scatter, _all_to_all, _broadcast, _ring, _exchange)
    for check in checks:
        result, expected = check(comm)
        if not np.array_equal(result, expected):
            name = check.__name__.strip("_")
            raise RuntimeError(f"{name} on rank {comm.rank} gave {result}, expected {expected}")
    comm.barrier()
    return [check.__name__.strip("_") for check in checks]


def _values(comm: Communicator, rank: int) -> np.ndarray:
    """Two numbers for each worker, different on every rank: float32 [2 N]."""
    return np.arange(2 * comm.world_size, dtype=np.float32) + 100 * rank


def _all(comm: Communicator) -> list[np.ndarray]:
    return [_values(comm, rank) for rank in range(comm.world_size)]


def _own_block(comm: Communicator, values: np.ndarray) -> np.ndarray:
    return values[2 * comm.rank : 2 * comm.rank + 2]


def _all_reduce(comm: Communicator) -> Outcome:
    result = comm.all_reduce(ms.Tensor(_values(comm, comm.rank)), comm.world)
    return result.asnumpy(), sum(_all(comm))


def _all_gather(comm: Communicator) -> Outcome:
    result = comm.all_gather(ms.Tensor(_values(comm, comm.rank)), comm.world)
    return result.asnumpy(), np.concatenate(_all(comm))


def _reduce_scatter(comm: Communicator) -> Outcome:
    result = comm.reduce_scatter(ms.Tensor(_values(comm, comm.rank)), comm.world)
    return result.asnumpy(), _own_block(comm, sum(_all(comm)))


def _all_to_all(comm: Communicator) -> Outcome:
    result = comm.all_to_all(ms.Tensor(_values(comm, comm.rank)), comm.world)
    return result.asnumpy(), np.concatenate([_own_block(comm, values) for values in _all(comm)])


def _broadcast(comm: Communicator) -> Outcome:
    last = comm.world_size - 1
    result = comm.broadcast(ms.Tensor(_values(comm, comm.rank)), last, comm.world)
    return result.asnumpy(), _values(comm, last)


def _ring(comm: Communicator) -> Outcome:
    """Send to the next rank and receive from the one before; rank 0 sends first, so that nobody waits."""
    own = ms.Tensor(_values(comm, comm.rank))
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    if comm.rank == 0:
        comm.send(own, after, comm.world)
    result = comm.recv(own.shape, own.dtype, before, comm.world)
    if comm.rank != 0:
        comm.send(own, after, comm.world)
    return result.asnumpy(), _values(comm, before)


def _exchange(comm: Communicator) -> Outcome:
    return comm.exchange({"rank": comm.rank}), [{"rank": rank} for rank in range(comm.world_size)]


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(probe()) + "\n")
