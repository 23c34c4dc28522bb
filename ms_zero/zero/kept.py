"""Parameters that ZeRO leaves alone: those that the model itself writes in its forward, and what is no float.

Buckets hold floats that the optimizer writes or nobody does. The running statistics of a batch normalisation
are Parameters too, but the forward writes them, in place and on each rank its own; a view or a gathered copy
of a bucket would lose that. Counters, index tables and masks have a dtype that buckets do not keep.
"""

from collections.abc import Callable

import mindspore as ms
from mindspore import mint, nn

from ms_zero.errors import UserError

_FLOATS = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
_WITH_STATISTICS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    mint.nn.BatchNorm1d,
    mint.nn.BatchNorm2d,
    mint.nn.BatchNorm3d,
    mint.nn.SyncBatchNorm,
)


def kept_parameters(root: nn.Cell, also: Callable[[str], bool] | None = None) -> frozenset[str]:
    """Names of the parameters that stay as they are, whole on every rank.

    These are: parameters that are no floats, the running statistics of MindSpore's normalisations, and those
    whose name ``also`` matches (further parameters that the forward writes).

    Raises:
        UserError: one of them is trained.
    """
    statistics = {
        id(param)
        for _, cell in root.cells_and_names()
        if isinstance(cell, _WITH_STATISTICS)
        for param in cell.get_parameters()
        if not param.requires_grad
    }
    kept = set()
    for name, param in root.parameters_and_names():
        is_float = param.dtype in _FLOATS
        if is_float and id(param) not in statistics and not (also and also(name)):
            continue
        if param.requires_grad:
            reason = "keep= leaves it out" if is_float else f"its dtype is {param.dtype}"
            raise UserError(
                f"zero: parameter {name} cannot be trained, {reason}: create it with requires_grad=False"
            )
        kept.add(name)
    return frozenset(kept)
