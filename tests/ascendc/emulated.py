"""Builds AscendC kernel sources with g++ against the emulation headers and runs them on emulated cores.

A library holds any number of kernels: each source is included in a namespace of its own, with the dtypes that
the operator compiler would define. So unchanged sources and their mutants are compiled in the same way.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
EMULATOR = Path(__file__).resolve().parent / "emulator"
ADAM_KERNELS = ROOT / "ops" / "fused_adam_w" / "ascendc" / "op_kernel"
STATS_KERNELS = ROOT / "ops" / "grad_stats" / "ascendc" / "op_kernel"
HOST_FOLDERS = (
    ROOT / "ops" / "common" / "ascendc" / "op_host",
    ROOT / "ops" / "fused_adam_w" / "ascendc" / "op_host",
    ROOT / "ops" / "grad_stats" / "ascendc" / "op_host",
)
# No contraction: the numbers are those of separate instructions.
FLAGS = ("-std=c++17", "-O1", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wno-unused-parameter")

CPP_TYPES = {"float32": "float", "float16": "half", "bfloat16": "bfloat16_t"}
NUMPY_TYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
"""bf16 is handled as its bits."""


@dataclass(frozen=True)
class Variant:
    """One binary of an operator: an entry source, its dtypes, the number of kernel arguments."""

    folder: Path
    entry: str
    dtypes: Mapping[str, str]
    num_arguments: int

    @property
    def name(self) -> str:
        return "/".join((self.entry, *self.dtypes.values()))


def adam_variant(grad: str, low: str | None) -> Variant:
    """The FusedAdamW kernel for a gradient dtype and a low-precision dtype, None for the master form."""
    if low is None:
        return Variant(ADAM_KERNELS, "fused_adam_w_master", {"DTYPE_GRAD": grad}, 11)
    return Variant(ADAM_KERNELS, "fused_adam_w", {"DTYPE_GRAD": grad, "DTYPE_LOW_PRECISION": low}, 13)


def stats_variant(dtype: str) -> Variant:
    """The GradStats kernel for a dtype."""
    return Variant(STATS_KERNELS, "grad_stats", {"DTYPE_X": dtype}, 4)


TOTAL = Variant(STATS_KERNELS, "grad_stats_total", {}, 4)
ADAM_VARIANTS = tuple(
    adam_variant(grad, low)
    for grad in ("float32", "float16", "bfloat16")
    for low in ("float16", "bfloat16", None)
)
STATS_VARIANTS = tuple(stats_variant(dtype) for dtype in ("float32", "float16", "bfloat16"))


def source_of(variant: Variant) -> str:
    """The entry source with the kernel header of its folder put in: one text that can be changed anywhere."""
    text = (variant.folder / f"{variant.entry}.cpp").read_text(encoding="utf-8")
    return inline_header(text, variant.folder)


def inline_header(text: str, folder: Path) -> str:
    """Replace the include of a kernel header (not of a tiling header) by its text without include guard."""

    def put(match: re.Match) -> str:
        header = (folder / match.group(1)).read_text(encoding="utf-8")
        body = re.sub(r"^#ifndef (\w+)\n#define \1\n", "", header, count=1, flags=re.MULTILINE)
        return body.removesuffix("#endif\n")

    return re.sub(r'#include "(fused_adam_w\.h)"\n', put, text)


def _without_includes(text: str) -> str:
    return re.sub(r"^#include .*$", "", text, flags=re.MULTILINE)


def _namespace(index: int, variant: Variant, text: str) -> str:
    defines = "".join(f"#define {name} {CPP_TYPES[dtype]}\n" for name, dtype in variant.dtypes.items())
    undefines = "".join(f"#undef {name}\n" for name in variant.dtypes)
    entry = variant.entry
    return (
        f"#define {entry} {entry}_{index}\n{defines}"
        f"namespace kernel_{index} {{\n{_without_includes(text)}\n}}\n"
        f"{undefines}#undef {entry}\n"
    )


def translation_unit(kernels: Sequence[tuple[str, Variant, str]]) -> str:
    """One C++ source with a table of kernels: (name in the table, variant, kernel source)."""
    parts = [
        "#include <type_traits>\n",
        '#include "kernel_operator.h"\n#include "driver.h"\n',
        '#include "fused_adam_w_tiling.h"\n#include "grad_stats_tiling.h"\n',
    ]
    rows = []
    for index, (name, variant, text) in enumerate(kernels):
        parts.append(_namespace(index, variant, text))
        arguments = ", ".join(f"a[{i}]" for i in range(variant.num_arguments))
        call = f"kernel_{index}::{variant.entry}_{index}({arguments});"
        rows.append(f'    {{"{name}", [](uint8_t** a) {{ {call} }}}},\n')
    parts.append(f"static const emulator::Kernel kKernels[] = {{\n{''.join(rows)}}};\n")
    parts.append(_LAUNCH)
    return "".join(parts)


_LAUNCH = """extern "C" int emulator_launch(const char* name, int cores, int strict,
                               emulator::Tensor* tensors, int count, uint8_t** arguments,
                               emulator::Report* report) {
    for (const emulator::Kernel& kernel : kKernels)
        if (!std::strcmp(kernel.name, name))
            return emulator::launchReported(kernel, cores, strict, tensors, count, arguments, report);
    return -1;
}
"""


def compiler() -> str | None:
    """The C++ compiler, None where there is none."""
    return shutil.which("g++")


def compile_command(source: Path, library: Path, flags: Iterable[str] = FLAGS) -> list[str]:
    """The command that compiles a generated source into a shared library."""
    folders = (EMULATOR, ADAM_KERNELS, STATS_KERNELS)
    return ["g++", *flags, *(f"-I{folder}" for folder in folders), str(source), "-o", str(library)]


def build(folder: Path, name: str, kernels: Sequence[tuple[str, Variant, str]]) -> Path:
    """Compile kernels into `folder/name.so`; a compile error is raised with the compiler's first lines."""
    source, library = folder / f"{name}.cc", folder / f"{name}.so"
    source.write_text(translation_unit(kernels), encoding="utf-8")
    done = subprocess.run(compile_command(source, library), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"compiling {source} failed:\n{done.stderr[:3000]}")
    return library


def build_variants(folder: Path, name: str, variants: Sequence[Variant]) -> Path:
    """Compile unchanged kernels into one library."""
    return build(folder, name, [(variant.name, variant, source_of(variant)) for variant in variants])


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("address", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("readable", ctypes.c_int32),
        ("writable", ctypes.c_int32),
        ("bytes_read", ctypes.c_uint64),
        ("bytes_written", ctypes.c_uint64),
    ]


class _Report(ctypes.Structure):
    _fields_ = [
        ("ub_peak", ctypes.c_uint32),
        ("event_peak", ctypes.c_int32),
        ("buffer_peak", ctypes.c_int32),
        ("instructions", ctypes.c_uint64),
        ("busiest", ctypes.c_double),
        ("modelled", ctypes.c_double),
        ("text", ctypes.c_char * 2048),
    ]


@dataclass(eq=False)
class Memory:
    """A tensor in global memory: `values` stand between two guard bands."""

    values: np.ndarray
    readable: bool = True
    writable: bool = False
    offset: int = 0
    """Elements by which the tensor is moved from a 512-byte border: a part of a larger buffer."""
    _block: np.ndarray = field(init=False, repr=False)
    _GUARD = 1024

    def __post_init__(self) -> None:
        size, item = self.values.nbytes, self.values.itemsize
        self._block = np.full(size + 3 * self._GUARD + self.offset * item, 0x5A, np.uint8)
        border = -self._block.ctypes.data % 512
        self._start = border + 512 + self.offset * item
        self.array = self._block[self._start : self._start + size].view(self.values.dtype)
        self.array[...] = self.values

    @property
    def address(self) -> int:
        return self._block.ctypes.data + self._start

    def guards_intact(self) -> bool:
        """Whether nothing but the tensor was written."""
        before, after = self._block[: self._start], self._block[self._start + self.values.nbytes :]
        return bool((before == 0x5A).all() and (after == 0x5A).all())


@dataclass(frozen=True)
class Run:
    """What a launch did."""

    stopped: bool
    findings: tuple[str, ...]
    ub_peak: int
    event_peak: int
    buffer_peak: int
    bytes_read: tuple[int, ...]
    bytes_written: tuple[int, ...]
    overlap: float
    """Modelled cycles over the cycles of the busiest pipe: 1 when everything else hides behind it."""


class Library:
    """A compiled library of kernels."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))

    def launch(
        self,
        name: str,
        cores: int,
        memories: Sequence[Memory],
        arguments: Sequence[Memory | None],
        tiling: ctypes.Structure | ctypes.Array | None,
        strict: bool = True,
    ) -> Run:
        """Run a kernel on `cores` cores; `arguments`: its GM addresses but for workspace and tiling."""
        tensors = (_Tensor * len(memories))(
            *[_Tensor(m.address, m.values.nbytes, m.readable, m.writable, 0, 0) for m in memories]
        )
        addresses = [memory.address if memory is not None else None for memory in arguments]
        tail = [None, ctypes.cast(ctypes.pointer(tiling), ctypes.c_void_p) if tiling is not None else None]
        pointers = (ctypes.c_void_p * (len(addresses) + 2))(*addresses, *tail)
        report = _Report()
        code = self._library.emulator_launch(
            name.encode(), cores, int(strict), tensors, len(tensors), pointers, ctypes.byref(report)
        )
        assert code >= 0, f"no kernel {name}"
        return Run(
            stopped=code != 0,
            findings=tuple(report.text.decode().splitlines()),
            ub_peak=report.ub_peak,
            event_peak=report.event_peak,
            buffer_peak=report.buffer_peak,
            bytes_read=tuple(t.bytes_read for t in tensors),
            bytes_written=tuple(t.bytes_written for t in tensors),
            overlap=report.modelled / report.busiest if report.busiest else 1.0,
        )
