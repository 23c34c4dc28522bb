"""Which sources make the CPU library, for which instruction sets, and the key that names one library."""

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ms_zero import resources

COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fopenmp",
    "-fvisibility=hidden",
    "-ffp-contract=off",  # a product and a sum stay two rounded operations
    "-fno-math-errno",
    "-fno-trapping-math",
    "-Wno-psabi",
)
"""Compiler flags of every variant."""


@dataclass(frozen=True)
class Variant:
    """One instruction set the library is compiled for.

    Attributes:
        name: as ``msz_variant()`` of the library says.
        machine: ``platform.machine()`` it runs on.
        flags: compiler flags that choose it.
        features: what ``/proc/cpuinfo`` must list.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str]


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")

VARIANTS = (
    Variant(
        "avx512",
        "x86_64",
        (*_AVX512, "-mprefer-vector-width=512"),
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "avx2", "fma", "f16c"}),
    ),
    Variant("avx2", "x86_64", _AVX2, frozenset({"avx2", "fma", "f16c"})),
    Variant("plain", "x86_64", (), frozenset()),
    Variant("neon", "aarch64", (), frozenset()),
)
"""Best first within a machine."""


def supported_variants(machine: str | None = None, cpuinfo: str | None = None) -> tuple[Variant, ...]:
    """The variants this processor can run, best first; none on a machine that is neither x86_64 nor aarch64.

    `machine` and `cpuinfo` (the text of /proc/cpuinfo) default to those of this machine.
    """
    machine = platform.machine() if machine is None else machine
    features = _features(_read_cpuinfo() if cpuinfo is None else cpuinfo)
    return tuple(v for v in VARIANTS if v.machine == machine and v.features <= features)


def best_variant() -> Variant | None:
    """The best variant for this processor, None on an unknown machine."""
    return next(iter(supported_variants()), None)


def _read_cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _features(cpuinfo: str) -> frozenset[str]:
    # The kernel lists a feature only when the system saves its registers, so no further check is needed.
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "flags":
            return frozenset(value.split())
    return frozenset()


def source_root() -> Path:
    """The folder ``ops/`` of the source tree or of the installed package; raises UserError when missing."""
    return resources.config_dir().parent / "ops"


def cpu_sources(root: Path) -> Sequence[Path]:
    """Every translation unit of the CPU library, in a fixed order."""
    return sorted([*root.glob("common/*.cc"), *root.glob("*/cpu/*.cc")])


def source_key(root: Path, variant: Variant) -> str:
    """Sixteen hexadecimal digits that change with any source, header, flag or variant."""
    digest = hashlib.sha256(repr((variant.name, variant.machine, COMMON_FLAGS, variant.flags)).encode())
    for path in sorted([*root.glob("common/*"), *root.glob("*/cpu/*")]):
        if path.suffix in (".cc", ".h"):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(root).as_posix()} {len(content)}\n".encode())
            digest.update(content)
    return digest.hexdigest()[:16]


def library_name(root: Path, variant: Variant) -> str:
    """File name of the library that these sources make for a variant."""
    return f"libms_zero_cpu-{variant.name}-{source_key(root, variant)}.so"
