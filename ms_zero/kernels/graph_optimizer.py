"""The project's own update and statistics operators as Cells, for graphs as well as for PyNative.

On CPU in PyNative :mod:`ms_zero.kernels.optimizer` is the cheaper way: a custom operator costs some 500 us.
"""

from collections.abc import Sequence

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_zero.errors import UserError
from ms_zero.kernels import ascend_custom, cuda_custom
from ms_zero.kernels.dispatch import select
from ms_zero.native import ensure_built


class _FusedAdamWCpu(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.update = _operator("FusedAdamWAot")
        # Without this the graph compiler may drop the call, or move it: it writes into its inputs.
        self.update.add_prim_attr("side_effect_mem", True)

    def construct(self, *tensors: Tensor) -> Tensor:
        return self.update(*tensors)


class _SumOfSquaresCpu(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.sum = _operator("SumOfSquaresAot")

    def construct(self, x: Tensor) -> Tensor:
        return self.sum(x).reshape(())


def _operator(function: str) -> ops.Custom:
    """An operator of the C++ library with one fp32 [1] output."""
    return ops.Custom(f"{ensure_built().path}:{function}", _one, ms.float32, func_type="aot")


def _one(*_: Sequence[int]) -> Sequence[int]:
    return (1,)


def _not_portable() -> nn.Cell:
    raise UserError("kernels: the operators of a graph are native: use hardware.kernels=native")


def require_built(target: str) -> None:
    """Raise UserError when this project's kernels for "GPU-custom" or "Ascend-custom" are missing."""
    {"GPU-custom": cuda_custom.require_library, "Ascend-custom": ascend_custom.require_package}[target]()


class FusedAdamW(nn.Cell):
    """One AdamW step in place; see FusedAdamW in ``ops/README.md``.

    A learning rate or a step that changes is a value in `scalars`: nothing is compiled again.

    Args:
        low_precision: whether calls pass a low-precision copy to write.
        target: "CPU", "GPU-custom" or "Ascend-custom"; see :mod:`ms_zero.kernels.dispatch`.

    Raises:
        UserError: there is no own kernel for the target, or it is not built.
    """

    def __init__(self, low_precision: bool = False, target: str | None = None) -> None:
        super().__init__()
        implementations = {
            "CPU": _FusedAdamWCpu,
            "CPU-portable": _not_portable,
            "GPU-custom": cuda_custom.FusedAdamW,
            "Ascend-custom": lambda: ascend_custom.FusedAdamW(low_precision),
        }
        self.fused_adam_w = select("FusedAdamW", implementations, target)()

    def construct(
        self, param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, scalars: Tensor, *low: Tensor
    ) -> Tensor:
        """Return a token, fp32 [1]: 1 after an update, 0 when `scalars` told to skip it.

        Args:
            param: fp32 [n], updated; in a graph a Parameter, like everything that is updated.
            exp_avg: fp32 [n], updated.
            exp_avg_sq: fp32 [n], updated.
            grad: fp32, fp16 or bf16 [n].
            scalars: fp32 [16], see :func:`ms_zero.kernels.reference.adamw_scalars`.
            low: nothing, or one fp16 or bf16 [n] that gets the rounded parameter.
        """
        return self.fused_adam_w(param, exp_avg, exp_avg_sq, grad, scalars, *low)


class SumOfSquares(nn.Cell):
    """Sum of squares of a flat tensor, not finite when an element is not; see GradStats in ``ops/README.md``.

    Args:
        target: "CPU", "GPU-custom" or "Ascend-custom".

    Raises:
        UserError: there is no own kernel for the target, or it is not built.
    """

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        implementations = {
            "CPU": _SumOfSquaresCpu,
            "CPU-portable": _not_portable,
            "GPU-custom": cuda_custom.SumOfSquares,
            "Ascend-custom": ascend_custom.SumOfSquares,
        }
        self.sum_of_squares = select("SumOfSquares", implementations, target)()

    def construct(self, x: Tensor) -> Tensor:
        """Return the sum, fp32 0-d, for x fp32, fp16 or bf16 [n]."""
        return self.sum_of_squares(x)
