import os
import subprocess
import sys

import pytest

from ms_zero.cli.affinity import share_of_cores


@pytest.mark.parametrize(
    ("cores", "workers", "expected"),
    [
        ([0, 1], 2, [[0], [1]]),
        ([0, 1, 2, 3, 4], 2, [[0, 1], [2, 3]]),
        ([3, 7], 3, [[3], [7], [3]]),
        ([5], 1, [[5]]),
    ],
)
def test_every_worker_gets_cores_and_none_twice_while_they_last(cores, workers, expected):
    assert [share_of_cores(cores, index, workers) for index in range(workers)] == expected


@pytest.mark.parametrize("workers", [None, 1, len(os.sched_getaffinity(0))])
def test_only_a_launched_worker_is_bound(workers):
    cores = sorted(os.sched_getaffinity(0))
    variables = {} if workers is None else {"MS_ZERO_LOCAL_WORKERS": str(workers), "DEVICE_ID": "0"}
    code = (
        "import os; from ms_zero.cli.affinity import bind_to_share; bind_to_share(os.environ);"
        "print(sorted(os.sched_getaffinity(0)))"
    )
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(sys.path)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert shown.stdout.strip() == str(share_of_cores(cores, 0, workers or 1))
