import mindspore as ms
import pytest

from ms_zero import _compat


@pytest.fixture(scope="session", autouse=True)
def cpu():
    ms.set_device("CPU")
    _compat.launch_blocking()
