"""The tiling functions of the host side, compiled and called through ctypes."""

import ctypes
import subprocess
from pathlib import Path

from emulated import FLAGS, HOST_FOLDERS

_SOURCE = """#include "fused_adam_w_split.h"
#include "grad_stats_split.h"
extern "C" void adam_tiling(uint64_t length, uint32_t cores, uint64_t ub, uint32_t grad, uint32_t low,
                            FusedAdamWTiling* out) {
    *out = ms_zero::computeFusedAdamWTiling(length, cores, ub, grad, low);
}
extern "C" void stats_tiling(uint64_t length, uint32_t cores, GradStatsTiling* out) {
    *out = ms_zero::computeGradStatsTiling(length, cores);
}
extern "C" uint64_t usable_ub_bytes() { return ms_zero::kUsableUbBytes; }
"""


class AdamTiling(ctypes.Structure):
    """FusedAdamWTiling."""

    _fields_ = [
        ("length", ctypes.c_uint64),
        ("per_core", ctypes.c_uint64),
        ("tile", ctypes.c_uint32),
        ("cores", ctypes.c_uint32),
    ]


class StatsTiling(ctypes.Structure):
    """GradStatsTiling."""

    _fields_ = [
        ("length", ctypes.c_uint64),
        ("per_core", ctypes.c_uint64),
        ("cores", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    ]


class TilingLibrary:
    """The pure tiling functions."""

    def __init__(self, folder: Path) -> None:
        source, library = folder / "tiling.cc", folder / "tiling.so"
        source.write_text(_SOURCE, encoding="utf-8")
        includes = [f"-I{path}" for path in HOST_FOLDERS]
        subprocess.run(["g++", *FLAGS, *includes, str(source), "-o", str(library)], check=True)
        self._library = ctypes.CDLL(str(library))
        self._library.usable_ub_bytes.restype = ctypes.c_uint64
        self._library.adam_tiling.argtypes = [
            ctypes.c_uint64,
            ctypes.c_uint32,
            ctypes.c_uint64,
            ctypes.c_uint32,
            ctypes.c_uint32,
            ctypes.c_void_p,
        ]
        self._library.stats_tiling.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_void_p]

    @property
    def usable_ub_bytes(self) -> int:
        return int(self._library.usable_ub_bytes())

    def adam(self, length: int, cores: int, grad_bytes: int, low_bytes: int) -> AdamTiling:
        """Tiling of FusedAdamW; `low_bytes` 0 for the master form."""
        tiling = AdamTiling()
        self._library.adam_tiling(
            length, cores, self.usable_ub_bytes, grad_bytes, low_bytes, ctypes.addressof(tiling)
        )
        return tiling

    def stats(self, length: int, cores: int) -> StatsTiling:
        """Tiling of GradStats."""
        tiling = StatsTiling()
        self._library.stats_tiling(length, cores, ctypes.addressof(tiling))
        return tiling
