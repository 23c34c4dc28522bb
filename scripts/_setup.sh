# Shared by the scripts in this folder (source it): finds a Python, makes .venv and installs the package into it.
#
#   ms_zero_setup base|test    afterwards $MS_ZERO_ROOT is the repository and $MS_ZERO_VENV its environment
#
# PYTHON=/path/to/python picks the interpreter. Needs neither root nor anything but a package index.

MS_ZERO_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
MS_ZERO_VENV="$MS_ZERO_ROOT/.venv"

ms_zero_say() { printf 'setup: %s\n' "$*" >&2; }

ms_zero_fail() {
    ms_zero_say "$@"
    exit 2
}

# True for a Python that MindSpore 2.10.0 has wheels for: 3.10 to 3.12, 64 bit, Linux. It has to run: a shim or a
# dangling link by the right name is not enough.
ms_zero_python_fits() {
    "$1" -c 'import sys, platform
fits = (3, 10) <= sys.version_info[:2] <= (3, 12) and sys.maxsize > 2**32
sys.exit(0 if fits and sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64") else 1)' \
        >/dev/null 2>&1
}

# Prints the interpreter to use; the newest that MindSpore is tested with first.
ms_zero_find_python() {
    local candidate
    if [ -n "${PYTHON:-}" ]; then
        ms_zero_python_fits "$PYTHON" ||
            ms_zero_fail "PYTHON=$PYTHON is no working Python 3.10, 3.11 or 3.12 (64 bit, Linux)"
        printf '%s\n' "$PYTHON"
        return
    fi
    for candidate in python3.11 python3.12 python3.10 python3 python; do
        if ms_zero_python_fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    ms_zero_fail "found no Python 3.10, 3.11 or 3.12 (MindSpore 2.10.0 has wheels for these):" \
        "apt-get install python3 python3-venv, or name one with PYTHON=/path/to/python"
}

# Refuses what would fail later and less clearly, all at once, with the packages to install.
ms_zero_check_tools() {
    local python="$1" packages=() version
    if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
        version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
        if [ "$python" = /usr/bin/python3 ] || [ "$python" = /usr/bin/python ]; then
            packages+=(python3-venv)
        else
            packages+=("python$version-venv")
        fi
    fi
    command -v g++ >/dev/null 2>&1 || packages+=(g++)
    if [ "${#packages[@]}" -gt 0 ]; then
        ms_zero_fail "missing on this machine, as root: apt-get install ${packages[*]}"
    fi
}

# What the environment depends on. A moved repository, another Python or other requirements make it stale.
ms_zero_fingerprint() {
    printf '%s\n' "$MS_ZERO_ROOT" "$("$1" -c 'import sys; print(sys.version)')"
    cat "$MS_ZERO_ROOT/setup.py" "$MS_ZERO_ROOT/pyproject.toml"
}

# True when the environment was completed with at least the extras $1 and still works.
ms_zero_venv_is_complete() {
    local python="$MS_ZERO_VENV/bin/python" level
    for level in test "$1"; do
        if [ -f "$MS_ZERO_VENV/ms_zero-$level" ] && [ -x "$python" ] && [ -x "$MS_ZERO_VENV/bin/ms-zero" ]; then
            ms_zero_fingerprint "$python" 2>/dev/null | cmp -s - "$MS_ZERO_VENV/ms_zero-$level" && return 0
        fi
    done
    return 1
}

# True when an environment of this repository is there and can be completed: its Python runs and has pip.
ms_zero_venv_is_usable() {
    local python="$MS_ZERO_VENV/bin/python"
    ms_zero_python_fits "$python" &&
        [ "$("$python" -c 'import os, sys; print(os.path.realpath(sys.prefix))')" = "$(readlink -f "$MS_ZERO_VENV")" ] &&
        "$python" -m pip --version >/dev/null 2>&1 &&
        { [ ! -f "$MS_ZERO_VENV/ms_zero-root" ] || [ "$(cat "$MS_ZERO_VENV/ms_zero-root")" = "$MS_ZERO_ROOT" ]; }
}

ms_zero_make_venv() {
    local python
    if ms_zero_venv_is_usable; then
        return
    fi
    if [ -e "$MS_ZERO_VENV" ]; then
        [ -f "$MS_ZERO_VENV/pyvenv.cfg" ] || [ -z "$(ls -A "$MS_ZERO_VENV")" ] ||
            ms_zero_fail "$MS_ZERO_VENV is in the way and is no virtual environment: move it"
        ms_zero_say ".venv is broken or was made elsewhere: making it anew"
        rm -rf "$MS_ZERO_VENV"
    fi
    python="$(ms_zero_find_python)" || exit 2
    ms_zero_check_tools "$python"
    ms_zero_say "making .venv with $("$python" --version 2>&1) ($python)"
    "$python" -m venv "$MS_ZERO_VENV" || ms_zero_fail "could not make $MS_ZERO_VENV: see the message above"
    printf '%s\n' "$MS_ZERO_ROOT" >"$MS_ZERO_VENV/ms_zero-root"
}

# Imports the framework once, so that a missing system library is named here and not by a worker.
ms_zero_check_mindspore() {
    local output library
    output="$("$MS_ZERO_VENV/bin/python" -c 'import mindspore' 2>&1)" && return
    printf '%s\n' "$output" | tail -n 5 >&2
    library="$(printf '%s\n' "$output" | grep -o 'lib[a-zA-Z0-9_+-]*\.so[.0-9]*: cannot open' | head -n 1 || true)"
    case "$library" in
        libgomp*) ms_zero_fail "a system library is missing: apt-get install libgomp1" ;;
        libstdc++*) ms_zero_fail "a system library is missing: apt-get install libstdc++6" ;;
        libz.*) ms_zero_fail "a system library is missing: apt-get install zlib1g" ;;
        *) ms_zero_fail "mindspore is installed but cannot be imported" ;;
    esac
}

ms_zero_install() {
    local level="$1" target="$MS_ZERO_ROOT"
    if [ "$level" = test ]; then
        target="$MS_ZERO_ROOT[test]"
    fi
    rm -f "$MS_ZERO_VENV"/ms_zero-base "$MS_ZERO_VENV"/ms_zero-test
    ms_zero_say "installing (MindSpore is a download of 800 MB the first time; this can take some minutes)"
    "$MS_ZERO_VENV/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$target" ||
        ms_zero_fail "pip could not install the package: see the message above; run the script again to go on"
    ms_zero_check_mindspore
    ms_zero_fingerprint "$MS_ZERO_VENV/bin/python" >"$MS_ZERO_VENV/ms_zero-$level"
}

# Sets up what is missing; two scripts started together take turns.
ms_zero_setup() {
    local level="$1" lock
    if ms_zero_venv_is_complete "$level"; then
        return
    fi
    exec {lock}<"$MS_ZERO_ROOT/scripts/_setup.sh"
    if command -v flock >/dev/null 2>&1; then
        flock "$lock"
    fi
    if ! ms_zero_venv_is_complete "$level"; then
        ms_zero_make_venv
        ms_zero_install "$level"
    fi
    exec {lock}<&-
}
