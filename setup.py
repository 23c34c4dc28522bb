"""Build configuration. Presets and native sources travel inside the package as ``ms_zero/_resources``."""

import re
import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
RESOURCES = ("configs", "ops")


def version() -> str:
    """The version that ``ms_zero/__init__.py`` states."""
    text = (ROOT / "ms_zero" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert found is not None, "ms_zero/__init__.py states no version"
    return found.group(1)


class BuildWithResources(build_py):
    """Copies configs/ and ops/ into the built package; an editable install finds them in the source tree."""

    def run(self) -> None:
        """Build the modules, then add the resources."""
        super().run()
        if getattr(self, "editable_mode", False):
            return
        for source, target in self.resource_files():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """All files that this command makes."""
        outputs = super().get_outputs(include_bytecode)
        if getattr(self, "editable_mode", False):
            return outputs
        return outputs + [str(target) for _, target in self.resource_files()]

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


setup(
    name="ms_zero",
    version=version(),
    description="A MindSpore-native, Ascend-first toolkit for training large models",
    license="Apache-2.0",
    packages=find_packages(include=["ms_zero", "ms_zero.*"]),
    cmdclass={"build_py": BuildWithResources},
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
