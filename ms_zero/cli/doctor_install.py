"""Checks of the installation: Python, packages, compilers, and whether mindspore runs."""

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import ms_zero
from ms_zero import resources
from ms_zero.cli.doctor_check import Check, ok, problem, skipped, warning
from ms_zero.cli.launch_preflight import python_command
from ms_zero.errors import UserError

PYTHON = ((3, 10), (3, 13))
"""First supported version and first unsupported one after it; setup.py says the same."""
REQUIREMENTS = {"mindspore": "==2.10.0", "numpy": ">=1.26,<2", "pyyaml": ">=6.0"}
"""What setup.py requires."""

_PROBE = "ms_zero.testing.selfcheck"
_CANN_VERSION_FILES = (
    "version.cfg",
    "ascend_toolkit_install.info",
    f"{platform.machine()}-linux/ascend_toolkit_install.info",
)


def check_python() -> list[Check]:
    """The version, the machine, and whether msrun will find this very interpreter."""
    found = f"{platform.python_version()} at {sys.executable} on {platform.system()} {platform.machine()}"
    first, end = PYTHON
    if not first <= sys.version_info[:2] < end:
        versions = f"{first[0]}.{first[1]} to {end[0]}.{end[1] - 1}"
        return [problem("python", found, f"make a virtual environment with Python {versions}")]
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return [problem("python", found, "use Linux on x86_64 or aarch64")]
    try:
        python_command()
    except UserError as error:
        what, _, fix = str(error).partition(": ")
        return [problem("python", f"{found}; {what}", fix)]
    return [ok("python", found)]


def check_package() -> list[Check]:
    """Where this package is and whether its presets came with it."""
    found = f"{ms_zero.__version__} in {Path(ms_zero.__file__).resolve().parent}"
    try:
        counts = [f"{len(resources.list_presets(kind))} {kind}" for kind in resources.KINDS]
    except UserError as error:
        return [problem("ms_zero", f"{found}; {error}", "install ms_zero again")]
    return [ok("ms_zero", f"{found}; presets: {', '.join(counts)}")]


def check_requirements() -> list[Check]:
    """The installed versions of the packages that are needed."""
    checks = []
    for name, wanted in REQUIREMENTS.items():
        fix = f"{sys.executable} -m pip install '{name}{wanted}'"
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            checks.append(problem(name, f"not installed for {sys.executable}", fix))
            continue
        if satisfies(version, wanted):
            checks.append(ok(name, f"{version} ({wanted})"))
        else:
            checks.append(problem(name, f"{version} is installed, but {name}{wanted} is needed", fix))
    return checks


def satisfies(version: str, wanted: str) -> bool:
    """Whether a version fulfils clauses such as ``>=1.26,<2``."""
    for clause in wanted.split(","):
        operator, bound = re.fullmatch(r"(==|>=|<)([0-9.]+)", clause).groups()
        width = max(len(_numbers(version)), len(_numbers(bound)))
        have, want = (_padded(text, width) for text in (version, bound))
        if not {"==": have == want, ">=": have >= want, "<": have < want}[operator]:
            return False
    return True


def _numbers(version: str) -> list[int]:
    release = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in release.group().split(".")] if release else []


def _padded(version: str, width: int) -> list[int]:
    numbers = _numbers(version)
    return numbers + [0] * (width - len(numbers))


def check_compilers() -> list[Check]:
    """The compilers for own kernels: of the host, of CUDA, of CANN where that is set up."""
    checks = [_compiler("g++", "only needed to build kernels for the CPU", "install g++ (package g++)")]
    if shutil.which("nvcc") is not None or _device_files("nvidia[0-9]*"):
        fix = "install the CUDA toolkit and put nvcc into PATH"
        checks.append(_compiler("nvcc", "only needed to build kernels for GPUs", fix))
    home = os.environ.get("ASCEND_HOME_PATH")
    if home:
        checks.append(_check_cann(Path(home)))
    elif _device_files("davinci[0-9]*"):
        fix = "source the set_env.sh of your CANN installation, for example under /usr/local/Ascend"
        checks.append(warning("cann", "Ascend devices are present, but ASCEND_HOME_PATH is not set", fix))
    return checks


def _compiler(name: str, purpose: str, fix: str) -> Check:
    path = shutil.which(name)
    if path is None:
        return warning(name, f"not found; {purpose}", fix)
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return warning(name, f"{path} does not run: {error}", fix)
    lines = [line for line in done.stdout.splitlines() if re.search(r"\d+\.\d+", line)]
    if done.returncode != 0 or not lines:
        return warning(name, f"{path} --version ended with status {done.returncode}", fix)
    return ok(name, f"{lines[0].strip()} ({path})")


def _check_cann(home: Path) -> Check:
    fix = "source the set_env.sh of your CANN installation again"
    if not home.is_dir():
        return problem("cann", f"ASCEND_HOME_PATH={home} is no folder", fix)
    for name in _CANN_VERSION_FILES:
        if (home / name).is_file():
            text = (home / name).read_text(encoding="utf-8", errors="replace")
            found = re.search(r"\d+\.\d+(\.[A-Za-z0-9]+)*", text)
            if found:
                return ok("cann", f"{found.group()} in {home}")
    return warning("cann", f"{home} names no version", fix)


def _device_files(pattern: str) -> list[Path]:
    return sorted(Path("/dev").glob(pattern))


def check_mindspore(timeout_s: float) -> tuple[Mapping[str, int] | None, list[Check]]:
    """Import mindspore in a process of its own and run an operation.

    Returns the number of devices of each target, None when mindspore does not run, and the checks.
    """
    if importlib.util.find_spec("mindspore") is None:
        return None, [skipped("import", "mindspore is not installed")]
    source = str(Path(ms_zero.__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
    environment = {"GLOG_v": "3", **os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", _PROBE]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        fix = "look for a slow or stuck file system, or raise --timeout"
        return None, [problem("import", f"mindspore was not ready after {timeout_s:g} s", fix)]
    if done.returncode != 0:
        return None, [_import_problem(done.returncode, done.stderr.decode("utf-8", "replace"))]
    found = json.loads(done.stdout.splitlines()[-1])
    message = f"mindspore {found['mindspore']} with numpy {found['numpy']} runs an operation on the CPU"
    return found["devices"], [ok("import", message), _check_devices(found["devices"])]


def _import_problem(status: int, errors: str) -> Check:
    """Tell from the end of its output why mindspore does not run."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()] or ["no message"]
    raised = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    reason = (raised or lines)[-1]
    if status < 0:
        reason = f"killed by {signal.Signals(-status).name}; last line: {lines[-1]}"
    return problem("import", f"mindspore does not run: {reason[:300]}", _import_fix(status, reason))


def _import_fix(status: int, reason: str) -> str:
    install = f"{sys.executable} -m pip install"
    missing = re.search(r"No module named '([\w.]+)'", reason)
    if missing:
        package = missing.group(1).split(".")[0]
        return f"{install} '{package}{REQUIREMENTS.get(package, '')}'"
    if "numpy" in reason:
        return f"{install} 'numpy{REQUIREMENTS['numpy']}'"
    if re.search("GLIBC|CXXABI", reason):
        return "use a newer Linux: its C or C++ library is too old for the wheel of MindSpore"
    if "cannot open shared object file" in reason:
        return "install the system package that has the named library"
    if status == -signal.SIGILL:
        return "use another machine: this CPU lacks instructions that the wheel of MindSpore uses"
    return f"run '{sys.executable} -m {_PROBE}' to see the whole message"


def _check_devices(devices: Mapping[str, int]) -> Check:
    there = ", ".join(f"{name} ({count})" for name, count in devices.items() if count)
    message = f"available: {there or 'none'}"
    away = [name for name, count in devices.items() if not count]
    if away:
        message += f"; not available: {', '.join(away)}"
    if "Ascend" in away and _device_files("davinci[0-9]*"):
        fix = "source the set_env.sh of CANN and check the driver with npu-smi info"
        return warning("devices", f"{message}, though /dev has Ascend devices", fix)
    if "GPU" in away and _device_files("nvidia[0-9]*"):
        fix = "MindSpore's GPU plugin needs the libraries of CUDA 11.6 and cuDNN 8 in LD_LIBRARY_PATH"
        return warning("devices", f"{message}, though /dev has NVIDIA devices", fix)
    return ok("devices", message)
