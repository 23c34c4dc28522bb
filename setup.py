"""Build configuration. Presets and native sources travel inside the package as ``ms_zero/_resources``.

Native libraries are built as well, each where its compiler is found. For each an environment variable is
``auto`` (the default), ``0`` (leave it out) or ``1`` (fail when it cannot be built):

- ``MS_ZERO_BUILD_CPU``: the C++ library, one for each instruction set of this machine; needs a C++ compiler.
  What was not built at install time is built at first use, into the user's cache;
- ``MS_ZERO_BUILD_CUDA``: the CUDA library; needs nvcc;
- ``MS_ZERO_BUILD_ASCEND``: the package of AscendC operators; needs CANN, with ASCEND_HOME_PATH set.
"""

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70.1
    from wheel.bdist_wheel import bdist_wheel

ROOT = Path(__file__).resolve().parent
RESOURCES = ("configs", "ops")
NATIVE = Path("build") / "native"

sys.path.insert(0, str(ROOT))

from ms_zero.errors import UserError  # noqa: E402
from ms_zero.native import build as cpu  # noqa: E402
from ms_zero.native import cuda  # noqa: E402
from ms_zero.native.sources import VARIANTS  # noqa: E402


def version() -> str:
    """The version that ``ms_zero/__init__.py`` states."""
    text = (ROOT / "ms_zero" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None, "ms_zero/__init__.py states no version"
    return found.group(1)


def switch(name: str) -> str:
    """``auto``, ``0`` or ``1``."""
    value = os.environ.get(name, "auto")
    if value not in ("auto", "0", "1"):
        raise SystemExit(f"setup.py: {name}={value}: expected auto, 0 or 1")
    return value


def build_cpu(target: Path) -> None:
    """One library for each instruction set of this kind of machine."""
    variants = [variant for variant in VARIANTS if variant.machine == platform.machine()]
    if not variants:
        raise UserError(f"no CPU kernels for {platform.machine()}: expected x86_64 or aarch64")
    for variant in variants:
        cpu.build_library(ROOT / "ops", variant, target)


def build_cuda(target: Path) -> None:
    """The CUDA library."""
    cuda.build_cuda_library(ROOT / "ops", target)


def build_ascend(target: Path) -> None:
    """The package of AscendC operators, by the script that also serves by hand."""
    if not os.environ.get("ASCEND_HOME_PATH"):
        raise UserError("ASCEND_HOME_PATH is not set: source the set_env.sh of CANN")
    script = str(ROOT / "ops" / "build_ascend.sh")
    # MindSpore's compiler is looked for where this Python is installed.
    cpu.run_tool(["bash", script, str(target / "ascend")], PYTHON=sys.executable)


def build_native(target: Path) -> None:
    """Build what is asked for and, where that is left open, what can be built; says what could not."""
    has_cuda = bool(cuda.find_nvcc() and cuda.cuda_sources(ROOT / "ops"))
    has_cann = bool(os.environ.get("ASCEND_HOME_PATH"))
    parts: tuple[tuple[str, bool, Callable[[Path], None]], ...] = (
        ("CPU", True, build_cpu),
        ("CUDA", has_cuda, build_cuda),
        ("ASCEND", has_cann, build_ascend),
    )
    for name, possible, build in parts:
        wanted = switch(f"MS_ZERO_BUILD_{name}")
        if wanted == "0" or (wanted == "auto" and not possible):
            continue
        try:
            build(target)
        except UserError as error:
            if wanted == "1":
                raise SystemExit(f"setup.py: MS_ZERO_BUILD_{name}=1, but {error}") from None
            sys.stderr.write(f"ms_zero: kernels for {name} are not built: {error}\n")


class BuildWithResources(build_py):
    """Copies configs/ and ops/ into the built package and builds native libraries.

    An editable install finds the first two in the source tree, and the libraries in its folder ``build``.
    """

    def run(self) -> None:
        """Build the modules, then add the resources and the libraries."""
        super().run()
        if getattr(self, "editable_mode", False):
            build_native(ROOT / NATIVE)
            return
        for source, target in self.resource_files():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        shutil.rmtree(self.native_folder(), ignore_errors=True)  # libraries of earlier sources
        build_native(self.native_folder())

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """All files that this command makes."""
        outputs = super().get_outputs(include_bytecode)
        if getattr(self, "editable_mode", False):
            return outputs
        added = [target for _, target in self.resource_files()]
        added += [path for path in self.native_folder().rglob("*") if path.is_file()]
        return outputs + [str(path) for path in added]

    def native_folder(self) -> Path:
        """Where the libraries of the built package are."""
        return Path(self.build_lib) / "ms_zero" / "_resources" / NATIVE

    def resource_files(self) -> list[tuple[Path, Path]]:
        """Source and target of each resource; hidden files and build products are left out."""
        target_root = Path(self.build_lib) / "ms_zero" / "_resources"
        pairs = []
        for name in RESOURCES:
            for path in sorted((ROOT / name).rglob("*")):
                inside = path.relative_to(ROOT)
                built = any(part in ("__pycache__", "build") or part.startswith(".") for part in inside.parts)
                if path.is_file() and not built and path.suffix not in (".so", ".o", ".pyc"):
                    pairs.append((path, target_root / inside))
        return pairs


class WheelOfThisMachine(bdist_wheel):
    """With native libraries inside, a wheel is for one operating system and processor, and for any Python."""

    def get_tag(self) -> tuple[str, str, str]:
        """(Python, ABI, platform) in the name of the wheel."""
        native = Path(self.bdist_dir).rglob("libms_zero_*.so")
        if next(native, None) is None:
            return super().get_tag()
        return "py3", "none", f"linux_{platform.machine()}"


setup(
    name="ms_zero",
    version=version(),
    description="A MindSpore-native, Ascend-first toolkit for training large models",
    license="Apache-2.0",
    packages=find_packages(include=["ms_zero", "ms_zero.*"]),
    cmdclass={"build_py": BuildWithResources, "bdist_wheel": WheelOfThisMachine},
    # mindspore 2.10.0 has wheels for these Pythons (and 3.9, which is too old for this code).
    python_requires=">=3.10,<3.13",
    install_requires=[
        "mindspore==2.10.0",
        "numpy>=1.26,<2",
        "pyyaml>=6.0",
    ],
    extras_require={
        "tokenizers": ["tokenizers>=0.20"],
        "test": [
            "psutil",
            "pytest>=8",
            "ruff>=0.8",
            "safetensors>=0.4",
            "setuptools>=64",
            "tokenizers>=0.20",
            "wheel",
        ],
    },
    entry_points={"console_scripts": ["ms-zero = ms_zero.cli.main:main"]},
)
