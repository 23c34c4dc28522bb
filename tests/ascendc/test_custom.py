"""The AscendC operators in MindSpore, as far as that can be seen without a device."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from mindspore import Tensor, ops
from mindspore.ops.operations._custom_ops_utils import CustomCodeGenerator

from ms_zero.errors import UserError
from ms_zero.kernels import ascend_custom

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of operators that CANN would find."""
    folder = tmp_path / "vendors" / "ms_zero"
    folder.mkdir(parents=True)
    monkeypatch.setenv("ASCEND_CUSTOM_OPP_PATH", f"/elsewhere:{folder}")
    return folder


@pytest.fixture
def made(package, monkeypatch):
    """What was asked of ops.Custom; such an operator answers with a tensor of the inferred shape."""
    made = []

    class Custom:
        def __init__(self, func, out_shape, out_dtype, func_type, reg_info):
            self.func, self.func_type, self.reg_info = func, func_type, reg_info
            self.out_shape, self.out_dtype, self.attributes, self.calls = out_shape, out_dtype, {}, []
            made.append(self)

        def add_prim_attr(self, name, value):
            self.attributes[name] = value

        def __call__(self, *arguments):
            self.calls.append(arguments)
            shape = self.out_shape(*[each.shape for each in arguments])
            return Tensor(np.zeros(shape, np.float32), self.out_dtype(*[each.dtype for each in arguments]))

    monkeypatch.setattr(ops, "Custom", Custom)
    return made


def dtypes(operator):
    return [[dtype for dtype, _ in combination] for combination in operator.reg_info["dtype_format"]]


def flat(n, dtype=np.float32):
    return Tensor(np.zeros(n, dtype))


@pytest.mark.parametrize("low", [False, True])
def test_update_calls_the_generated_interface(made, low):
    update = ascend_custom.FusedAdamW(low)
    arguments = [
        flat(7),
        flat(7),
        flat(7),
        flat(7, np.float16),
        flat(16),
        *([flat(7, np.float16)] if low else []),
    ]
    token = update(*arguments)
    (operator,) = made
    assert token.shape == (1,)
    assert operator.func == "aclnnFusedAdamW" + ("" if low else "Master")
    assert operator.func_type == "aot"
    assert operator.attributes == {"side_effect_mem": True}
    assert [a is b for a, b in zip(operator.calls[0], arguments)] == [True] * len(arguments)
    names = ["param", "exp_avg", "exp_avg_sq", "grad", "scalars", *(["low_precision"] if low else [])]
    assert [each["name"] for each in operator.reg_info["inputs"]] == names
    assert [each["name"] for each in operator.reg_info["outputs"]] == ["token"]
    assert len(dtypes(operator)) == (6 if low else 3)
    for combination in dtypes(operator):
        assert combination[:3] == ["float32"] * 3
        assert combination[4] == combination[-1] == "float32"
    assert {combination[3] for combination in dtypes(operator)} == {"float32", "float16", "bfloat16"}


def test_statistics_are_two_launches(made):
    result = ascend_custom.SumOfSquares()(flat(100))
    partials, total = made
    assert (partials.func, total.func) == ("aclnnGradStats", "aclnnGradStatsTotal")
    assert total.calls[0][0].shape == (64, 8)
    assert result.shape == ()


@pytest.mark.parametrize("low", [False, True])
def test_mindspores_generator_agrees_on_the_number_of_arguments(made, low):
    ascend_custom.FusedAdamW(low)
    (operator,) = made
    # Inputs, those that are updated among them; the token; workspace size and executor.
    types = ["aclTensor*"] * (7 if low else 6) + ["uint64_t*", "aclOpExecutor**"]
    code = CustomCodeGenerator().generate_callback_by_types(operator.func, operator.reg_info, types)
    assert f"int {operator.func}GetWorkSpaceSize" in code


def test_a_missing_package_is_one_line(monkeypatch, tmp_path):
    monkeypatch.delenv("ASCEND_CUSTOM_OPP_PATH", raising=False)
    monkeypatch.setattr(ascend_custom, "installed_folder", lambda: tmp_path)
    for make in (lambda: ascend_custom.FusedAdamW(True), ascend_custom.SumOfSquares):
        with pytest.raises(UserError, match="were not built") as caught:
            make()
        assert "\n" not in str(caught.value)
    (tmp_path / "ascend" / "vendors" / "ms_zero").mkdir(parents=True)
    assert "set_env.bash" in ascend_custom.why_unusable()


def test_a_package_in_the_path_is_usable(package):
    assert ascend_custom.why_unusable() is None


def test_graph_mode_compiles_for_ascend(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "GLOG_v": "3"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "front_end.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {each["name"]: each for each in map(json.loads, done.stdout.splitlines())}
    assert set(found) == {
        f"aclnn{name}" for name in ("FusedAdamW", "FusedAdamWMaster", "GradStats", "GradStatsTotal")
    }
    for name, references in (("aclnnFusedAdamW", 4), ("aclnnFusedAdamWMaster", 3)):
        assert found[name]["side_effect"]
        assert (
            found[name]["types"].count("<Ref[Tensor") == references
        )  # the parameters themselves, not copies
        assert found[name]["types"].endswith("-> (<Tensor[Float32], (1)>)")
    # The second update waits for the first: both write the same parameters.
    assert found["aclnnFusedAdamWMaster"]["operands"][-1] != found["aclnnFusedAdamW"]["operands"][-1]
    assert found["aclnnGradStats"]["types"].endswith("-> (<Tensor[Float32], (64, 8)>)")
