import pytest

from ms_zero import kernels
from ms_zero.errors import UserError
from ms_zero.kernels.dispatch import default_target, resolve_target, select


def test_the_current_device_is_the_default():
    assert resolve_target(None) == "CPU"
    assert resolve_target("Ascend") == "Ascend"


def test_unknown_target_is_refused():
    with pytest.raises(UserError, match=r"'NPU'.*CPU, CPU-portable, GPU"):
        kernels.GELU("NPU")


def test_missing_implementation_is_refused():
    with pytest.raises(UserError, match=r"Sinc has no implementation for GPU: available for Ascend, CPU"):
        select("Sinc", {"CPU": int, "Ascend": int}, "GPU")


def test_the_portable_form_is_the_only_one_of_a_kernel_without_native_code():
    assert select("Sinc", {"CPU": int}, "CPU-portable") is int
    assert select("Sinc", {"CPU": int, "CPU-portable": float}, "CPU-portable") is float
    assert select("Sinc", {"CPU": int, "CPU-portable": float}, "CPU") is int


def test_a_custom_kernel_that_is_missing_is_no_reason_to_take_another():
    with pytest.raises(UserError, match="no implementation for Ascend-custom: available for Ascend"):
        select("Sinc", {"Ascend": int}, "Ascend-custom")


def test_a_run_on_custom_kernels_takes_those_that_exist_and_the_usual_ones_elsewhere():
    with default_target("Ascend-custom"):
        assert select("Sinc", {"Ascend": int, "Ascend-custom": float}, None) is float
        assert select("Sinc", {"Ascend": int}, None) is int
        with pytest.raises(UserError, match="no implementation for Ascend: available for CPU"):
            select("Sinc", {"CPU": int}, None)
