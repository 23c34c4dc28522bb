import dataclasses
import itertools

import mindspore as ms
import pytest

from ms_zero.errors import UserError
from ms_zero.precision.policy import Policy, policy


@pytest.mark.parametrize(
    ("chosen", "weights", "gradients", "optimizer"),
    [
        (policy("fp32"), 4, 4, 8),
        (policy("bf16"), 2, 4, 12),
        (policy("fp16"), 2, 4, 12),
        (Policy(param="bf16", compute="bf16", accumulate="bf16"), 2, 2, 12),
        (Policy(param="bf16", compute="bf16", accumulate="bf16", master="param"), 2, 2, 8),
        (Policy(compute="bf16"), 4, 4, 8),  # fp32 weights are their own master
    ],
)
def test_bytes_per_parameter(chosen, weights, gradients, optimizer):
    found = (chosen.weight_bytes, chosen.gradient_bytes, chosen.optimizer_bytes)
    assert found == (weights, gradients, optimizer)


def test_presets_differ_in_param_and_compute_only():
    for name in ("bf16", "fp16"):
        assert policy(name) == Policy(param=name, compute=name)
    assert policy("fp32") == Policy()
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy("fp32").param = "bf16"


def test_bf16_is_emulated_on_cpu_and_native_elsewhere():
    for target in ("CPU", "CPU-portable"):
        working = policy("bf16").working(target)
        assert (working.dtype, working.grid) == (ms.float32, "bf16")
    for target in ("GPU", "Ascend"):
        working = policy("bf16").working(target)
        assert (working.dtype, working.grid) == (ms.bfloat16, None)


@pytest.mark.parametrize(("name", "dtype"), [("fp32", ms.float32), ("fp16", ms.float16)])
def test_other_dtypes_are_native_everywhere(name, dtype):
    for target in ("CPU", "GPU", "Ascend"):
        working = policy(name).working(target)
        assert (working.dtype, working.grid) == (dtype, None)
        assert "no bf16 kernels" not in policy(name).describe(target)


def test_description_names_the_emulation_in_one_line():
    line = policy("bf16").describe("CPU")
    assert "\n" not in line
    assert "CPU has no bf16 kernels" in line
    assert "no bf16 kernels" not in policy("bf16").describe("Ascend")


def test_only_fp16_gradients_need_loss_scaling():
    assert policy("fp16").needs_loss_scaling
    assert Policy(reduce="fp16").needs_loss_scaling
    assert not policy("bf16").needs_loss_scaling
    assert not policy("fp32").needs_loss_scaling


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"param": "float16"}, "param is 'float16': expected one of 'fp32', 'bf16', 'fp16'"),
        ({"compute": None}, "compute is None"),
        ({"param": "bf16", "compute": "bf16", "master": "bf16"}, "master is 'bf16': expected one of "),
        ({"param": "bf16"}, "compute fp32 is wider than param bf16"),
        ({"param": "bf16", "compute": "fp16"}, "bf16 and fp16 in one policy"),
        ({"param": "bf16", "compute": "bf16", "reduce": "fp16"}, "bf16 and fp16 in one policy"),
        ({"compute": "bf16", "accumulate": "fp16"}, "bf16 and fp16 in one policy"),
    ],
)
def test_refused(values, message):
    with pytest.raises(UserError) as error:
        Policy(**values)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_every_combination_is_accepted_or_refused_by_one_of_the_two_rules():
    names = ("fp32", "bf16", "fp16")
    for param, compute, reduce, accumulate in itertools.product(names, repeat=4):
        halves = {param, compute, reduce, accumulate} - {"fp32"}
        valid = param in ("fp32", compute) and len(halves) <= 1
        try:
            Policy(param, compute, reduce, accumulate)
            accepted = True
        except UserError:
            accepted = False
        assert accepted is valid, (param, compute, reduce, accumulate)


def test_unknown_preset():
    with pytest.raises(UserError, match=r"unknown policy 'fp8': expected one of fp32, bf16, fp16"):
        policy("fp8")
