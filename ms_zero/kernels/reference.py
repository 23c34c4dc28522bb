"""The fused updates and the gradient statistics in numpy, to the last bit as ``ops/README.md`` states them.

This is what native kernels are compared with, and the implementation for machines that cannot build them.
Arrays are flat: fp32, fp16, or bf16 as its bits in uint16. NaN and inf are followed without warnings.
"""

import math
from collections.abc import Iterator

import numpy as np

NUM_SCALARS = 16
FOUND_INF = 9
"""Position of `found_inf` in the scalars of both updates."""

# Elements worked on at once: the arrays of one block stay in a core's cache.
_BLOCK = 1 << 15
# Sums of squares: elements of a block that has running sums of its own, and how many of these there are.
_SUM_BLOCK = 1 << 15
_LANES = 16

_IGNORED = {"over": "ignore", "invalid": "ignore", "divide": "ignore", "under": "ignore"}


def adamw_scalars(
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    found_inf: float = 0.0,
) -> np.ndarray:
    """The scalar tensor of a fused AdamW step, fp32 [16]; `step` counts from 1."""
    assert step >= 1, step
    beta1, beta2 = float(np.float32(beta1)), float(np.float32(beta2))
    values = (
        1.0 - lr * weight_decay,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        1.0 / math.sqrt(1.0 - beta2**step),
        eps,
        lr / (1.0 - beta1**step),
        grad_scale,
        found_inf,
    )
    return _padded(values)


def sgd_scalars(*, lr: float, weight_decay: float, grad_scale: float, found_inf: float = 0.0) -> np.ndarray:
    """The scalar tensor of a step of gradient descent, fp32 [16]."""
    head = (1.0 - lr * weight_decay, lr * grad_scale)
    return _padded((*head, *[0.0] * (FOUND_INF - len(head)), found_inf))


def _padded(values: tuple[float, ...]) -> np.ndarray:
    with np.errstate(**_IGNORED):
        return np.array((*values, *[0.0] * (NUM_SCALARS - len(values))), np.float64).astype(np.float32)


def adamw(
    param: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    grad: np.ndarray,
    low_precision: np.ndarray | None,
    scalars: np.ndarray,
) -> None:
    """One AdamW step in place on fp32 arrays [n]; see FusedAdamW in ``ops/README.md``."""
    if scalars[FOUND_INF] != 0:
        return
    scratch_block, update_block = np.empty((2, _BLOCK), np.float32)
    with np.errstate(**_IGNORED):
        for p, m, v, g, low in _blocks(param, exp_avg, exp_avg_sq, grad, low_precision):
            _adamw_block(p, m, v, widen(g), scalars, scratch_block[: p.size], update_block[: p.size])
            if low is not None:
                low[...] = narrow(p, low.dtype)


def _adamw_block(
    p: np.ndarray,
    m: np.ndarray,
    v: np.ndarray,
    g: np.ndarray,
    scalars: np.ndarray,
    scratch: np.ndarray,
    update: np.ndarray,
) -> None:
    keep, beta1, one_minus_beta1, beta2, one_minus_beta2, inverse_root, eps, step_size, scale = scalars[:9]
    g = np.multiply(g, scale, out=update)
    m *= beta1
    m += np.multiply(g, one_minus_beta1, out=scratch)
    v *= beta2
    np.multiply(g, g, out=scratch)
    v += np.multiply(scratch, one_minus_beta2, out=scratch)
    np.sqrt(v, out=scratch)
    scratch *= inverse_root
    scratch += eps
    np.divide(m, scratch, out=update)
    p *= keep
    p -= np.multiply(update, step_size, out=update)


def sgd(param: np.ndarray, grad: np.ndarray, low_precision: np.ndarray | None, scalars: np.ndarray) -> None:
    """One step of gradient descent in place on fp32 [n]; see FusedSGD in ``ops/README.md``."""
    if scalars[FOUND_INF] != 0:
        return
    with np.errstate(**_IGNORED):
        for p, g, low in _blocks(param, grad, low_precision):
            p *= scalars[0]
            p -= widen(g) * scalars[1]
            if low is not None:
                low[...] = narrow(p, low.dtype)


def sum_of_squares(values: np.ndarray) -> np.float32:
    """The sum of the squares of a flat array as fp32, see GradStats in ``ops/README.md``."""
    with np.errstate(**_IGNORED):
        return np.float32(sum_of_squares_fp64(values))


def sum_of_squares_fp64(values: np.ndarray) -> np.float64:
    """The same before its rounding to fp32."""
    total = np.float64(0.0)
    with np.errstate(**_IGNORED):
        for (block,) in _blocks(values, size=_SUM_BLOCK):
            total += _block_sum(widen(block))
    return total


def _block_sum(block: np.ndarray) -> np.float64:
    """Element i is added to lane i mod 16 in ascending order, the lanes as a tree."""
    rows = np.zeros((-(-block.size // _LANES), _LANES))
    rows.reshape(-1)[: block.size] = block
    rows *= rows
    lanes = np.add.reduce(rows, axis=0)
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return lanes[0]


def widen(values: np.ndarray) -> np.ndarray:
    """The fp32 values of fp32, fp16, or bf16 bits in uint16; exact. An fp32 array is returned itself."""
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32, copy=False)


def narrow(values: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """fp32 values as fp16, or as bf16 bits in uint16, rounded to nearest even; NaN stays NaN."""
    if dtype != np.uint16:
        with np.errstate(**_IGNORED):  # beyond the range is inf by contract
            return values.astype(dtype)
    bits = values.view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = ((bits + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)
    quiet = ((bits >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
    return np.where(np.isnan(values), quiet, rounded)


def _blocks(*arrays: np.ndarray | None, size: int = _BLOCK) -> Iterator[tuple]:
    """Matching blocks of flat arrays of one length; None where an array is None."""
    for start in range(0, arrays[0].size, size):
        yield tuple(None if array is None else array[start : start + size] for array in arrays)
