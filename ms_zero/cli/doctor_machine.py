"""Checks of the machine: environment variables, cores, memory, disk, shared memory, names."""

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ms_zero.cli.doctor_check import Check, Status, ok, problem, warning
from ms_zero.cli.launch_job import usable_cores
from ms_zero.cli.launch_preflight import resolve
from ms_zero.errors import UserError

_GIB = 2**30
_RESOLVE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class _Variable:
    """An environment variable, the values that do harm, and what they do."""

    name: str
    status: Status
    harmful: Callable[[str], bool]
    effect: str
    fix: str = "unset it"


def _is_on(value: str) -> bool:
    return value.strip() not in ("", "0")


# The effects on MindSpore were seen on 2.10.0.
_VARIABLES = (
    _Variable("MS_COMPILER_CACHE_ENABLE", "problem", _is_on, "a run that reuses the cache computes nonsense"),
    _Variable("MS_OP_PLUGIN_PATH", "problem", bool, "operators on views of tensors give wrong results"),
    _Variable("MS_DEV_PRECOMPILE_ONLY", "problem", _is_on, "graphs are compiled, but not run"),
    _Variable("MS_SIMULATION_LEVEL", "problem", bool, "devices are only simulated"),
    _Variable(
        "MS_ROLE", "problem", bool, "ms-zero train waits for a scheduler, as a worker of another job would"
    ),
    _Variable(
        "OMP_WAIT_POLICY",
        "warning",
        lambda value: value.strip().lower() == "active",
        "waiting threads take the cores from other workers",
        "unset it, or set it to passive",
    ),
    _Variable(
        "OMP_NUM_THREADS",
        "warning",
        lambda value: not value.strip().isdecimal() or not 1 <= int(value) <= usable_cores(),
        f"that is not between 1 and the {usable_cores()} usable cores",
    ),
    _Variable(
        "GLOG_v",
        "warning",
        lambda value: value.strip() in ("0", "1"),
        "MindSpore writes very large logs",
        "unset it, or set it to 2 or 3",
    ),
    _Variable("PYTHONOPTIMIZE", "warning", _is_on, "the checks of invariants are switched off"),
)


def check_environment(environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Environment variables that are known to do harm, one line each."""
    found = []
    for item in _VARIABLES:
        value = environment.get(item.name)
        if value is not None and item.harmful(value):
            message = f"{item.name}={value[:80]}: {item.effect}"
            found.append(Check("environment", item.status, message, item.fix))
    names = ", ".join(item.name for item in _VARIABLES)
    return found or [ok("environment", f"nothing harmful in {names}")]


def check_cores() -> list[Check]:
    """How many cores there are for workers, and how busy they are."""
    cores = usable_cores()
    message = f"{cores} usable of {os.cpu_count()}, load {os.getloadavg()[0]:.1f}"
    if cores < 2:
        return [warning("cores", message, "expect slow training; two workers will share the core")]
    return [ok("cores", message)]


def check_memory() -> list[Check]:
    """Memory that is free for this process: of the machine, or of its control group if that is less."""
    free = available_memory(Path("/proc/meminfo").read_text(encoding="ascii"), Path("/sys/fs/cgroup"))
    message = f"{free / _GIB:.1f} GiB available"
    if free < _GIB // 2:
        return [problem("memory", message, "end other programs: a worker needs half a GiB and its model")]
    if free < 2 * _GIB:
        return [warning("memory", message, "end other programs, or start few workers")]
    return [ok("memory", message)]


def available_memory(meminfo: str, cgroup: Path) -> int:
    """Bytes that can still be had, from the text of ``/proc/meminfo`` and a control group's folder."""
    fields = dict(line.split(":", 1) for line in meminfo.splitlines() if ":" in line)
    free = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = (cgroup / "memory.max").read_text(encoding="ascii").strip()
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
    except OSError:  # no control groups of version 2
        return free
    return free if limit == "max" else max(0, min(free, int(limit) - used))


def check_disk() -> list[Check]:
    """Free space where results go by default, and for temporary files."""
    folders = {"disk": Path.cwd(), "temporary disk": Path(tempfile.gettempdir())}
    return [_check_folder(name, folder, 2 * _GIB) for name, folder in folders.items()]


def check_shared_memory() -> list[Check]:
    """``/dev/shm``, through which processes of a machine exchange data."""
    folder = Path("/dev/shm")
    if not folder.is_dir():
        return [problem("shared memory", "/dev/shm is missing", "mount a tmpfs there")]
    return [_check_folder("shared memory", folder, 64 * 2**20)]


def _check_folder(name: str, folder: Path, wanted: int) -> Check:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"ms_zero")
            file.flush()
    except OSError as error:
        fix = "free space there or correct its permissions"
        return problem(name, f"cannot write to {folder} ({error.strerror})", fix)
    free = shutil.disk_usage(folder).free
    message = f"{free / _GIB:.1f} GiB free in {folder}"
    if free < wanted:
        return warning(name, message, f"have at least {wanted / _GIB:g} GiB free there")
    return ok(name, message)


def check_host_name() -> list[Check]:
    """Whether this machine's name resolves (several nodes need it) and the loopback address can be used."""
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        message = f"cannot listen on 127.0.0.1 ({error.strerror})"
        return [problem("host name", message, "bring up the loopback interface: ip link set lo up")]
    name = socket.gethostname()
    try:
        address = resolve(name, _RESOLVE_TIMEOUT_S)
    except UserError:
        fix = f"add '127.0.0.1 {name}' to /etc/hosts; several nodes can also use IP addresses"
        return [warning("host name", f"{name} does not resolve", fix)]
    return [ok("host name", f"{name} is {address}; 127.0.0.1 can be listened on")]
