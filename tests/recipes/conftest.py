"""Lets the tests of recipes import what they share; operations run at once."""

import sys
from pathlib import Path

import pytest

from ms_zero import _compat

sys.path.insert(0, str(Path(__file__).resolve().parent))


@pytest.fixture(scope="session", autouse=True)
def blocking():
    _compat.launch_blocking()
