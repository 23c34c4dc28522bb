"""Compile the CUDA kernels with nvcc, where there is one."""

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ms_zero.errors import UserError
from ms_zero.native.build import run_tool
from ms_zero.native.libraries import installed_folder
from ms_zero.native.sources import source_root

ARCHITECTURES = ("80", "90")
"""Compute capabilities with machine code in the library; newer devices compile the PTX of the last one."""
_PREFIX = "libms_zero_cuda-"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fmad=false",  # a product and a sum stay two rounded operations
    "-ftz=false",
    "-prec-div=true",
    "-prec-sqrt=true",
    "-Xcompiler",
    "-fPIC,-fvisibility=hidden",
)


def find_nvcc() -> str | None:
    """The CUDA compiler in PATH or in the toolkit's usual place."""
    usual = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if os.access(usual, os.X_OK) else None)


def cuda_sources(root: Path) -> Sequence[Path]:
    """Every translation unit of the CUDA library, in a fixed order."""
    return sorted(root.glob("*/cuda/*.cu"))


def cuda_library_name(root: Path, architectures: Sequence[str]) -> str:
    """File name of the library that these sources make, with machine code for `architectures`."""
    codes = "-".join(f"sm_{each}" for each in architectures)
    return f"{_PREFIX}{codes}-{_source_key(root)}.so"


def _source_key(root: Path) -> str:
    digest = hashlib.sha256(repr((FLAGS, ARCHITECTURES)).encode())
    for path in sorted([*root.glob("common/*"), *root.glob("*/cuda/*")]):
        if path.suffix in (".cu", ".cuh", ".h"):
            digest.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def find_cuda_library() -> Path | None:
    """The CUDA library of the current sources that was built at install time, None when there is none."""
    found = sorted(installed_folder().glob(f"{_PREFIX}*-{_source_key(source_root())}.so"))
    return found[-1] if found else None


def architectures_of(library: Path) -> tuple[str, ...]:
    """What a library has machine code for, as its name says: ("sm_80", "sm_90")."""
    return tuple(library.stem.removeprefix(_PREFIX).split("-")[:-1])


def build_cuda_library(root: Path, folder: Path) -> Path:
    """Compile all CUDA sources under `root` and put the library into `folder` (made when missing).

    Raises UserError when there is no nvcc, it knows none of ARCHITECTURES, or compiling failed.
    """
    nvcc = find_nvcc()
    if nvcc is None:
        raise UserError("no nvcc in PATH or /usr/local/cuda/bin: install the CUDA toolkit")
    known = set(re.findall(r"\bsm_(\d+)\b", run_tool([nvcc, "--list-gpu-code"])))
    chosen = [each for each in ARCHITECTURES if each in known]
    if not chosen:
        wanted = ", ".join(f"sm_{each}" for each in ARCHITECTURES)
        raise UserError(f"{nvcc} compiles for none of {wanted}: use CUDA 11.2 or newer")
    codes = [f"-gencode=arch=compute_{each},code=sm_{each}" for each in chosen]
    codes.append(f"-gencode=arch=compute_{chosen[-1]},code=compute_{chosen[-1]}")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / cuda_library_name(root, chosen)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as scratch:
        library = Path(scratch) / "library.so"
        sources = map(str, cuda_sources(root))
        run_tool([nvcc, *FLAGS, *codes, f"-I{root / 'common'}", "-shared", *sources, "-o", str(library)])
        library.replace(target)
    return target
