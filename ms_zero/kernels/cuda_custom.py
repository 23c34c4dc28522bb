"""The project's CUDA kernels as operators of MindSpore (PyNative and graph mode).

Cells over ``ops.Custom`` of type aot, so the same object serves both modes; make them once.
``ops/README.md`` is the contract. The kernels were compiled for GPUs and inspected, and run compiled for the
host; no GPU has run them yet.
"""

from collections.abc import Sequence
from pathlib import Path

import mindspore as ms
from mindspore import Tensor, nn, ops

from ms_zero.errors import UserError
from ms_zero.native.cuda import find_cuda_library

_WORKSPACE = 1024
"""fp64 partial sums of the statistics: one for each thread block."""


def require_library() -> Path:
    """The CUDA library that was built at install time.

    Raises UserError when there is none.
    """
    library = find_cuda_library()
    if library is None:
        raise UserError(
            "kernels: the CUDA library was not built: expected nvcc at install time: "
            "install the CUDA toolkit, then `MS_ZERO_BUILD_CUDA=1 pip install .`"
        )
    return library


class FusedAdamW(nn.Cell):
    """One AdamW step in place on flat tensors of the GPU.

    Args:
        library: the compiled kernels; None for those of the installation.

    Raises:
        UserError: `library` is None and nothing was built.
    """

    def __init__(self, library: Path | None = None) -> None:
        super().__init__()
        self.update = ops.Custom(
            f"{library or require_library()}:FusedAdamWAot", (1,), ms.float32, func_type="aot"
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
    """Sum of squares of a flat tensor of the GPU; not finite when an element is not.

    Args:
        library: the compiled kernels; None for those of the installation.

    Raises:
        UserError: `library` is None and nothing was built.
    """

    def __init__(self, library: Path | None = None) -> None:
        super().__init__()
        self.sum = ops.Custom(
            f"{library or require_library()}:SumOfSquaresAot",
            _statistics_shapes,
            _statistics_dtypes,
            func_type="aot",
        )

    def construct(self, x: Tensor) -> Tensor:
        """Return the sum, fp32 0-d, for x fp32, fp16 or bf16 [n]."""
        return self.sum(x)[0].reshape(())


def _statistics_shapes(_: Sequence[int]) -> tuple[Sequence[int], ...]:
    return (1,), (_WORKSPACE,)


def _statistics_dtypes(_: ms.Type) -> tuple[ms.Type, ...]:
    return ms.float32, ms.float64
