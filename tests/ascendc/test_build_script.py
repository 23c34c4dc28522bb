"""ops/build_ascend.sh against stand-ins for CANN: what is handed over, what is said when something lacks."""

import shutil
import subprocess
import sys
from pathlib import Path

import all_finite
import pytest
from emulated import ROOT

SCRIPT = ROOT / "ops" / "build_ascend.sh"
KERNELS = {"fused_adam_w.cpp", "fused_adam_w_master.cpp", "grad_stats.cpp", "grad_stats_total.cpp"}
# What makes a package of the gathered sources, in place of CANN: it records what it was given.
PACKAGE = """set -e
mkdir -p build_out
ls op_host op_kernel > build_out/listing
cat > build_out/custom_opp.run <<'RUN'
root=${1#--install-path=}
root=${root:-$ASCEND_CUSTOM_OPP_PATH}
mkdir -p "$root/vendors/ms_zero/bin"
cp "$(dirname "$0")/listing" "$root/vendors/ms_zero/"
RUN
"""
PRESETS = """{"configurePresets": [{"cacheVariables": {"ASCEND_COMPUTE_UNIT": {"value": ""},
"ASCEND_CANN_PACKAGE_PATH": {"value": ""}, "vendor_name": {"value": ""}}}]}"""
# CANN's CMake modules: the same functions, which only check that the sources exist.
MODULES = """function(npu_op_package)
endfunction()
function(npu_op_code_gen)
    foreach(source ${ARGN})
        if(source MATCHES "[.]cpp$" AND NOT EXISTS "${source}")
            message(FATAL_ERROR "no ${source}")
        endif()
    endforeach()
endfunction()
function(npu_op_library)
endfunction()
function(npu_op_kernel_sources)
endfunction()
function(npu_op_kernel_library target)
    add_custom_target(package COMMAND bash "${CMAKE_SOURCE_DIR}/make_package.sh"
        COMMAND ${CMAKE_COMMAND} -E copy build_out/custom_opp.run build_out/listing "${CMAKE_BINARY_DIR}"
        WORKING_DIRECTORY "${CMAKE_SOURCE_DIR}")
    file(WRITE "${CMAKE_SOURCE_DIR}/make_package.sh" "bash ${PACKAGE_SCRIPT}")
endfunction()
function(npu_op_package_add)
endfunction()
"""


def build(*arguments, home=None):
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHON": sys.executable,
        "GLOG_v": "3",
    }
    if home is not None:
        environment["ASCEND_HOME_PATH"] = str(home)
    return subprocess.run(
        ["bash", str(SCRIPT), *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def check_package(target):
    names = set((target / "vendors" / "ms_zero" / "listing").read_text(encoding="utf-8").split())
    assert names >= KERNELS | {"fused_adam_w.h", "fused_adam_w_tiling.h", "grad_stats_tiling.h"}
    assert names >= {"launch.h", "vector_split.h", "fused_adam_w_split.h", "grad_stats_split.h"}


def test_sources_are_gathered_flat(tmp_path):
    assert build(tmp_path, "ascend910b", "nothing").returncode == 0
    assert {path.name for path in (tmp_path / "op_kernel").glob("*.cpp")} == KERNELS
    assert (tmp_path / "CMakeLists.txt").is_file()
    for path in tmp_path.glob("op_*/*"):
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith('#include "') and "/" not in line.replace("../op_kernel/", ""):
                included = path.parent / line.split('"')[1]
                assert included.is_file() or included.name == "kernel_operator.h", line


@pytest.mark.skipif(all_finite.source_path() is None, reason="MindSpore without the Ascend plugin")
def test_mindspores_compiler_takes_the_project(tmp_path):
    project = tmp_path / "cann" / "tools" / "op_project_templates" / "ascendc"
    for folder in ("customize/op_host", "customize/op_kernel", "common"):
        (project / folder).mkdir(parents=True)
    (project / "customize" / "CMakePresets.json").write_text(PRESETS, encoding="utf-8")
    (project / "customize" / "build.sh").write_text(PACKAGE, encoding="utf-8")
    compiler = all_finite.source_path().parents[6] / "custom_compiler"
    before = sorted(compiler.rglob("*"))
    done = build(tmp_path / "out", "ascend910b", "mindspore", home=tmp_path / "cann")
    assert done.returncode == 0, done.stderr
    check_package(tmp_path / "out")
    assert sorted(compiler.rglob("*")) == before


@pytest.mark.skipif(shutil.which("cmake") is None, reason="no cmake")
def test_cmake_takes_the_project(tmp_path):
    modules = tmp_path / "cann" / "compiler" / "tikcpp" / "ascendc_kernel_cmake"
    modules.mkdir(parents=True)
    package = tmp_path / "package.sh"
    package.write_text(PACKAGE, encoding="utf-8")
    text = f'set(PACKAGE_SCRIPT "{package}")\n{MODULES}'
    (modules / "ASCConfig.cmake").write_text(text, encoding="utf-8")
    done = build(tmp_path / "out", "ascend910b", "cmake", home=tmp_path / "cann")
    assert done.returncode == 0, done.stdout + done.stderr
    check_package(tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "home", "message"),
    [
        ([], None, "no target folder"),
        (["out"], None, "ASCEND_HOME_PATH is not set"),
        (["out"], "/nonexistent", "is no folder"),
        (["out", "ascend910b", "make"], "/tmp", "expected mindspore, cmake or nothing"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path, arguments, home, message):
    places = [tmp_path / each if each == "out" else each for each in arguments]
    done = build(*places, home=home)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_failing_compiler_is_reported(tmp_path):
    done = build(tmp_path / "out", "ascend910b", "cmake", home=tmp_path)
    assert done.returncode == 1
    assert "build_ascend.sh: error: " in done.stderr
