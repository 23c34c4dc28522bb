"""The CUDA kernels: their logic and bits on the host, and the code that nvcc makes of them.

No machine of this project has an NVIDIA GPU. ``scripts/bench_cuda_update.py`` checks and measures on one.
"""

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
ADAM = ROOT / "ops" / "fused_adam_w" / "cuda" / "fused_adam_w.cu"
STATS = ROOT / "ops" / "grad_stats" / "cuda" / "grad_stats.cu"
FP32, FP16, BF16 = range(3)
NUMPY = {FP32: np.float32, FP16: np.float16, BF16: np.uint16}
NAMES = {FP32: b"float32", FP16: b"float16", BF16: b"bfloat16"}
CHUNK = 8192
# Every dtype of the gradient with every low-precision copy.
PAIRS = [(grad, low) for grad in (FP32, FP16, BF16) for low in (FP16, BF16, None)]


def load_module(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference = load_module(ROOT / "ms_zero" / "kernels" / "reference.py")


class Tensor(ctypes.Structure):
    """MszAdamWTensor."""

    _fields_ = [
        ("param", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("low_precision", ctypes.c_void_p),
        ("length", ctypes.c_int64),
    ]


class Arrays:
    """The arrays of one tensor between guard bands, and what the reference makes of them."""

    GUARD = 64

    def __init__(self, seed, length, grad, low, offsets=(0, 0, 0, 0, 0)):
        rng = np.random.default_rng(seed)
        self.blocks, self.length = [], length
        p, m = (self.numbers(rng, length) for _ in range(2))
        v = np.abs(self.numbers(rng, length))
        g = self.numbers(rng, length)
        g = g if grad == FP32 else reference.narrow(g, np.dtype(NUMPY[grad]))
        stale = np.full(length, 0x1234, np.uint16).view(NUMPY[low]) if low else None
        self.p, self.m, self.v, self.g, self.low = (
            None if array is None else self.guarded(array, offset)
            for array, offset in zip((p, m, v, g, stale), offsets)
        )

    @staticmethod
    def numbers(rng, length):
        x = np.ldexp(rng.standard_normal(length), rng.integers(-12, 4, length)).astype(np.float32)
        special = np.array([0, -0.0, np.inf, np.nan, 1e-40, 65519.9, 3e38, -1e-20], np.float32)
        places = rng.random(length) < 0.05
        x[places] = rng.choice(special, int(places.sum()))
        return x

    def guarded(self, array, offset):
        item, guard = array.itemsize, self.GUARD
        block = np.full(array.nbytes + 3 * guard + offset * item, 0x5A, np.uint8)
        start = -block.ctypes.data % 16 + guard + offset * item
        view = block[start : start + array.nbytes].view(array.dtype)
        view[...] = array
        self.blocks.append((block, start, array.nbytes))
        return view

    def expect(self, scalars):
        copies = [
            None if each is None else each.copy() for each in (self.p, self.m, self.v, self.g, self.low)
        ]
        reference.adamw(*copies, scalars)
        return copies

    def check(self, expected):
        for name, got, wanted in zip("pmvgl", (self.p, self.m, self.v, self.g, self.low), expected):
            assert got is None or same(got, wanted), name
        for block, start, nbytes in self.blocks:
            assert (block[:start] == 0x5A).all()
            assert (block[start + nbytes :] == 0x5A).all()

    def structure(self):
        addresses = [None if a is None else a.ctypes.data for a in (self.p, self.m, self.v, self.g, self.low)]
        return Tensor(*addresses, self.length)


def same(a, b):
    x, y = reference.widen(a), reference.widen(b)
    unsigned = np.uint32 if a.itemsize == 4 else np.uint16
    return bool(((a.view(unsigned) == b.view(unsigned)) | (np.isnan(x) & np.isnan(y))).all())


def scalars_of(**changes):
    values = {
        "lr": 3e-4,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "step": 3,
        "grad_scale": 0.37,
    }
    return reference.adamw_scalars(**(values | changes))


def run_many(library, tensors, grad, low, scalars):
    structures = (Tensor * max(len(tensors), 1))(*[each.structure() for each in tensors])
    return library.msz_cuda_adamw_many(
        structures,
        len(tensors),
        grad,
        int(low is not None),
        low or 0,
        ctypes.c_void_p(scalars.ctypes.data),
        None,
    )


def run_one(library, arrays, grad, low, scalars):
    t = arrays.structure()
    return library.msz_cuda_adamw(
        *map(ctypes.c_void_p, (t.param, t.exp_avg, t.exp_avg_sq, t.grad)),
        grad,
        ctypes.c_void_p(t.low_precision),
        low or 0,
        ctypes.c_int64(t.length),
        ctypes.c_void_p(scalars.ctypes.data),
        None,
    )


@pytest.mark.parametrize(("grad", "low"), PAIRS)
def test_adamw_is_the_reference_bit_for_bit(host, grad, low):
    for length in (0, 1, 7, 8, 9, 255, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 13):
        arrays, scalars = Arrays(length, length, grad, low), scalars_of()
        expected = arrays.expect(scalars)
        assert run_one(host["fused_adam_w"], arrays, grad, low, scalars) == 0
        arrays.check(expected)


@pytest.mark.parametrize(
    "offsets",
    [(1, 1, 1, 1, 1), (5, 5, 5, 5, 5), (3, 3, 3, 7, 7), (1, 2, 3, 0, 0), (0, 0, 0, 1, 0), (0, 0, 0, 0, 3)],
)
@pytest.mark.parametrize(("grad", "low"), [(FP32, BF16), (FP16, FP16)])
def test_parts_of_buffers_start_anywhere(host, grad, low, offsets):
    for length in (1, 3, 40, CHUNK + 20):
        arrays, scalars = Arrays(7, length, grad, low, offsets), scalars_of()
        expected = arrays.expect(scalars)
        assert run_one(host["fused_adam_w"], arrays, grad, low, scalars) == 0
        arrays.check(expected)


def test_many_tensors_share_launches(host):
    library = host["fused_adam_w"]
    lengths = [int(n) for n in np.random.default_rng(5).integers(0, 900, 150)] + [2 * CHUNK + 5, 0, 3]
    tensors = [Arrays(i, n, BF16, FP16, (i % 8,) * 5) for i, n in enumerate(lengths)]
    scalars = scalars_of()
    expected = [each.expect(scalars) for each in tensors]
    library.cuda_on_host_launches()
    assert run_many(library, tensors, BF16, FP16, scalars) == 0
    assert library.cuda_on_host_launches() == 3  # 64 tensors a launch, empty ones left out
    for each, wanted in zip(tensors, expected):
        each.check(wanted)
    assert run_many(library, [], FP32, None, scalars) == 0
    assert library.cuda_on_host_launches() == 0


@pytest.mark.parametrize("found", [1.0, -1.0, np.inf, np.nan, 1e-45])
def test_found_inf_writes_nothing(host, found):
    arrays, scalars = Arrays(1, 1000, FP16, BF16), scalars_of(found_inf=found)
    before = [each.copy() for each in (arrays.p, arrays.m, arrays.v, arrays.g, arrays.low)]
    assert run_one(host["fused_adam_w"], arrays, FP16, BF16, scalars) == 0
    arrays.check(before)


def test_wrong_arguments_are_refused_before_anything_runs(host):
    library, scalars = host["fused_adam_w"], scalars_of()
    good = Arrays(1, 100, FP32, FP16)
    before = [each.copy() for each in (good.p, good.m, good.v, good.g, good.low)]
    assert run_one(library, good, 3, FP16, scalars) == -1
    assert run_one(library, good, FP32, 7, scalars) == -1
    bad = Arrays(2, 100, FP32, FP16)
    bad.length = -1
    assert run_many(library, [good, bad], FP32, FP16, scalars) == -2
    bad.length, bad.low = 100, None
    assert run_many(library, [good, bad], FP32, FP16, scalars) == -3
    good.check(before)


def call_aot(function, arrays, dtypes):
    pointers = (ctypes.c_void_p * len(arrays))(*[array.ctypes.data for array in arrays])
    shapes = [(ctypes.c_int64 * array.ndim)(*array.shape) for array in arrays]
    shape_list = (ctypes.c_void_p * len(arrays))(*[ctypes.addressof(shape) for shape in shapes])
    ndims = (ctypes.c_int * len(arrays))(*[array.ndim for array in arrays])
    return function(
        len(arrays), pointers, ndims, shape_list, (ctypes.c_char_p * len(arrays))(*dtypes), None, None
    )


@pytest.mark.parametrize("low", [None, FP16])
@pytest.mark.parametrize(("found", "token_value"), [(0.0, 1.0), (1.0, 0.0)])
def test_aot_operator_updates_in_place_and_writes_a_token(host, low, found, token_value):
    for length in (0, 5000):
        arrays, scalars = Arrays(4, length, BF16, low), scalars_of(found_inf=found)
        expected, token = arrays.expect(scalars), np.full(1, 9, np.float32)
        inputs = [
            arrays.p,
            arrays.m,
            arrays.v,
            arrays.g,
            scalars,
            *([] if low is None else [arrays.low]),
            token,
        ]
        dtypes = (
            [b"float32"] * 3
            + [b"bfloat16", b"float32"]
            + ([] if low is None else [b"float16"])
            + [b"float32"]
        )
        assert call_aot(host["fused_adam_w"].FusedAdamWAot, inputs, dtypes) == 0
        arrays.check(expected)
        assert token[0] == token_value


def test_aot_operator_refuses_what_does_not_fit(host):
    function, a = host["fused_adam_w"].FusedAdamWAot, Arrays(4, 10, FP32, None)
    token, scalars, f = np.zeros(1, np.float32), scalars_of(), b"float32"
    assert call_aot(function, [a.p, a.m, a.v, a.g, scalars], [f] * 5) == 1
    assert call_aot(function, [a.p, a.m, a.v, a.g[:9], scalars, token], [f] * 6) == 2
    assert call_aot(function, [a.p, a.m, a.v, a.g, scalars[:10], token], [f] * 6) == 2
    assert call_aot(function, [a.p, a.m, a.v, a.g, scalars, token], [f, b"float16", f, f, f, f]) == 3
    assert call_aot(function, [a.p, a.m, a.v, a.g, scalars, token], [f, f, f, b"int32", f, f]) == 4


def sum_of_squares(library, x, dtype, n=None):
    result, workspace = np.full(1, -1, np.float32), np.zeros(1024, np.float64)
    status = library.msz_cuda_sum_of_squares(
        ctypes.c_void_p(x.ctypes.data),
        dtype,
        ctypes.c_int64(x.size if n is None else n),
        ctypes.c_void_p(result.ctypes.data),
        ctypes.c_void_p(workspace.ctypes.data),
        None,
    )
    return status, result[0]


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_sum_of_squares_is_the_exact_sum_rounded(host, dtype):
    for length in (0, 1, 3, 8, 255, 8192, 8193, 70_001):
        for offset in (0, 1, 5):
            x = np.random.default_rng(length).standard_normal(length + offset).astype(np.float32)
            x = (x if dtype == FP32 else reference.narrow(x, np.dtype(NUMPY[dtype])))[offset:]
            exact = float((reference.widen(x).astype(np.float64) ** 2).sum())
            status, got = sum_of_squares(host["grad_stats"], x, dtype)
            assert status == 0
            assert abs(float(got) - exact) <= exact * 2.0**-23, (length, offset)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
def test_a_bad_element_shows_in_the_sum(host, value):
    x = np.ones(20_000, np.float32)
    for place in (0, 1, 9_999, 19_999):
        y = x.copy()
        y[place] = value
        assert not np.isfinite(sum_of_squares(host["grad_stats"], y, FP32)[1])


def test_statistics_refuse_wrong_arguments(host):
    x = np.ones(4, np.float32)
    assert sum_of_squares(host["grad_stats"], x, 5)[0] == -1
    assert sum_of_squares(host["grad_stats"], x, FP32, -1)[0] == -2
    result, workspace = np.zeros(1, np.float32), np.zeros(1024, np.float64)
    assert (
        call_aot(
            host["grad_stats"].SumOfSquaresAot, [x, result, workspace], [b"float32", b"float32", b"float64"]
        )
        == 0
    )
    assert result[0] == 4
    small = [x, result, workspace[:1000]]
    assert call_aot(host["grad_stats"].SumOfSquaresAot, small, [b"float32", b"float32", b"float64"]) == 2


def nvcc():
    usual = Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(usual) if usual.is_file() else None)


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """PTX of each kernel and the assembler's report for sm_80 and sm_90."""
    if nvcc() is None:
        pytest.skip("no nvcc")
    folder, found = tmp_path_factory.mktemp("nvcc"), {}
    for source in (ADAM, STATS):
        done = subprocess.run(
            [
                nvcc(),
                "-std=c++17",
                "-O3",
                "-fmad=false",
                "-c",
                str(source),
                f"-I{ROOT / 'ops' / 'common'}",
                "--keep",
                "--keep-dir",
                str(folder),
                "-o",
                str(folder / f"{source.stem}.o"),
                "-Xptxas",
                "-v",
                "-gencode=arch=compute_80,code=sm_80",
                "-gencode=arch=compute_90,code=sm_90",
            ],
            capture_output=True,
            text=True,
            check=True,
            cwd=folder,
        )
        ptx = next(iter(sorted(folder.glob(f"{source.stem}*compute_90*.ptx"))))
        found[source.stem] = (ptx.read_text(encoding="utf-8"), done.stderr)
    return found


def kernels_of(ptx):
    return {part.split("(")[0].strip(): part for part in ptx.split(".entry ")[1:]}


def test_no_registers_are_spilled(code):
    for stem, kernels in (("fused_adam_w", 9), ("grad_stats", 4)):
        report = code[stem][1]
        spills = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report
        )
        assert len(spills) == 2 * kernels  # for both architectures
        assert set(spills) == {("0", "0", "0")}
        assert "local" not in re.findall(r"(?:ld|st)\.(\w+)", code[stem][0])


def test_elements_move_in_vectors_of_16_bytes(code):
    kernels = kernels_of(code["fused_adam_w"][0])
    assert len(kernels) == 9
    for name, ptx in kernels.items():
        grad_vectors = 2 if "adamWKernelIf" in name else 1  # eight elements of 4 or of 2 bytes
        low_vectors = 0 if "NoLow" in name else 1
        assert len(re.findall(r"ld\.global\.v4\.b32", ptx)) == 6 + grad_vectors, name
        assert len(re.findall(r"st\.global\.v4\.b32", ptx)) == 6 + low_vectors, name
    assert all(
        "ld.global.v4.b32" in ptx
        for name, ptx in kernels_of(code["grad_stats"][0]).items()
        if "partialSums" in name
    )


def test_division_and_root_are_rounded_and_nothing_is_fused(code):
    ptx = code["fused_adam_w"][0]
    assert "fma.rn.f32" not in ptx
    assert ".ftz" not in ptx
    assert set(re.findall(r"(?:div|sqrt)\.\S+", ptx)) == {"div.rn.f32", "sqrt.rn.f32"}
