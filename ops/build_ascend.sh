#!/bin/bash
# Builds the AscendC operators into TARGET/vendors/ms_zero; CANN has to be there (ASCEND_HOME_PATH).
#
#   bash ops/build_ascend.sh TARGET [SOC] [WITH]
#
# SOC   what to compile for: ascend910b (default) or ascend910_93.
# WITH  mindspore: MindSpore's custom_compiler (default where MindSpore is installed);
#       cmake: the CMake modules of CANN 8.5 and later (default elsewhere);
#       nothing: only gather the sources of all operators as one project in TARGET.
#
# Afterwards: source TARGET/vendors/ms_zero/bin/set_env.bash, or put TARGET/vendors/ms_zero into
# ASCEND_CUSTOM_OPP_PATH. No machine of this project has CANN: this build has never compiled for a device.
set -euo pipefail

readonly vendor=ms_zero
ops=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)

fail() {
    echo "build_ascend.sh: error: $1" >&2
    exit 1
}

# Both builders take flat folders.
gather() {
    local folder
    mkdir -p "$1/op_host" "$1/op_kernel"
    for folder in "$ops"/common/ascendc "$ops"/*/ascendc; do
        if [ -d "$folder/op_host" ]; then cp "$folder"/op_host/*.* "$1/op_host/"; fi
        if [ -d "$folder/op_kernel" ]; then cp "$folder"/op_kernel/*.* "$1/op_kernel/"; fi
    done
    cp "$ops/common/ascendc/CMakeLists.txt" "$1/"
}

mindspore_compiler() {
    "${PYTHON:-python3}" - <<'PYTHON' 2>/dev/null
import importlib.util, pathlib
home = pathlib.Path(importlib.util.find_spec("mindspore").origin).parent
print(home / "lib" / "plugin" / "ascend" / "custom_compiler")
PYTHON
}

# The compiler works in its own folder: a copy keeps the installed package as it is.
build_with_mindspore() {
    local compiler
    compiler=$(mindspore_compiler) || fail "MindSpore is not installed: choose cmake, or install it"
    [ -d "$compiler" ] || fail "$compiler is missing: this MindSpore has no custom_compiler; choose cmake"
    cp -r "$compiler" "$work/compiler"
    cd "$work/compiler"
    "${PYTHON:-python3}" setup.py --op_host_path "$work/project/op_host" --op_kernel_path "$work/project/op_kernel" \
        --soc_version "$soc" --ascend_cann_package_path "$ASCEND_HOME_PATH" --vendor_name "$vendor" \
        --install_path "$target" --install || show_log "$work"/compiler/*.log
}

build_with_cmake() {
    command -v cmake >/dev/null || fail "cmake was not found: install it, or choose mindspore"
    cmake -S "$work/project" -B "$work/build" "-DASCEND_CANN_PACKAGE_PATH=$ASCEND_HOME_PATH" \
        "-DASCEND_COMPUTE_UNIT=$soc" "-DVENDOR_NAME=$vendor" || fail "cmake could not configure the project"
    cmake --build "$work/build" --parallel || fail "compiling failed"
    cmake --build "$work/build" --target package || fail "packing failed"
    bash "$work"/build/*.run "--install-path=$target" || fail "installing the package failed"
}

show_log() {
    tail -n 40 "$@" >&2 || true
    fail "MindSpore's custom_compiler failed: the end of its log is above"
}

[ $# -ge 1 ] || fail "no target folder: bash build_ascend.sh TARGET [SOC] [mindspore|cmake|nothing]"
mkdir -p "$1"
target=$(cd "$1" && pwd -P)
soc=${2:-ascend910b}
with=${3:-}
if [ -z "$with" ]; then
    if mindspore_compiler >/dev/null; then with=mindspore; else with=cmake; fi
fi

if [ "$with" = nothing ]; then
    gather "$target"
    exit
fi
[ -n "${ASCEND_HOME_PATH:-}" ] || fail "ASCEND_HOME_PATH is not set: source the set_env.sh of CANN"
[ -d "$ASCEND_HOME_PATH" ] || fail "ASCEND_HOME_PATH=$ASCEND_HOME_PATH is no folder"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
gather "$work/project"
case $with in
    mindspore) build_with_mindspore ;;
    cmake) build_with_cmake ;;
    *) fail "$with: expected mindspore, cmake or nothing" ;;
esac
[ -d "$target/vendors/$vendor" ] || fail "the build ended without an error, but $target/vendors/$vendor is missing"
echo "built: $target/vendors/$vendor"
