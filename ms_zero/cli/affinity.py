"""Which cores a CPU worker computes on.

MindSpore's and OpenMP's pools have a thread per core they see and wait by spinning. Several workers that see
the same cores take them from each other (measured: 2.5 times slower with 2 workers on 2 cores), so each gets
a share of its own.
"""

import os
from collections.abc import Mapping, Sequence

LOCAL_WORKERS_VARIABLE = "MS_ZERO_LOCAL_WORKERS"


def share_of_cores(cores: Sequence[int], index: int, workers: int) -> list[int]:
    """The cores of worker ``index`` of ``workers``; several share one core when there are too few."""
    per_worker = len(cores) // workers
    if per_worker == 0:
        return [cores[index % len(cores)]]
    return list(cores[index * per_worker : (index + 1) * per_worker])


def bind_to_share(environment: Mapping[str, str]) -> None:
    """Keep this process on its share of the cores it may use, if a launcher said how many workers share them.

    Call it before the framework starts its threads. msrun gives a worker's place on its machine in DEVICE_ID.
    """
    workers = environment.get(LOCAL_WORKERS_VARIABLE)
    if workers is not None:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, share_of_cores(cores, int(environment["DEVICE_ID"]), int(workers)))
