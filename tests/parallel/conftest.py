import pytest

from ms_zero import _compat


@pytest.fixture(scope="session", autouse=True)
def blocking():
    _compat.launch_blocking()
