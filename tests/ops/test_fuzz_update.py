"""The update and statistics kernels under AddressSanitizer and UBSan, on random cases; see fuzz_update.cc."""

import shutil
import subprocess
from pathlib import Path

import pytest

from ms_zero.native import supported_variants
from ms_zero.native.sources import COMMON_FLAGS

HERE = Path(__file__).resolve().parent
OPS = HERE.parent.parent / "ops"
SOURCES = [
    HERE / "fuzz_update.cc",
    OPS / "common" / "threads.cc",
    OPS / "fused_adam_w" / "cpu" / "fused_adam_w.cc",
    OPS / "fused_sgd" / "cpu" / "fused_sgd.cc",
    OPS / "grad_stats" / "cpu" / "grad_stats.cc",
]
SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"


def compile_fuzzer(compiler, target, *flags):
    command = [compiler, *COMMON_FLAGS, *flags, f"-I{OPS / 'common'}", *map(str, SOURCES), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def run(*command):
    # The emulator and the sanitizer keep memory for the process: nothing is leaked on purpose or by accident.
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("variant", supported_variants(), ids=lambda variant: variant.name)
def test_random_cases_have_the_exact_bits_and_stay_inside(variant, tmp_path):
    compile_fuzzer("g++", tmp_path / "fuzz", *variant.flags, *SANITIZE)
    shown = [run(str(tmp_path / "fuzz"), seed, "150") for seed in ("1", "2")]
    assert shown == [f"{variant.name}: 150 cases\n"] * 2


@pytest.mark.skipif(
    shutil.which(CROSS) is None or shutil.which(EMULATOR) is None, reason="no compiler or emulator for Arm"
)
def test_random_cases_have_the_exact_bits_on_arm(tmp_path):
    compile_fuzzer(CROSS, tmp_path / "fuzz", "-static")
    assert run(EMULATOR, str(tmp_path / "fuzz"), "3", "100") == "neon: 100 cases\n"


@pytest.mark.skipif(shutil.which(CROSS) is None, reason="no compiler for Arm")
def test_every_cpu_source_compiles_for_arm(tmp_path):
    sources = sorted([*OPS.glob("common/*.cc"), *OPS.glob("*/cpu/*.cc")])
    command = [CROSS, *COMMON_FLAGS, "-O1", f"-I{OPS / 'common'}", "-shared", *map(str, sources)]
    done = subprocess.run([*command, "-o", str(tmp_path / "all.so")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
