"""A disk that fails in the middle of a run: one clear line, and the last checkpoint is as good as before."""

import os
import subprocess
import sys
from pathlib import Path

from ms_zero.checkpoint import latest, open_checkpoint

ROOT = Path(__file__).resolve().parents[2]

# Fails the writes of optimizer state from the fourth sweep over the buckets.
PROGRAM = """
import errno, os, sys, types
from ms_zero.zero import nvme
from ms_zero.cli.main import main

calls, real = [], nvme.NvmeStates._write_region

def write(self, region, buffer):
    calls.append(region)
    if len(calls) > 3 * len(self._regions):
        nvme.os = types.SimpleNamespace(**{**vars(os), "pwrite": full})
    real(self, region, buffer)

def full(*_):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

nvme.NvmeStates._write_region = write
sys.exit(main(sys.argv[1:]))
"""

SMALL = (
    "model.num_layers=1",
    "model.hidden_size=8",
    "model.num_heads=1",
    "model.max_seq_len=8",
    "data.seq_len=8",
    "train.steps=9",
    "checkpoint.interval=1",
)


def test_the_error_is_one_line_and_the_checkpoint_before_it_is_whole(tmp_path):
    folder = tmp_path / "states"
    arguments = [
        "train",
        str(ROOT / "configs" / "runs" / "quickstart.yaml"),
        *SMALL,
        f"train.output_dir={tmp_path}/out",
        "offload.optimizer=nvme",
        f"offload.nvme_path={folder}",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOG_v": "3", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=tmp_path,
        env={**environment, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    lines = [line for line in done.stderr.splitlines() if "error" in line]
    assert done.returncode == 2 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert "No space left on device" in lines[0] and "resume from the last checkpoint" in lines[0]
    checkpoint = open_checkpoint(latest(tmp_path / "out" / "checkpoints"))
    assert checkpoint.state["progress"]["step"] == 3
    for name in checkpoint.names():
        checkpoint.read(checkpoint.whole(name))
    assert list(folder.iterdir()) == []
