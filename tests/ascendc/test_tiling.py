"""Tiling as a pure function, and the op_host sources against a stand-in for CANN's host interface."""

import ctypes
import subprocess

import pytest
from emulated import EMULATOR, FLAGS, HOST_FOLDERS
from tiling import AdamTiling, StatsTiling

FLOAT, HALF, BF16, INT32 = 0, 1, 27, 3
UB = 192 * 1024
LENGTHS = (0, 1, 255, 256, 257, 5000, 1 << 20, (1 << 20) + 1, 10**9 + 7, 2**33 + 3)


@pytest.mark.parametrize("cores", [1, 8, 40, 48, 64])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_element_has_one_core(tiling, length, cores):
    for split in (tiling.adam(length, cores, 2, 2), tiling.stats(length, cores)):
        assert 1 <= split.cores <= cores
        assert split.cores * split.per_core >= length
        assert length == 0 or (split.cores - 1) * split.per_core < length
    assert tiling.adam(length, cores, 4, 2).per_core % 256 == 0
    assert tiling.stats(length, cores).per_core % 8192 == 0


def test_large_arrays_are_shared_evenly(tiling):
    for cores in (8, 40, 48):
        split = tiling.adam(10**9, cores, 2, 2)
        assert split.cores == cores
        assert split.per_core * cores - 10**9 < 256 * cores


@pytest.mark.parametrize("grad", [2, 4])
@pytest.mark.parametrize("low", [0, 2])
def test_a_tile_fills_the_unified_buffer(tiling, grad, low):
    tile = tiling.adam(1 << 20, 48, grad, low).tile
    item = 2 * (12 + grad) + low + 4 + (4 if grad == 2 else 0)
    assert tile % 256 == 0
    assert tile * item + 96 <= tiling.usable_ub_bytes == 188_160 < (tile + 256) * item + 96


def test_more_cores_than_rows_are_left_idle(tiling):
    assert tiling.stats(10**9, 200).cores <= 64


@pytest.fixture(scope="module", params=["CANN 8", "CANN 9"])
def host(request, workshop):
    library = workshop / f"host_{request.param[-1]}.so"
    stub = EMULATOR.parent / "cann_stub"
    includes = [f"-I{folder}" for folder in (stub, *HOST_FOLDERS)]
    extra = ["-DMS_ZERO_CANN_9"] if request.param == "CANN 9" else []
    subprocess.run(
        ["g++", *FLAGS, "-Werror", *extra, *includes, str(stub / "check.cc"), "-o", str(library)], check=True
    )
    loaded = ctypes.CDLL(str(library))
    loaded.describe.restype = loaded.infer.restype = ctypes.c_char_p
    loaded.infer.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p]
    return loaded


def run_tiling(host, name, length, types, cores, structure, ub=UB):
    data = (ctypes.c_uint8 * 64)()
    blocks, workspace = ctypes.c_uint32(), ctypes.c_uint64()
    status = host.run_tiling(
        name.encode(),
        ctypes.c_int64(length),
        (ctypes.c_int * len(types))(*types),
        len(types),
        ctypes.c_uint32(cores),
        ctypes.c_uint64(ub),
        data,
        ctypes.byref(blocks),
        ctypes.byref(workspace),
    )
    return status, structure.from_buffer_copy(data) if structure else None, blocks.value, workspace.value


def as_dict(structure):
    return {name: getattr(structure, name) for name, _ in structure._fields_}


def test_operators_are_defined_as_the_contract_says(host):
    lines = dict(line.split("|", 1) for line in host.describe().decode().splitlines())
    assert set(lines) == {"FusedAdamW", "FusedAdamWMaster", "GradStats", "GradStatsTotal"}
    assert lines["FusedAdamWMaster"] == (
        "param:0,0,0,;exp_avg:0,0,0,;exp_avg_sq:0,0,0,;grad:0,1,27,;scalars:0,0,0,;"
        "|param:0,0,0,;exp_avg:0,0,0,;exp_avg_sq:0,0,0,;token:0,0,0,;|ascend910b,ascend910_93,"
    )
    inputs, outputs, _ = lines["FusedAdamW"].split("|")
    assert "grad:0,1,27,0,1,27,;" in inputs
    assert inputs.endswith("low_precision:1,1,1,27,27,27,;")
    assert [part.split(":")[0] for part in outputs.split(";")[:-1]] == [
        "param",
        "exp_avg",
        "exp_avg_sq",
        "low_precision",
        "token",
    ]
    assert lines["GradStats"].startswith("x:0,1,27,;|partials:0,0,0,;|")


@pytest.mark.parametrize("length", [0, 1, 100_003, 2**33 + 3])
def test_registered_tiling_is_the_pure_function(host, tiling, length):
    for grad, grad_bytes in ((FLOAT, 4), (HALF, 2), (BF16, 2)):
        types = [FLOAT, FLOAT, FLOAT, grad, FLOAT, BF16]
        status, found, blocks, workspace = run_tiling(host, "FusedAdamW", length, types, 40, AdamTiling)
        assert status == 0
        assert as_dict(found) == as_dict(tiling.adam(length, 40, grad_bytes, 2))
        assert blocks == found.cores
        assert workspace == 16 * 1024 * 1024
        status, found, blocks, _ = run_tiling(host, "FusedAdamWMaster", length, types[:5], 48, AdamTiling)
        assert as_dict(found) == as_dict(tiling.adam(length, 48, grad_bytes, 0))
    status, found, blocks, _ = run_tiling(host, "GradStats", length, [HALF], 48, StatsTiling)
    assert as_dict(found) == as_dict(tiling.stats(length, 48))
    assert blocks == found.cores
    assert run_tiling(host, "GradStatsTotal", 512, [FLOAT], 48, None)[2] == 1


def test_a_smaller_device_gets_a_smaller_tile(host):
    types = [FLOAT, FLOAT, FLOAT, HALF, FLOAT]
    small = run_tiling(host, "FusedAdamWMaster", 10**6, types, 8, AdamTiling, ub=96 * 1024)[1].tile
    assert 0 < small * 36 + 96 <= 96 * 1024


def test_foreign_dtypes_are_refused(host):
    assert run_tiling(host, "FusedAdamWMaster", 10, [FLOAT, FLOAT, FLOAT, INT32, FLOAT], 8, None)[0] != 0
    assert run_tiling(host, "FusedAdamW", 10, [FLOAT] * 6, 8, None)[0] != 0


def test_shapes_and_types_of_the_outputs(host):
    types = (ctypes.c_int * 6)(FLOAT, FLOAT, FLOAT, HALF, FLOAT, BF16)
    assert host.infer(b"FusedAdamW", 77, types) == b"77,:0;77,:0;77,:0;77,:27;1,:0;"
    assert host.infer(b"FusedAdamWMaster", 77, types) == b"77,:0;77,:0;77,:0;1,:0;"
    assert host.infer(b"GradStats", 77, types) == b"64,8,:0;"
    assert host.infer(b"GradStatsTotal", 512, types) == b"1,:0;"
