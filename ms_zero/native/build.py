"""Compile the CPU library with the host's C++ compiler."""

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ms_zero.errors import UserError, one_line
from ms_zero.native.sources import COMMON_FLAGS, Variant, cpu_sources, library_name

COMPILERS = ("g++", "c++", "clang++")
"""Commands that are tried, in this order."""
_TIMEOUT_S = 600
_PROBE = "#include <omp.h>\n#include <cstdint>\nint main() { return omp_get_max_threads() < 1; }\n"


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that was found.

    Attributes:
        path: the command.
        version: first line of its ``--version``.
        problem: why it cannot build the library, "" when it can.
    """

    path: str
    version: str
    problem: str


@dataclass(frozen=True)
class Build:
    """A library that was built, and by what."""

    path: Path
    variant: str
    compiler: Compiler


def find_compilers(names: Sequence[str] = COMPILERS) -> tuple[Compiler, ...]:
    """Every compiler of `names` in PATH, each tried on a small OpenMP program."""
    found, seen = [], set()
    for name in names:
        path = shutil.which(name)
        if path is not None and os.path.realpath(path) not in seen:
            seen.add(os.path.realpath(path))
            found.append(_examine(path))
    return tuple(found)


def _examine(path: str) -> Compiler:
    try:
        shown = run_tool([path, "--version"])
    except UserError as error:
        return Compiler(path, "unknown version", str(error))
    version = (shown.splitlines() or ["unknown version"])[0].strip()
    with tempfile.TemporaryDirectory(prefix="ms-zero-") as folder:
        source = Path(folder) / "probe.cc"
        source.write_text(_PROBE, encoding="utf-8")
        try:
            run_tool([path, "-std=c++17", "-fopenmp", str(source), "-o", str(source.with_suffix(""))])
        except UserError as error:
            return Compiler(path, version, str(error))
    return Compiler(path, version, "")


def usable_compiler(compilers: Sequence[Compiler]) -> Compiler:
    """The first compiler without a problem; raises UserError that says how to get one."""
    for compiler in compilers:
        if not compiler.problem:
            return compiler
    if not compilers:
        reason = f"no C++ compiler in PATH (looked for {', '.join(COMPILERS)})"
    else:
        reason = "; ".join(f"{c.path} does not work: {c.problem}" for c in compilers)
    raise UserError(f"{reason}: install one with OpenMP, for example with 'apt-get install g++'")


def build_library(
    root: Path,
    variant: Variant,
    folder: Path,
    *,
    extra_flags: Sequence[str] = (),
    jobs: int | None = None,
    mode: int = 0o755,
    announce: Callable[[str], None] = lambda message: None,
) -> Build:
    """Compile all CPU sources under `root` and put the library into `folder` (made when missing).

    The library appears under its final name only when it is complete; a concurrent build of the same library
    ends in the same file.

    Args:
        root: the folder ``ops``.
        variant: instruction set.
        folder: where the library goes.
        extra_flags: appended to compiling and linking, for sanitizers.
        jobs: compilers at the same time; None for the number of usable cores.
        mode: permissions of the library, whatever the umask is.
        announce: is told in one line what is about to be built with which compiler.

    Raises:
        UserError: no compiler, or compiling failed.
    """
    compiler = usable_compiler(find_compilers())
    announce(f"building the CPU kernels for {variant.name} with {compiler.path}, once")
    sources = cpu_sources(root)
    flags = [*COMMON_FLAGS, *variant.flags, *extra_flags, f"-I{root / 'common'}"]
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".building-", dir=folder) as scratch:
        objects = [Path(scratch) / f"{number}.o" for number in range(len(sources))]
        commands = [
            [compiler.path, *flags, "-c", str(source), "-o", str(target)]
            for source, target in zip(sources, objects, strict=True)
        ]
        with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
            list(pool.map(run_tool, commands))
        library = Path(scratch) / "library.so"
        run_tool([compiler.path, *flags, "-shared", *map(str, objects), "-o", str(library)])
        with library.open("ab") as file:  # the dynamic linker passes over what follows the sections
            file.write(hashlib.sha256(library.read_bytes()).digest())
        library.chmod(mode)
        target = folder / library_name(root, variant)
        library.replace(target)
    return Build(target, variant.name, compiler)


def is_whole(library: Path) -> bool:
    """Whether a library is as :func:`build_library` left it, with the SHA-256 of the rest at its end.

    Loading one that lacks a part, after a crash of the machine or on a full disk, can kill the process.
    """
    content = library.read_bytes()
    size = hashlib.sha256().digest_size
    return content[-size:] == hashlib.sha256(content[:-size]).digest()


def run_tool(command: Sequence[str], **environment: str) -> str:
    """Standard output of a compiler; raises UserError with its first error line when it fails.

    `environment` is added to that of this process.
    """
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{command[0]}: {one_line(str(error))[:300]}") from None
    if done.returncode != 0:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        telling = [line for word in ("error:", "error") for line in lines if word in line.lower()] or lines
        raise UserError(f"{command[0]} ended with status {done.returncode}: {one_line(telling[0])[:300]}")
    return done.stdout
