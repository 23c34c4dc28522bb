"""The CUDA sources compiled for the host, once for all tests of this folder."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def cuda_libraries(tmp_path_factory):
    """Paths of the libraries: `fused_adam_w` and `grad_stats`, with the C interface that a GPU's has."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("cuda_on_host")
    flags = ["-x", "c++", "-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wall"]
    flags += ["-Wno-unknown-pragmas", "-Wno-sign-compare"]
    flags += [f"-I{ROOT / 'ops' / 'common'}", f"-I{Path(__file__).parent}"]
    libraries = {}
    for op in ("fused_adam_w", "grad_stats"):
        libraries[op] = folder / f"{op}.so"
        source = ROOT / "ops" / op / "cuda" / f"{op}.cu"
        subprocess.run(["g++", *flags, str(source), "-o", str(libraries[op])], check=True)
    return libraries


@pytest.fixture(scope="session")
def host(cuda_libraries):
    """The same libraries, loaded."""
    return {op: ctypes.CDLL(str(path)) for op, path in cuda_libraries.items()}
