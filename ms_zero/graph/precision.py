"""16-bit computation in compiled graphs: parameters stay fp32 and are cast where they are used.

The parameters are the master weights, so that there is no second copy of them between steps, and gradients
leave backward in fp32. What computes in fp32 under every policy does so here too: see
`ms_zero.precision.autocast.keeps_fp32`.
"""

import mindspore as ms
from mindspore import nn

from ms_zero import kernels
from ms_zero.precision.autocast import keeps_fp32


def compute_in(model: nn.Cell, dtype: ms.Type, *, target: str) -> None:
    """Make a model compute in a dtype when it is compiled. For good: MindSpore marks the Cells.

    Args:
        model: of `ms_zero.models`, or any Cell.
        dtype: float16 or bfloat16; with float32 nothing is marked.
        target: on "CPU" attention stays fp32, as its softmax has no fp32 inside there.
    """
    if dtype == ms.float32:
        return
    model.to_float(dtype)
    for _, cell in model.cells_and_names():
        on_cpu = target == "CPU" and isinstance(cell, kernels.CausalAttention)
        if on_cpu or keeps_fp32(cell):
            cell.to_float(ms.float32)
