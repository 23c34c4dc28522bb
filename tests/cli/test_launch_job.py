"""msrun's command line and the environment of a job."""

import argparse
import os
import sys
from pathlib import Path

from ms_zero.cli.launch_job import Job, job_environment, msrun_arguments, usable_cores
from ms_zero.cli.launch_preflight import Cluster


def make_job(node_rank):
    cluster = Cluster(workers=4, nodes=2, node_rank=node_rank, master="10.0.0.1", port=9000)
    return Job(("-m", "ms_zero", "train", "r.yaml", "--x"), cluster, Path("out/logs"), cluster_timeout_s=77)


def environment(base, **options):
    defaults = {"cores": 16, "local_workers": 4, "state_dir": Path("s"), "launch_id": "abc"}
    return job_environment(base, **{**defaults, **options})


def test_msrun_gets_every_argument_of_a_second_node():
    arguments = msrun_arguments(make_job(1))
    assert arguments[:3] == [sys.executable, "-m", "mindspore.parallel.cluster.run"]
    parser = argparse.ArgumentParser()
    for name in ("worker_num", "local_worker_num", "node_rank", "master_port", "cluster_time_out"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("master_addr", "log_dir", "join", "tail_worker_log"):
        parser.add_argument(f"--{name}")
    parser.add_argument("script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER)
    assert vars(parser.parse_args(arguments[3:])) == {
        "worker_num": 4,
        "local_worker_num": 2,
        "node_rank": 1,
        "master_addr": "10.0.0.1",
        "master_port": 9000,
        "cluster_time_out": 77,
        "log_dir": "out/logs",
        "join": "True",
        "tail_worker_log": "4",
        "script": "python",
        "script_args": ["-m", "ms_zero", "train", "r.yaml", "--x"],
    }


def test_nodes_that_share_a_file_system_write_different_files():
    first, second = make_job(0), make_job(1)
    assert first.state_dir != second.state_dir and first.msrun_log != second.msrun_log


def test_workers_share_the_cores_and_wait_passively():
    made = environment({"PATH": "/bin"})
    assert (made["OMP_NUM_THREADS"], made["OMP_WAIT_POLICY"], made["GLOG_v"]) == ("4", "passive", "3")
    assert environment({}, cores=2, local_workers=8)["OMP_NUM_THREADS"] == "1"
    assert made["PATH"].split(":") == [str(Path(sys.executable).parent), "/bin"]


def test_settings_of_the_user_win_over_defaults():
    made = environment({"GLOG_v": "1", "OMP_NUM_THREADS": "3", "MS_NODE_TIMEOUT": "9", "HOME": "/h"})
    assert (made["GLOG_v"], made["OMP_NUM_THREADS"], made["MS_NODE_TIMEOUT"]) == ("1", "3", "9")
    assert made["HOME"] == "/h"


def test_leftovers_of_an_enclosing_job_are_dropped():
    foreign = {"MS_ROLE": "MS_WORKER", "MS_NODE_ID": "3", "RANK_ID": "3", "OMPI_COMM_WORLD_RANK": "3"}
    assert not set(foreign) & set(environment(foreign))


def test_workers_find_this_very_package():
    made = environment({"PYTHONPATH": "/mine"})
    package = str(Path(sys.modules["ms_zero"].__file__).resolve().parent.parent)
    assert made["PYTHONPATH"].split(":") in ([package, "/mine"], ["/mine"])


def test_usable_cores_respect_the_affinity():
    assert 1 <= usable_cores() <= len(os.sched_getaffinity(0))
