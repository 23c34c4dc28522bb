import pytest


@pytest.fixture(scope="session")
def blocking():
    """For the few tests here that run MindSpore; the others must not import it."""
    from ms_zero import _compat

    _compat.launch_blocking()
