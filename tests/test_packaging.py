"""The wheel: what is in it, what it says about itself, and that presets are found from it alone."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import ms_zero
from ms_zero.native.sources import VARIANTS

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD_PRODUCTS = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")
WITHOUT_LIBRARIES = {f"MS_ZERO_BUILD_{name}": "0" for name in ("CPU", "CUDA", "ASCEND")}


def copy_sources(target):
    target.mkdir()
    for name in ("ms_zero", "configs", "ops"):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, target / name, ignore=BUILD_PRODUCTS)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "README.zh-CN.md"):
        shutil.copy(REPOSITORY / name, target / name)
    native = target / "ops" / "probe" / "cpu"
    native.mkdir(parents=True)
    (native / "probe.cc").write_text("// source\n")
    (native / "probe.so").write_bytes(b"binary")


def run(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with an sdist and a wheel, both built from a copy of the sources without network access."""
    source = tmp_path_factory.mktemp("build") / "a source tree"
    copy_sources(source)
    environment = {**os.environ, **WITHOUT_LIBRARIES}
    run([sys.executable, "setup.py", "-q", "sdist", "bdist_wheel"], cwd=source, env=environment)
    return source / "dist"


@pytest.fixture
def small_source(tmp_path):
    """A source tree with one small native operator, to build libraries from."""
    source = tmp_path / "small"
    copy_sources(source)
    for path in [*(source / "ops").glob("*/cpu/*.cc"), *(source / "ops").glob("*/cuda/*.cu")]:
        if path.parent.parent.name != "fused_sgd":
            path.unlink()
    return source


@pytest.fixture(scope="module")
def wheel(built):
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def sdist(built):
    (path,) = built.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel_of_sdist(sdist, tmp_path_factory):
    """The wheel that pip makes of the sdist, without isolation and without an index."""
    target = tmp_path_factory.mktemp("wheel of sdist")
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "wheel", "-q", *options, "-w", str(target), str(sdist)]
    run(command, env={**os.environ, **WITHOUT_LIBRARIES})
    (path,) = target.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel_of_sdist, tmp_path_factory):
    """The `bin` folder of a fresh environment with the wheel; all other packages are those of this one."""
    environment = tmp_path_factory.mktemp("fresh") / "environment"
    run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    run([*pip, "--no-deps", "--no-index", "--disable-pip-version-check", str(wheel_of_sdist)])
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")  # behind the site's own packages
    return environment / "bin"


def test_wheel_holds_every_module_preset_and_native_source(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "ms_zero").rglob("*.py")}
    files = (REPOSITORY / "configs").rglob("*.yaml")
    presets = {f"ms_zero/_resources/{path.relative_to(REPOSITORY)}" for path in files}
    assert modules and modules <= packed
    assert presets and presets <= packed
    assert "ms_zero/_resources/ops/probe/cpu/probe.cc" in packed
    assert not [name for name in packed if name.endswith((".so", ".pyc")) or name.startswith("tests")]


def build_wheel(source, **environment):
    """(status, errors, names of wheels) of a build of wheels in a source tree."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"],
        cwd=source,
        env={**os.environ, **WITHOUT_LIBRARIES, **environment},
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stderr, sorted((source / "dist").glob("*.whl"))


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_wheel_with_the_library_needs_no_compiler_and_says_for_which_machine_it_is(small_source, tmp_path):
    status, errors, (wheel,) = build_wheel(small_source, MS_ZERO_BUILD_CPU="1")
    assert status == 0, errors
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    names = sorted(path.name.split("-")[1] for path in site.rglob("*.so"))
    assert names == sorted(each.name for each in VARIANTS if each.machine == platform.machine())
    code = "from ms_zero import native; print(native.ensure_built().origin, native.load_library()._name)"
    environment = {"PATH": "/nowhere", "HOME": str(tmp_path), "PYTHONPATH": str(site)}
    shown = run([sys.executable, "-c", code], cwd=tmp_path, env=environment).split()
    assert shown[0] == "package" and shown[1].startswith(str(site))


def test_an_install_without_compilers_passes_and_says_what_it_lacks(small_source):
    tools = {"PATH": "/nowhere", "MS_ZERO_BUILD_CPU": "auto"}
    status, errors, (wheel,) = build_wheel(small_source, **tools)
    assert status == 0, errors
    assert "kernels for CPU are not built: no C++ compiler" in errors
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"MS_ZERO_BUILD_CPU": "1", "PATH": "/nowhere"}, "MS_ZERO_BUILD_CPU=1, but no C++ compiler"),
        ({"MS_ZERO_BUILD_ASCEND": "1", "ASCEND_HOME_PATH": ""}, "=1, but ASCEND_HOME_PATH is not set"),
        (
            {"MS_ZERO_BUILD_ASCEND": "1", "ASCEND_HOME_PATH": "/nowhere"},
            "build_ascend.sh: error: ASCEND_HOME_PATH=/nowhere is no folder",
        ),
        ({"MS_ZERO_BUILD_CUDA": "yes"}, "MS_ZERO_BUILD_CUDA=yes: expected auto, 0 or 1"),
    ],
)
def test_what_is_asked_for_and_cannot_be_built_fails_the_install(small_source, environment, message):
    status, errors, wheels = build_wheel(small_source, **environment)
    assert status != 0 and wheels == []
    assert message in errors


def test_the_cuda_library_is_built_by_nvcc_and_found(small_source, tmp_path):
    """With a stand-in for nvcc that knows one of the architectures and writes down what it is asked for."""
    kernel = small_source / "ops" / "probe" / "cuda" / "probe.cu"
    kernel.parent.mkdir()
    kernel.write_text("// source\n")
    log, tools = tmp_path / "log", tmp_path / "bin"
    tools.mkdir()
    (tools / "nvcc").write_text(
        '#!/bin/sh\nif [ "$1" = --list-gpu-code ]; then echo sm_75; echo sm_80; exit; fi\n'
        f'echo "$*" > "{log}"\nfor last; do :; done\necho library > "$last"\n'
    )
    (tools / "nvcc").chmod(0o755)
    environment = {"PATH": f"{tools}:{os.environ['PATH']}", "MS_ZERO_BUILD_CUDA": "1"}
    status, errors, (wheel,) = build_wheel(small_source, **environment)
    assert status == 0, errors
    asked = log.read_text()
    assert "code=sm_80" in asked and "code=compute_80" in asked and "90" not in asked
    assert "probe/cuda/probe.cu" in asked and "-fmad=false" in asked
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "from ms_zero.native import cuda; print(cuda.find_cuda_library())"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    found = run([sys.executable, "-c", code], cwd=tmp_path, env=environment)
    assert Path(found.strip()).read_text() == "library\n"


def test_wheel_metadata_states_version_pins_and_entry_point(wheel):
    archive = zipfile.ZipFile(wheel)
    info = f"ms_zero-{ms_zero.__version__}.dist-info"
    metadata = archive.read(f"{info}/METADATA").decode()
    required = [re.sub(r"[ ()\"']", "", line) for line in re.findall("^Requires-Dist: (.*)$", metadata, re.M)]
    assert f"\nVersion: {ms_zero.__version__}\n" in metadata
    assert "mindspore==2.10.0" in required
    assert {"numpy<2,>=1.26", "numpy>=1.26,<2"} & set(required)
    python = re.search("^Requires-Python: (.*)$", metadata, re.M).group(1)
    assert set(python.replace(" ", "").split(",")) == {">=3.10", "<3.13"}
    assert "ms-zero = ms_zero.cli.main:main" in archive.read(f"{info}/entry_points.txt").decode()


def test_unpacked_wheel_finds_its_presets_far_from_the_source_tree(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import ms_zero, ms_zero.resources as r; print(ms_zero.__file__); print(r.config_dir());"
        "print(len(r.list_presets('runs')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    file, presets, count = done.stdout.splitlines()
    assert file.startswith(str(tmp_path)) and presets.startswith(str(tmp_path))
    assert int(count) == len(list((REPOSITORY / "configs" / "runs").glob("*.yaml"))) > 0


def test_sdist_holds_what_the_wheel_is_built_from(sdist):
    root = f"ms_zero-{ms_zero.__version__}/"
    with tarfile.open(sdist) as archive:
        packed = {name.removeprefix(root) for name in archive.getnames()}
    for folder, pattern in (("ms_zero", "*.py"), ("configs", "*.yaml")):
        files = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / folder).rglob(pattern)}
        assert files and files <= packed
    needed = {"setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE", "README.md", "ops/probe/cpu/probe.cc"}
    assert needed <= packed
    assert not [name for name in packed if name.endswith((".so", ".pyc"))]


def test_sdist_makes_the_same_wheel(wheel, wheel_of_sdist):
    names = [set(zipfile.ZipFile(path).namelist()) for path in (wheel, wheel_of_sdist)]
    assert names[0] == names[1]


def in_environment(installed, folder, *arguments, **options):
    """Run an installed ms-zero far from the source tree."""
    names = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    return run([str(installed / "ms-zero"), *arguments], cwd=folder, env=environment, **options)


def test_installed_commands_read_the_presets_of_the_wheel(installed, tmp_path):
    assert "valid for 1 worker" in in_environment(installed, tmp_path, "lint", "runs/quickstart")
    shown = in_environment(installed, tmp_path, "config", "show", "runs/quickstart", "--workers", "2")
    origins = set(re.findall(r"# (/\S+):\d+$", shown, re.MULTILINE))
    assert {Path(origin).name for origin in origins} == {"quickstart.yaml", "gpt-tiny.yaml"}
    assert all(origin.startswith(str(installed.parent)) for origin in origins)
    assert in_environment(installed, tmp_path, "explain", "MZ012").startswith("MZ012")


def test_installed_wheel_trains_on_two_workers_from_its_preset(installed, tmp_path):
    (tmp_path / "a.txt").write_text("To be, or not to be, that is the question. " * 200)
    (tmp_path / "b.txt").write_text("All the world's a stage, and all the men merely players. " * 100)
    overrides = """
        train.steps=2 train.global_batch_size=4 train.accumulation_steps=1 train.log_interval=1
        train.eval_interval=0 data.source=files data.files=[a.txt,b.txt] data.seq_len=32
        data.validation_fraction=0 model.num_layers=1 optim.warmup_steps=1 checkpoint.interval=0
    """
    command = ["launch", "runs/quickstart", "--workers", "2", *overrides.split()]
    shown = in_environment(installed, tmp_path, *command, timeout=200)
    assert re.search(r"^ *2/2 ", shown, re.MULTILINE), shown
    checkpoints = tmp_path / "runs" / "quickstart" / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["step-00000002"]
