"""What all tests share: operations run at once, in the order in which they are called."""

import sys

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_finish():
    _launch_blocking()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    _launch_blocking()


def _launch_blocking():
    """Tell MindSpore before its first operation, once anything has imported it.

    MindSpore 2.10.0 looks at this setting once a process, when it runs the first operation. A fixture of one
    folder comes too late when a test of another has run one before. Tests without MindSpore stay without.
    """
    if "mindspore" in sys.modules:
        from ms_zero import _compat

        _compat.launch_blocking()
