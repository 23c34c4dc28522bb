"""The wheel: what is in it, what it says about itself, and that presets are found from it alone."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ms_zero

REPOSITORY = Path(__file__).resolve().parent.parent
BUILD_PRODUCTS = shutil.ignore_patterns("__pycache__", "*.egg-info", "build", "dist")


def copy_sources(target):
    target.mkdir()
    for name in ("ms_zero", "configs", "ops"):
        if (REPOSITORY / name).is_dir():
            shutil.copytree(REPOSITORY / name, target / name, ignore=BUILD_PRODUCTS)
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "LICENSE"):
        shutil.copy(REPOSITORY / name, target / name)
    native = target / "ops" / "probe" / "cpu"
    native.mkdir(parents=True)
    (native / "probe.cc").write_text("// source\n")
    (native / "probe.so").write_bytes(b"binary")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the sources, without network access."""
    source = tmp_path_factory.mktemp("build") / "a source tree"
    copy_sources(source)
    command = [sys.executable, "setup.py", "-q", "bdist_wheel"]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (path,) = (source / "dist").glob("*.whl")
    return path


def test_wheel_holds_every_module_preset_and_native_source(wheel):
    packed = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / "ms_zero").rglob("*.py")}
    files = (REPOSITORY / "configs").rglob("*.yaml")
    presets = {f"ms_zero/_resources/{path.relative_to(REPOSITORY)}" for path in files}
    assert modules and modules <= packed
    assert presets and presets <= packed
    assert "ms_zero/_resources/ops/probe/cpu/probe.cc" in packed
    assert not [name for name in packed if name.endswith((".so", ".pyc")) or name.startswith("tests")]


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
