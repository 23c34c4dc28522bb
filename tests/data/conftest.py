import importlib.util
from pathlib import Path

import pytest


def _helper(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def pairs():
    """The helpers of indexed_files.py."""
    return _helper("indexed_files")
