"""The project's AscendC kernels as operators of MindSpore on Ascend (PyNative and graph mode).

Cells over ``ops.Custom`` of type aot, which calls the interface that CANN generates (``aclnnFusedAdamW`` and
so on); make them once, with Ascend as device target. ``ops/README.md`` is the contract,
``ops/build_ascend.sh`` the build. Checked without a device: the kernels on emulated cores, the arguments of
these calls, the front end of graph mode. Device compile, calls and speed are unverified.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
from mindspore import Tensor, nn, ops
from mindspore.ops import CustomRegOp, DataType

from ms_zero.errors import UserError
from ms_zero.native.libraries import installed_folder

VENDOR = "ms_zero"
PARTIAL_ROWS, PARTIAL_ITEMS = 64, 8
"""Shape of the partial sums of GradStats: a row a core, 32 bytes apart."""
_PATH_VARIABLE = "ASCEND_CUSTOM_OPP_PATH"


def built_package() -> Path | None:
    """The package of operators that was built at install time, None when there is none."""
    folder = installed_folder() / "ascend" / "vendors" / VENDOR
    return folder if folder.is_dir() else None


def why_unusable() -> str | None:
    """Why the operators cannot be used in this process, in one line; None when CANN will find them."""
    places = [Path(place) for place in os.environ.get(_PATH_VARIABLE, "").split(":") if place]
    if any(place.name == VENDOR and place.is_dir() for place in places):
        return None
    package = built_package()
    if package is None:
        return "the AscendC operators were not built: install CANN, then `bash ops/build_ascend.sh TARGET`"
    script = package / "bin" / "set_env.bash"
    return f"{_PATH_VARIABLE} does not name {package}: source {script} before the start"


def require_package() -> None:
    """Raise UserError when the operators cannot be used in this process."""
    reason = why_unusable()
    if reason is not None:
        raise UserError(f"kernels: {reason}")


# What a tensor may be, in the order of the combinations that the operators are built for.
_FLOAT, _HALF, _BF16 = DataType.F32_Default, DataType.F16_Default, DataType.BF16_Default
_GRADS = (_FLOAT, _HALF, _BF16)
_LOWS = (_HALF, _BF16)


def _register(
    name: str, inputs: Sequence[str], output: str, combinations: Sequence[tuple[object, ...]]
) -> dict[str, object]:
    """Registration of an operator; each combination has a dtype for every input and for the output.

    An output that is an input appears once in the generated interface, as that input. MindSpore counts the
    arguments: such outputs must not be declared here.
    """
    registration = CustomRegOp(f"aclnn{name}")
    for index, each in enumerate(inputs):
        registration = registration.input(index, each, "required")
    registration = registration.output(0, output, "required")
    for combination in combinations:
        registration = registration.dtype_format(*combination)
    return registration.target("Ascend").get_op_info()


_ADAMW_INPUTS = ("param", "exp_avg", "exp_avg_sq", "grad", "scalars")


def _adamw_registration(low_precision: bool) -> dict[str, object]:
    if not low_precision:
        combinations = [(_FLOAT, _FLOAT, _FLOAT, grad, _FLOAT, _FLOAT) for grad in _GRADS]
        return _register("FusedAdamWMaster", _ADAMW_INPUTS, "token", combinations)
    combinations = [(_FLOAT, _FLOAT, _FLOAT, grad, _FLOAT, low, _FLOAT) for low in _LOWS for grad in _GRADS]
    return _register("FusedAdamW", (*_ADAMW_INPUTS, "low_precision"), "token", combinations)


class FusedAdamW(nn.Cell):
    """One AdamW step in place on flat tensors of the NPU.

    Args:
        low_precision: whether calls pass a low-precision copy to write.

    Raises:
        UserError: the package of operators is missing.
    """

    def __init__(self, low_precision: bool) -> None:
        super().__init__()
        require_package()
        name = "aclnnFusedAdamW" if low_precision else "aclnnFusedAdamWMaster"
        self.update = ops.Custom(
            name, _token_shape, _token_dtype, func_type="aot", reg_info=_adamw_registration(low_precision)
        )
        # Without this the graph compiler may drop the call, or move it: it writes into its inputs.
        self.update.add_prim_attr("side_effect_mem", True)

    def construct(
        self, param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, scalars: Tensor, *low: Tensor
    ) -> Tensor:
        """Return a token, fp32 [1]: 1 after an update, 0 when `scalars` told to skip it.

        Args:
            param: fp32 [n], updated.
            exp_avg: fp32 [n], updated.
            exp_avg_sq: fp32 [n], updated.
            grad: fp32, fp16 or bf16 [n].
            scalars: fp32 [16], see :func:`ms_zero.kernels.reference.adamw_scalars`.
            low: nothing, or one fp16 or bf16 [n] that gets the rounded parameter.
        """
        return self.update(param, exp_avg, exp_avg_sq, grad, scalars, *low)


class SumOfSquares(nn.Cell):
    """Sum of squares of a flat tensor of the NPU; not finite when an element is not.

    Raises:
        UserError: the package of operators is missing.
    """

    def __init__(self) -> None:
        super().__init__()
        require_package()
        inputs = [(dtype, _FLOAT) for dtype in _GRADS]
        self.partials = ops.Custom(
            "aclnnGradStats",
            _partials_shape,
            _token_dtype,
            func_type="aot",
            reg_info=_register("GradStats", ("x",), "partials", inputs),
        )
        self.total = ops.Custom(
            "aclnnGradStatsTotal",
            _token_shape,
            _token_dtype,
            func_type="aot",
            reg_info=_register("GradStatsTotal", ("partials",), "total", [(_FLOAT, _FLOAT)]),
        )

    def construct(self, x: Tensor) -> Tensor:
        """Return the sum, fp32 0-d, for x fp32, fp16 or bf16 [n]."""
        return self.total(self.partials(x)).reshape(())


def _token_shape(*_: Sequence[int]) -> Sequence[int]:
    return (1,)


def _partials_shape(_: Sequence[int]) -> Sequence[int]:
    return PARTIAL_ROWS, PARTIAL_ITEMS


def _token_dtype(*_: ms.Type) -> ms.Type:
    return ms.float32
