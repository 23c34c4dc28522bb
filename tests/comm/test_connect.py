"""Joining a job that msrun started."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ms_zero.comm import connect
from ms_zero.errors import UserError

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import numpy as np
from mindspore import Tensor
from ms_zero.comm import ProcessMesh, connect
from ms_zero.mesh import Mesh

comm = connect("CPU")
pmesh = ProcessMesh(Mesh(dp_shard=2), comm)
group = pmesh.group("dp_shard")
x = Tensor(np.arange(4, dtype=np.float32) + comm.rank)
total = comm.all_reduce(x, group).asnumpy().tolist()
shard = comm.reduce_scatter(x, group).asnumpy().tolist()
print("RESULT", comm.rank, comm.world_size, total, shard, comm.exchange(["é", comm.rank]), flush=True)
comm.barrier()
"""


@pytest.fixture
def no_job(monkeypatch):
    for name in list(os.environ):
        if name.startswith("MS_"):
            monkeypatch.delenv(name)


def test_outside_of_a_job_the_missing_variables_are_named(no_job, monkeypatch):
    with pytest.raises(UserError, match=r"not a worker .*MS_ROLE, MS_WORKER_NUM.*ms-zero launch"):
        connect("CPU")
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    with pytest.raises(UserError, match=r"\(MS_WORKER_NUM, MS_SCHED_HOST, MS_SCHED_PORT not set\)"):
        connect("Ascend")


def test_an_unknown_target_names_the_known_ones():
    with pytest.raises(UserError, match="'TPU' is unknown; expected one of CPU, Ascend, GPU"):
        connect("TPU")


@pytest.mark.parametrize("target", ["Ascend", "GPU"])
def test_a_target_without_device_is_one_line(target):
    code = (
        "from ms_zero import comm, errors\n"
        f"try: comm.local({target!r})\n"
        "except errors.UserError as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    shown = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    if shown.stdout == "":
        pytest.skip(f"this machine has an {target} device")
    assert f"hardware.target={target}: MindSpore finds no such device" in shown.stdout


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_workers_of_msrun_connect(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # msrun starts "python"
        "PYTHONPATH": str(ROOT),
        "GLOG_v": "3",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
        "MS_RETRY_INTERVAL_LOWER": "0",
        "MS_RETRY_INTERVAL_UPPER": "1",
    }
    msrun = Path(sys.executable).with_name("msrun")
    command = [msrun, "--worker_num=2", "--local_worker_num=2", "--master_addr=127.0.0.1",
               f"--master_port={free_port()}", f"--log_dir={tmp_path}/log", "--join=True",
               "--cluster_time_out=60", program]  # fmt: skip
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, timeout=120)
    logs = {p.name: p.read_text() for p in (tmp_path / "log").glob("worker_*.log")}
    assert done.returncode == 0, (done.stderr[-2000:], logs)
    for rank in range(2):
        expected = (
            f"RESULT {rank} 2 [1.0, 3.0, 5.0, 7.0] {[[1.0, 3.0], [5.0, 7.0]][rank]} [['é', 0], ['é', 1]]"
        )
        assert expected in logs[f"worker_{rank}.log"]
