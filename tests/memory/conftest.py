import mindspore as ms
import pytest

from ms_zero import _compat


@pytest.fixture(scope="session", autouse=True)
def cpu():
    if _compat.device_target() != "CPU":  # refused once an operation has run, as in tests of other folders
        ms.set_device("CPU")
    _compat.launch_blocking()
