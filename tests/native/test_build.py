"""Building, finding and loading the CPU library: what can go wrong and how it is told.

Each case runs in fresh processes on a small source tree; PATH, cache and sources are the test's. mindspore is
never imported.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ms_zero.native.sources import VARIANTS, best_variant, supported_variants

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PARTS = ("ms_zero/__init__.py", "ms_zero/errors.py", "ms_zero/resources.py", "ms_zero/native")
PARTS += ("pyproject.toml", "ops/common", "ops/fused_sgd")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

REPORT = """
import ctypes
from ms_zero import native
from ms_zero.errors import UserError
try:
    library = native.load_library()
    library.msz_variant.restype = ctypes.c_char_p
    found = native.find_library(native.best_variant())
    print("loaded", library.msz_variant().decode(), found.origin, found.path)
except UserError as error:
    print("refused", error)
"""


@pytest.fixture
def tree(tmp_path):
    """A source tree with the smallest library."""
    root = tmp_path / "a source tree"
    for part in PARTS:
        source, target = REPOSITORY / part, root / part
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__", "ascendc"))
        else:
            shutil.copy(source, target)
    (root / "configs").mkdir()
    return root


def start(tree, code=REPORT, **environment):
    base = {"PATH": os.environ["PATH"], "HOME": str(tree.parent), "PYTHONPATH": str(tree)}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**base, **environment},
        cwd=tree.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    shown, _ = process.communicate(timeout=240)
    assert process.returncode == 0, shown
    return shown.strip()


def run(tree, code=REPORT, **environment):
    return finish(start(tree, code, **environment))


def cached(tree):
    return sorted(path.name for path in (tree.parent / ".cache" / "ms_zero" / "native").glob("*.so"))


def fake_compiler(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return str(folder)


@needs_compiler
def test_workers_that_start_together_build_once_and_all_load(tree):
    log = tree.parent / "links"
    real = shutil.which("g++")
    text = f'case "$*" in *-shared*) echo link >> "{log}";; esac\nexec {real} "$@"'
    path = f"{fake_compiler(tree.parent / 'bin', 'g++', text)}:{os.environ['PATH']}"
    processes = [start(tree, PATH=path) for _ in range(4)]
    shown = {finish(process) for process in processes}
    assert len(shown) == 1
    (line,) = shown
    assert line.startswith(f"loaded {best_variant().name} cache {tree.parent}")
    assert log.read_text() == "link\n"
    assert len(cached(tree)) == 1
    folder = tree.parent / ".cache" / "ms_zero" / "native"
    assert folder.stat().st_mode & 0o077 == 0
    assert [path for path in folder.iterdir() if path.name.startswith(".building")] == []


@needs_compiler
def test_changed_sources_and_headers_are_built_again_and_shipped_libraries_found_first(tree):
    run(tree)
    header = tree / "ops" / "common" / "abi.h"
    header.write_text(header.read_text() + "\n// changed\n")
    assert " cache " in run(tree)
    assert len(cached(tree)) == 2
    shutil.rmtree(tree.parent / ".cache")
    build = "from pathlib import Path; from ms_zero.native import *; build_library(source_root(), "
    run(tree, build + f"best_variant(), Path({str(tree)!r}) / 'build' / 'native')")
    assert " package " in run(tree, PATH="/nowhere")  # no compiler is needed
    assert cached(tree) == []


def test_without_a_compiler_one_line_says_what_to_do(tree):
    shown = run(tree, PATH="/nowhere")
    assert shown == (
        "refused kernels: cannot build the CPU kernels: no C++ compiler in PATH (looked for g++, c++, "
        "clang++): install one with OpenMP, for example with 'apt-get install g++'; or choose the "
        "implementation without native code with hardware.kernels=portable"
    )
    assert cached(tree) == []


def test_a_compiler_that_does_not_work_is_named_with_its_own_words(tree):
    text = 'case "$*" in --version) echo "g++ 1.0";; *) echo "cannot find omp.h: an error" >&2; exit 1;; esac'
    shown = run(tree, PATH=fake_compiler(tree.parent / "bin", "g++", text))
    assert "bin/g++ does not work" in shown and "cannot find omp.h" in shown and "hardware.kernels" in shown
    assert "\n" not in shown


@needs_compiler
def test_the_next_compiler_is_taken_when_the_first_does_not_work(tree):
    folder = tree.parent / "bin"
    fake_compiler(folder, "g++", "exit 1")
    (folder / "c++").symlink_to(shutil.which("g++"))
    tools = [shutil.which(name) for name in ("as", "ld", "sh")]
    for tool in filter(None, tools):
        (folder / Path(tool).name).symlink_to(tool)
    assert run(tree, PATH=str(folder)).startswith("loaded")


@needs_compiler
def test_sources_that_do_not_compile_are_told_in_one_line(tree):
    (tree / "ops" / "fused_sgd" / "cpu" / "wrong.cc").write_text("int x = y;\n")
    shown = run(tree)
    assert shown.startswith("refused kernels: cannot build") and "wrong.cc:1" in shown and "\n" not in shown
    assert cached(tree) == []


@needs_compiler
def test_a_library_that_others_could_have_written_is_not_loaded(tree):
    run(tree)
    folder = tree.parent / ".cache" / "ms_zero" / "native"
    folder.chmod(0o777)
    assert "others may write to it" in run(tree)
    folder.chmod(0o700)
    (library,) = folder.glob("*.so")
    library.chmod(0o722)
    assert run(tree).startswith("loaded")  # built again in its place
    assert library.stat().st_mode & 0o022 == 0


@needs_compiler
def test_a_damaged_library_is_built_again(tree):
    """To load one can kill the process."""
    run(tree)
    (library,) = (tree.parent / ".cache" / "ms_zero" / "native").glob("*.so")
    whole = library.read_bytes()
    half = len(whole) // 2
    for content in (whole[:half], whole[:half] + bytes(len(whole) - half)):
        library.chmod(0o700)
        library.write_bytes(content)
        assert run(tree).startswith("loaded")
        assert len(library.read_bytes()) == len(whole)


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_named(tree):
    run(tree)
    (library,) = (tree.parent / ".cache" / "ms_zero" / "native").glob("*.so")
    library.chmod(0o700)
    content = b"no library"
    library.write_bytes(content + hashlib.sha256(content).digest())
    shown = run(tree)
    assert shown.startswith(f"refused kernels: cannot load {library}") and "XDG_CACHE_HOME" in shown


@needs_compiler
def test_without_a_usable_home_the_temporary_folder_serves(tree):
    temporary = tree.parent / "temporary"
    temporary.mkdir()
    shown = run(tree, HOME="/proc/nowhere", TMPDIR=str(temporary))
    assert f" cache {temporary}/ms_zero-{os.getuid()}/native/" in shown


@needs_compiler
def test_a_home_of_somebody_else_or_none_at_all_is_passed_over(tree):
    foreign, temporary = tree.parent / "foreign", tree.parent / "temporary"
    foreign.mkdir()
    temporary.mkdir()
    # Root may read everything and has an entry: this stands in for users who may not, or have none.
    closed = f"""
import pathlib
def close(name):
    real = getattr(pathlib.Path, name)
    def wrapped(self, *args, **options):
        if str(self).startswith({str(foreign)!r}):
            raise PermissionError(13, "Permission denied", str(self))
        return real(self, *args, **options)
    setattr(pathlib.Path, name, wrapped)
close("stat")
close("mkdir")
"""
    nobody = """
import pathlib
def expanduser(self):
    raise RuntimeError("Could not determine home directory.")
pathlib.Path.expanduser = expanduser
"""
    for start_of_code in (closed, nobody):
        shown = run(tree, start_of_code + REPORT, HOME=str(foreign), TMPDIR=str(temporary))
        assert f" cache {temporary}/ms_zero-{os.getuid()}/native/" in shown
        shutil.rmtree(temporary / f"ms_zero-{os.getuid()}")


@needs_compiler
def test_a_file_system_without_locks_serves(tree):
    code = """
import fcntl
def flock(file, how):
    raise OSError(38, "Function not implemented")
fcntl.flock = flock
"""
    assert run(tree, code + REPORT).startswith("loaded")


FORK = """
import os, sys, signal, ctypes
from ms_zero.native import load_library
library = load_library()
memory = (ctypes.c_float * 400_000)()
scalars = (ctypes.c_float * 16)(1.0, -1.0)
def update():
    args = memory, memory, 0, None, 0, ctypes.c_int64(200_000), scalars, 4
    status = library.msz_sgd(memory, ctypes.byref(memory, 800_000), *args[2:])
    assert status == 0, status
for i in range(200_000, 400_000):
    memory[i] = 1.0
before = int(sys.argv[1])
if before:
    update()
else:  # others may use OpenMP too, before this library does
    other = ctypes.CDLL(sys.argv[2])
    other.work(4)
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        update()
        update()
        os._exit(0 if all(value == 2.0 + before for value in memory[:200_000]) else 1)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""


OTHER = """
extern "C" int work(int threads) {
  int count = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : count)
  for (int i = 0; i < 100; ++i) ++count;
  return count;
}
"""


@needs_compiler
@pytest.mark.parametrize("user", ["this library", "another one"])
def test_threads_work_in_a_process_forked_from_one_that_used_them(tree, user):
    source = tree / "other.cc"
    source.write_text(OTHER)
    command = ["g++", "-shared", "-fPIC", "-fopenmp", str(source), "-o", str(tree / "other.so")]
    subprocess.run(command, check=True)
    code = FORK.replace("sys.argv[1]", str(int(user == "this library")))
    shown = run(tree, code.replace("sys.argv[2]", repr(str(tree / "other.so"))), OMP_NUM_THREADS="4")
    assert shown == "[0, 0, 0]"


def test_the_best_variant_that_the_processor_has_is_taken():
    avx512 = "flags\t\t: fpu sse2 f16c fma avx2 avx512f avx512dq avx512bw avx512vl\n"
    names = [each.name for each in supported_variants("x86_64", avx512)]
    assert names == ["avx512", "avx2", "plain"]
    assert [v.name for v in supported_variants("x86_64", "flags : sse2 avx2 fma f16c avx512f\n")] == names[1:]
    assert [v.name for v in supported_variants("x86_64", "")] == ["plain"]
    assert [v.name for v in supported_variants("aarch64", "Features : asimd\n")] == ["neon"]
    assert supported_variants("riscv64", "") == ()
    assert {variant.machine for variant in VARIANTS} == {"x86_64", "aarch64"}
