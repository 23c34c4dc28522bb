"""The compute kernels under AddressSanitizer and UBSan, on random cases; see fuzz_compute.cc."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ms_zero.native import best_variant
from ms_zero.native.sources import COMMON_FLAGS

HERE = Path(__file__).resolve().parent
OPS = HERE.parent.parent / "ops"
KERNELS = ("activation", "attention", "cast", "cross_entropy", "embedding", "linear", "norm", "rotary")
SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-w")


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_random_cases_stay_inside_and_repeat_their_bits(tmp_path):
    variant = best_variant()
    sources = [HERE / "fuzz_compute.cc", OPS / "common" / "threads.cc"]
    sources += [source for name in KERNELS for source in sorted((OPS / name / "cpu").glob("*.cc"))]
    command = ["g++", *COMMON_FLAGS, *variant.flags, *SANITIZE, f"-I{OPS / 'common'}", *map(str, sources)]
    built = subprocess.run([*command, "-o", str(tmp_path / "fuzz")], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(tmp_path / "fuzz"), "1", "30"], capture_output=True, text=True, timeout=300)
    assert done.stdout == f"{variant.name}: 30 cases\n", done.stdout + done.stderr
