"""Makes the modules beside the tests importable (the command-line check uses them as well); builds once."""

import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    """A folder for compiled things; tests that need it are skipped where there is no g++."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return tmp_path_factory.mktemp("ascendc")


@pytest.fixture(scope="session")
def tiling(workshop):
    """The compiled tiling functions."""
    from tiling import TilingLibrary

    return TilingLibrary(workshop)


@pytest.fixture(scope="session")
def checker(workshop, tiling):
    """All kernels, compiled for all dtypes."""
    from cases import Checker
    from emulated import ADAM_VARIANTS, STATS_VARIANTS, TOTAL, Library, build_variants

    library = build_variants(workshop, "kernels", [*ADAM_VARIANTS, *STATS_VARIANTS, TOTAL])
    return Checker(Library(library), tiling)
