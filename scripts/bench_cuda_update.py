#!/usr/bin/env python
"""Check the CUDA update and gradient statistics on an NVIDIA GPU, then measure them; under a minute.

    python scripts/bench_cuda_update.py [--json] [--compile-only] [--millions 1 10 100]

Compiles the kernels with nvcc for the GPU that is there. Checks: the bits of the fp32 reference and the
distance from float64, for all dtypes, sizes and alignments; skipped steps; many tensors in one launch.
Measures: GB/s of the update's own traffic (28 or 30 bytes a parameter) and of the statistics, against a copy
on the device, in turns, medians. Needs nvcc, numpy and, but for --compile-only, a GPU; neither MindSpore nor
the installed package.

The machines that this was developed on have no GPU: the kernels were compiled and inspected there, not run.
"""

import argparse
import ctypes
import dataclasses
import importlib.util
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
SOURCES = tuple(ROOT / "ops" / op / "cuda" / f"{op}.cu" for op in ("fused_adam_w", "grad_stats"))
FP32, FP16, BF16 = range(3)
NAMES = {FP32: "fp32", FP16: "fp16", BF16: "bf16", None: "none"}
NUMPY = {FP32: np.dtype(np.float32), FP16: np.dtype(np.float16), BF16: np.dtype(np.uint16)}
SCALARS = {
    "lr": 3e-4,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "step": 3,
    "grad_scale": 0.37,
}
# Error of the update against float64, relative to the sizes of what is added: a handful of fp32 roundings.
TOLERANCE = 1e-6
ROUNDS = 15


class Failure(Exception):
    """Something that the user has to know, in one line."""


def load_reference() -> ModuleType:
    """The numpy reference of the contract, without the package around it."""
    path = ROOT / "ms_zero" / "kernels" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    if spec is None or spec.loader is None:
        raise Failure(f"{path} is missing: run this script in a checkout of the project")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load_reference()


class Device(Protocol):
    """Memory and time of whatever runs the kernels."""

    def empty(self, nbytes: int) -> int:
        """Address of new memory."""

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy an array to the device."""

    def download(self, address: int, array: np.ndarray) -> None:
        """Copy from the device into an array."""

    def release(self) -> None:
        """Free everything."""


class Cuda:
    """A GPU through the CUDA runtime."""

    _TO_DEVICE, _TO_HOST, _ON_DEVICE = 1, 2, 3

    def __init__(self, runtime: Path) -> None:
        self._runtime = ctypes.CDLL(str(runtime))
        self._addresses: list[int] = []
        self._events = (ctypes.c_void_p(), ctypes.c_void_p())
        count = ctypes.c_int()
        if self._runtime.cudaGetDeviceCount(ctypes.byref(count)) != 0 or count.value == 0:
            raise Failure("no CUDA device was found: run on a machine with a GPU, or pass --compile-only")
        for event in self._events:
            self._call("cudaEventCreate", ctypes.byref(event))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._runtime, name)(*arguments)
        if code != 0:
            self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
            raise Failure(f"{name}: {self._runtime.cudaGetErrorString(code).decode()}")

    @property
    def name(self) -> str:
        """What the device calls itself."""
        properties = ctypes.create_string_buffer(65536)  # the name comes first; the rest differs by version
        self._call("cudaGetDeviceProperties", properties, 0)
        return properties.value.decode()

    @property
    def capability(self) -> str:
        """Compute capability without a dot."""
        numbers = []
        for attribute in (75, 76):  # cudaDevAttrComputeCapabilityMajor, Minor
            value = ctypes.c_int()
            self._call("cudaDeviceGetAttribute", ctypes.byref(value), attribute, 0)
            numbers.append(str(value.value))
        return "".join(numbers)

    def empty(self, nbytes: int) -> int:
        """Address of new memory."""
        address = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(address), ctypes.c_size_t(max(nbytes, 1)))
        self._addresses.append(address.value or 0)
        return self._addresses[-1]

    def upload(self, address: int, array: np.ndarray) -> None:
        """Copy an array to the device."""
        self._copy(address, array.ctypes.data, array.nbytes, self._TO_DEVICE)

    def download(self, address: int, array: np.ndarray) -> None:
        """Copy from the device into an array, after everything that was started."""
        self._call("cudaDeviceSynchronize")
        self._copy(array.ctypes.data, address, array.nbytes, self._TO_HOST)

    def copy(self, target: int, source: int, nbytes: int) -> None:
        """Start a copy on the device."""
        arguments = (ctypes.c_size_t(nbytes), self._ON_DEVICE, None)
        self._call("cudaMemcpyAsync", ctypes.c_void_p(target), ctypes.c_void_p(source), *arguments)

    def _copy(self, target: int, source: int, nbytes: int, kind: int) -> None:
        size = ctypes.c_size_t(nbytes)
        self._call("cudaMemcpy", ctypes.c_void_p(target), ctypes.c_void_p(source), size, kind)

    def seconds(self, work: Callable[[], None]) -> float:
        """Device time of what `work` starts."""
        start, stop = self._events
        self._call("cudaEventRecord", start, None)
        work()
        self._call("cudaEventRecord", stop, None)
        self._call("cudaEventSynchronize", stop)
        milliseconds = ctypes.c_float()
        self._call("cudaEventElapsedTime", ctypes.byref(milliseconds), start, stop)
        return milliseconds.value / 1e3

    def release(self) -> None:
        """Free everything."""
        for address in self._addresses:
            self._call("cudaFree", ctypes.c_void_p(address))
        self._addresses.clear()


class Tensor(ctypes.Structure):
    """MszAdamWTensor."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("param", "exp_avg", "exp_avg_sq", "grad", "low_precision")),
        ("length", ctypes.c_int64),
    ]


class Kernels:
    """The compiled library."""

    def __init__(self, *libraries: Path) -> None:
        loaded = [ctypes.CDLL(str(path)) for path in libraries]
        self._update = loaded[0].msz_cuda_adamw_many
        self._sum = loaded[-1].msz_cuda_sum_of_squares

    def update(self, tensors: Sequence[Tensor], grad: int, low: int | None, scalars: int) -> None:
        """Start FusedAdamW on tensors of one pair of dtypes."""
        array = (Tensor * len(tensors))(*tensors)
        has_low = int(low is not None)
        self._check(
            self._update(array, len(tensors), grad, has_low, low or 0, ctypes.c_void_p(scalars), None),
            "update",
        )

    def sum_of_squares(self, x: int, dtype: int, n: int, result: int, workspace: int) -> None:
        """Start the statistics; the result is one fp32."""
        addresses = (ctypes.c_void_p(result), ctypes.c_void_p(workspace), None)
        self._check(self._sum(ctypes.c_void_p(x), dtype, ctypes.c_int64(n), *addresses), "statistics")

    @staticmethod
    def _check(status: int, what: str) -> None:
        if status != 0:
            raise Failure(f"the {what} kernel returned {status} (see ops/README.md)")


@dataclasses.dataclass
class Arrays:
    """One tensor's arrays on the host and where they are on the device."""

    host: list[np.ndarray | None]
    addresses: list[int]
    length: int

    @property
    def tensor(self) -> Tensor:
        """The argument of the C function."""
        return Tensor(*[address or None for address in self.addresses], self.length)


def make_arrays(device: Device, seed: int, n: int, grad: int, low: int | None, offset: int = 0) -> Arrays:
    """Random parameters, moments and gradient, `offset` elements behind a border of the device's memory."""
    rng = np.random.default_rng(seed)
    p, m, v, g = (
        np.ldexp(rng.standard_normal(n), rng.integers(-12, 3, n)).astype(np.float32) for _ in range(4)
    )
    narrowed = g if grad == FP32 else reference.narrow(g, NUMPY[grad])
    stale = None if low is None else np.zeros(n, NUMPY[low])
    host = [p, m, np.abs(v), narrowed, stale]
    addresses = []
    for array in host:
        if array is None:
            addresses.append(0)
            continue
        base = device.empty(array.nbytes + offset * array.itemsize)
        addresses.append(base + offset * array.itemsize)
        device.upload(addresses[-1], array)
    return Arrays(host, addresses, n)


def upload_new(device: Device, array: np.ndarray) -> int:
    """Put an array into new memory of the device."""
    address = device.empty(array.nbytes)
    device.upload(address, array)
    return address


def downloaded(device: Device, arrays: Arrays) -> list[np.ndarray | None]:
    """The arrays as the device has them now."""
    copies = [None if array is None else np.empty_like(array) for array in arrays.host]
    for copy, address in zip(copies, arrays.addresses):
        if copy is not None:
            device.download(address, copy)
    return copies


def check_update(device: Device, kernels: Kernels, cases: Sequence[tuple[int, int, int]]) -> list[str]:
    """Failures of the update over (elements, offset, tensors): all dtypes, skipped steps too."""
    failures = []
    for grad in (FP32, FP16, BF16):
        for low in (FP16, BF16, None):
            for n, offset, tensors in cases:
                for found in (0.0, np.inf):
                    failures += _check_case(device, kernels, grad, low, (n, offset, tensors), found)
    return failures


def _check_case(
    device: Device, kernels: Kernels, grad: int, low: int | None, case: tuple[int, int, int], found: float
) -> list[str]:
    n, offset, count = case
    scalars = reference.adamw_scalars(**SCALARS, found_inf=found)
    batch = [make_arrays(device, i, n + 7 * i, grad, low, offset) for i in range(count)]
    kernels.update([arrays.tensor for arrays in batch], grad, low, upload_new(device, scalars))
    label = (
        f"update grad={NAMES[grad]} low={NAMES[low]} n={n} offset={offset} tensors={count} found_inf={found}"
    )
    failures = []
    for arrays in batch:
        got, expected = downloaded(device, arrays), [None if a is None else a.copy() for a in arrays.host]
        reference.adamw(*expected, scalars)
        failures += [
            f"{label}: {name} differs in the bits"
            for name, a, b in zip(("param", "exp_avg", "exp_avg_sq", "grad", "low_precision"), got, expected)
            if a is not None and a.tobytes() != b.tobytes()
        ]
        if found == 0 and distance_from_float64(arrays.host, got[0], scalars) > TOLERANCE:
            failures.append(f"{label}: param is too far from float64")
    device.release()
    return failures


def distance_from_float64(
    before: Sequence[np.ndarray | None], param: np.ndarray, scalars: np.ndarray
) -> float:
    """The largest error relative to the sum of the sizes of what is added, the update made in float64."""
    p, m, v = (np.asarray(array, np.float64) for array in before[:3])
    keep, beta1, rest1, beta2, rest2, inverse_root, eps, step_size, scale = scalars[:9].astype(np.float64)
    g = reference.widen(before[3]).astype(np.float64) * scale
    sizes = np.abs(m * beta1) + np.abs(g * rest1)  # what cancels in m still leaves its rounding errors
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    rate = step_size / (np.sqrt(v) * inverse_root + eps)
    exact = p * keep - m * rate
    sizes = np.abs(p) + sizes * rate + np.finfo(np.float32).tiny
    return float((np.abs(param - exact) / sizes).max(initial=0.0))


def check_statistics(device: Device, kernels: Kernels, sizes: Sequence[int]) -> list[str]:
    """Failures of the sum of squares, finite and with a bad element."""
    failures = []
    for dtype in (FP32, FP16, BF16):
        for n in sizes:
            x = np.random.default_rng(n).standard_normal(n).astype(np.float32)
            x = x if dtype == FP32 else reference.narrow(x, NUMPY[dtype])
            exact = float((reference.widen(x).astype(np.float64) ** 2).sum())
            got = _sum_on(device, kernels, x, dtype)
            if not abs(got - exact) <= exact * 2.0**-23:
                failures.append(f"statistics {NAMES[dtype]} n={n}: {got} instead of {exact}")
            if n:
                bad = x.copy()
                bad[n // 2] = x.dtype.type(np.nan) if dtype != BF16 else np.uint16(0x7FC0)
                if np.isfinite(_sum_on(device, kernels, bad, dtype)):
                    failures.append(f"statistics {NAMES[dtype]} n={n}: a NaN went unnoticed")
    return failures


def _sum_on(device: Device, kernels: Kernels, x: np.ndarray, dtype: int) -> float:
    result, value = device.empty(4), np.zeros(1, np.float32)
    kernels.sum_of_squares(upload_new(device, x), dtype, x.size, result, device.empty(8 * 1024))
    device.download(result, value)
    device.release()
    return float(value[0])


def measure(device: Cuda, kernels: Kernels, n: int) -> dict[str, float]:
    """GB/s of update, statistics and a device copy at n parameters: medians of turns."""
    scalars = upload_new(device, reference.adamw_scalars(**SCALARS))
    fp32 = Tensor(*[device.empty(4 * n) for _ in range(4)], device.empty(2 * n), n)
    grad16, many = device.empty(2 * n), []
    bf16 = Tensor(fp32.param, fp32.exp_avg, fp32.exp_avg_sq, grad16, fp32.low_precision, n)
    piece = max(n // 200, 1)
    for start in range(0, n, piece):
        places = zip(("param", "exp_avg", "exp_avg_sq", "grad", "low_precision"), (4, 4, 4, 2, 2))
        addresses = [getattr(bf16, name) + start * size for name, size in places]
        many.append(Tensor(*addresses, min(piece, n - start)))
    for address in (fp32.param, fp32.exp_avg, fp32.exp_avg_sq, fp32.grad, grad16):
        device.upload(address, np.zeros(n if address != grad16 else n // 2, np.float32))
    result, workspace = device.empty(4), device.empty(8 * 1024)
    works = {
        "copy": (8 * n, lambda: device.copy(fp32.exp_avg, fp32.param, 4 * n)),
        "update_fp32_grad": (30 * n, lambda: kernels.update([fp32], FP32, BF16, scalars)),
        "update_bf16_grad": (28 * n, lambda: kernels.update([bf16], BF16, BF16, scalars)),
        "update_bf16_grad_200_tensors": (28 * n, lambda: kernels.update(many, BF16, BF16, scalars)),
        "statistics_fp32": (4 * n, lambda: kernels.sum_of_squares(fp32.grad, FP32, n, result, workspace)),
        "statistics_bf16": (2 * n, lambda: kernels.sum_of_squares(grad16, BF16, n, result, workspace)),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, (_, work) in works.items():
            times[name].append(device.seconds(work))
    device.release()
    return {name: works[name][0] / statistics.median(times[name][2:]) / 1e9 for name in works}


def find_nvcc() -> str:
    """The CUDA compiler."""
    usual = Path("/usr/local/cuda/bin/nvcc")
    found = shutil.which("nvcc") or (str(usual) if usual.is_file() else None)
    if found is None:
        raise Failure("no nvcc in PATH or /usr/local/cuda/bin: install the CUDA toolkit")
    return found


def find_runtime(nvcc: str) -> Path:
    """The CUDA runtime of the compiler's toolkit."""
    listed = subprocess.run(
        [nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True, check=False
    )
    top = re.search(r"_TARGET_DIR_=.*\n|TOP=(\S+)", listed.stderr)
    roots = [Path(top.group(1))] if top and top.group(1) else []
    roots += [Path(nvcc).resolve().parents[1], Path("/usr/local/cuda")]
    for root in roots:
        for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            found = sorted((root / folder).glob("libcudart.so*"))
            if found:
                return found[0]
    raise Failure(f"no libcudart.so beside {nvcc}: install the CUDA runtime")


def compile_library(nvcc: str, folder: Path, architecture: str) -> tuple[Path, int, int]:
    """The library for one architecture, with the number of kernels and the bytes of registers they spill."""
    target = folder / "libupdate.so"
    command = [nvcc, "-std=c++17", "-O3", "-fmad=false", f"-arch=sm_{architecture}", "-shared"]
    command += ["-Xcompiler", "-fPIC", "-Xptxas", "-v", f"-I{ROOT / 'ops' / 'common'}", *map(str, SOURCES)]
    done = subprocess.run([*command, "-o", str(target)], capture_output=True, text=True, check=False)
    if done.returncode:
        first = next((line for line in done.stderr.splitlines() if "error" in line), "no message")
        raise Failure(f"nvcc failed for sm_{architecture}: {first}")
    spilled = [
        int(a) + int(b)
        for a, b in re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    ]
    return target, len(spilled), sum(spilled)


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The report of a run."""
    nvcc = find_nvcc()
    if options.compile_only:
        report: dict[str, Any] = {"ran": False}
        for architecture in ("80", "90"):
            _, kernels, spilled = compile_library(nvcc, folder, architecture)
            report[f"sm_{architecture}"] = {"kernels": kernels, "spilled_bytes": spilled}
        return report
    device = Cuda(find_runtime(nvcc))
    library, count, spilled = compile_library(nvcc, folder, device.capability)
    kernels = Kernels(library)
    cases = [
        (0, 0, 1),
        (1, 0, 1),
        (1000, 0, 1),
        (100_003, 3, 1),
        (8192 * 5, 1, 1),
        (700, 0, 150),
        (1 << 20, 0, 1),
    ]
    failures = check_update(device, kernels, cases)
    failures += check_statistics(device, kernels, (0, 1, 7, 8193, 1_000_003))
    speeds = {f"{m}M": measure(device, kernels, int(m * 1e6)) for m in options.millions}
    largest = speeds[f"{max(options.millions)}M"]
    return {
        "ran": True,
        "device": device.name,
        "kernels": count,
        "spilled_bytes": spilled,
        "failures": failures,
        "gb_per_s": speeds,
        "update_over_copy": largest["update_bf16_grad"] / largest["copy"],
    }


def main() -> int:
    """Check and measure; 0 when nothing failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--compile-only", action="store_true", help="compile for sm_80 and sm_90, run nothing"
    )
    parser.add_argument(
        "--millions", type=float, nargs="+", default=[1.0, 10.0, 100.0], help="parameters, in millions"
    )
    options = parser.parse_args()
    try:
        with tempfile.TemporaryDirectory(prefix="bench-cuda-") as folder:
            report = run(options, Path(folder))
    except Failure as failure:
        print(f"bench_cuda_update.py: error: {failure}", file=sys.stderr)
        return 2
    print(json.dumps(report, indent=None if options.json else 2))
    return 1 if report.get("failures") else 0


if __name__ == "__main__":
    sys.exit(main())
