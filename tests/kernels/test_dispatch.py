import pytest

from ms_zero import kernels
from ms_zero.errors import UserError
from ms_zero.kernels.dispatch import resolve_target, select


def test_the_current_device_is_the_default():
    assert resolve_target(None) == "CPU"
    assert resolve_target("Ascend") == "Ascend"


def test_unknown_target_is_refused():
    with pytest.raises(UserError, match=r"'NPU'.*CPU, GPU, Ascend"):
        kernels.GELU("NPU")


def test_missing_implementation_is_refused():
    with pytest.raises(UserError, match=r"Sinc has no implementation for GPU: available for Ascend, CPU"):
        select("Sinc", {"CPU": int, "Ascend": int}, "GPU")
