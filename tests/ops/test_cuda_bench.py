"""scripts/bench_cuda_update.py without a GPU: its checks on kernels compiled for the host."""

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "bench_cuda_update.py"
CASES = ((0, 0, 1), (1, 0, 1), (1000, 3, 1), (8192 + 40, 1, 1), (70, 0, 70))


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_cuda_update", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_cuda_update"] = module
    spec.loader.exec_module(module)
    return module


class HostDevice:
    """The script's device in host memory. `damage` bytes of each download are changed."""

    def __init__(self, damage=0):
        self.blocks, self.damage = [], damage

    def empty(self, nbytes):
        block = np.zeros(nbytes + 64, np.uint8)
        self.blocks.append(block)
        return block.ctypes.data + -block.ctypes.data % 64

    def upload(self, address, array):
        ctypes.memmove(address, array.ctypes.data, array.nbytes)

    def download(self, address, array):
        ctypes.memmove(array.ctypes.data, address, array.nbytes)
        array.view(np.uint8)[: self.damage] ^= 1

    def release(self):
        self.blocks.clear()


class HostKernels:
    """The script's kernels in two libraries."""

    def __new__(cls, bench, libraries):
        kernels = bench.Kernels.__new__(bench.Kernels)
        kernels._update = libraries["fused_adam_w"].msz_cuda_adamw_many
        kernels._sum = libraries["grad_stats"].msz_cuda_sum_of_squares
        return kernels


def test_right_kernels_pass_the_checks(bench, host):
    kernels = HostKernels(bench, host)
    assert bench.check_update(HostDevice(), kernels, CASES) == []
    assert bench.check_statistics(HostDevice(), kernels, (0, 1, 7, 8193, 40_003)) == []


def test_a_single_wrong_bit_is_reported(bench, host):
    kernels = HostKernels(bench, host)
    failures = bench.check_update(HostDevice(damage=1), kernels, [(100, 0, 1)])
    assert any("param differs in the bits" in failure for failure in failures)
    assert any("low_precision differs" in failure for failure in failures)
    assert bench.check_statistics(HostDevice(damage=4), kernels, (7,))


def test_a_kernel_that_skips_is_far_from_float64(bench):
    rng = np.random.default_rng(0)
    before = [rng.standard_normal(1000).astype(np.float32) for _ in range(3)]
    before = [before[0], before[1], np.abs(before[2]), rng.standard_normal(1000).astype(np.float32)]
    scalars = bench.reference.adamw_scalars(**bench.SCALARS)
    assert bench.distance_from_float64(before, before[0], scalars) > bench.TOLERANCE
    updated = [array.copy() for array in before]
    bench.reference.adamw(*updated, None, scalars)
    assert bench.distance_from_float64(before, updated[0], scalars) < bench.TOLERANCE / 2


def test_refusals_of_the_kernels_are_told(bench, host):
    kernels = HostKernels(bench, host)
    with pytest.raises(bench.Failure, match="update kernel returned -2"):
        kernels.update([bench.Tensor(None, None, None, None, None, -1)], bench.FP32, None, 16)


def test_a_missing_compiler_is_one_line(tmp_path):
    if Path("/usr/local/cuda/bin/nvcc").is_file():
        pytest.skip("nvcc is in its usual place")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("bench_cuda_update.py: error: no nvcc")


def test_a_missing_gpu_is_one_line(bench):
    try:
        nvcc = bench.find_nvcc()
    except bench.Failure:
        pytest.skip("no nvcc")
    if Path("/dev/nvidia0").exists():
        pytest.skip("there is a GPU")
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env=os.environ | {"PATH": f"{Path(nvcc).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("bench_cuda_update.py: error: no CUDA device was found")
    assert len(done.stderr.splitlines()) == 1
