"""Optimizer updates on numpy arrays, for state that is kept on the host (CPU offload).

An array is flat and contiguous: float32, float16, or bf16, either as its bits in uint16 or in the dtype of
that name which ``Tensor.asnumpy`` gives. Any alignment will do, so that an array may be a part of a buffer or
of a mapped file. The C++ library does the work (target "CPU"), or numpy ("CPU-portable"): the same bits.
"""

import numpy as np

from ms_zero.kernels import native_optimizer, reference
from ms_zero.kernels.dispatch import PORTABLE, resolve_target
from ms_zero.kernels.native_optimizer import BF16, FP16, FP32, HostArray

_CODES = {np.dtype(np.float32): FP32, np.dtype(np.float16): FP16, np.dtype(np.uint16): BF16}


def adamw_update_host(
    param: np.ndarray,
    exp_avg: np.ndarray,
    exp_avg_sq: np.ndarray,
    grad: np.ndarray,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    low_precision: np.ndarray | None = None,
    target: str | None = None,
    threads: int = 0,
) -> None:
    """:func:`ms_zero.kernels.adamw_update` on numpy arrays, in place.

    Args:
        param: fp32 [n], updated.
        exp_avg: fp32 [n], updated.
        exp_avg_sq: fp32 [n], updated.
        grad: float32, float16 or bf16 bits [n], left as it is.
        lr: learning rate.
        beta1: decay rate of the mean, rounded to fp32.
        beta2: decay rate of the mean square, rounded to fp32.
        eps: added to the root.
        weight_decay: decoupled decay coefficient.
        step: number of this update, from 1.
        grad_scale: factor on the gradient.
        low_precision: float16 or bf16 bits [n], written with the rounded result.
        target: "CPU", or "CPU-portable" for numpy; None: as `default_target` says, else "CPU".
        threads: at most so many threads; 0 for what OpenMP says. numpy uses one.
    """
    scalars = reference.adamw_scalars(
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        eps=eps,
        weight_decay=weight_decay,
        step=step,
        grad_scale=grad_scale,
    )
    _check_updated(param, exp_avg, exp_avg_sq)
    _check_sizes(param, exp_avg, exp_avg_sq, grad, low_precision)
    if _is_portable(target):
        reference.adamw(param, exp_avg, exp_avg_sq, _bits(grad), _bits(low_precision), scalars)
    else:
        arrays = [host_array(each) for each in (param, exp_avg, exp_avg_sq, grad)]
        native_optimizer.adamw(*arrays, _output(low_precision), scalars, threads=threads)


def sgd_update_host(
    param: np.ndarray,
    grad: np.ndarray,
    *,
    lr: float,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    low_precision: np.ndarray | None = None,
    target: str | None = None,
    threads: int = 0,
) -> None:
    """:func:`ms_zero.kernels.sgd_update` on numpy arrays, in place; see :func:`adamw_update_host`."""
    scalars = reference.sgd_scalars(lr=lr, weight_decay=weight_decay, grad_scale=grad_scale)
    _check_updated(param)
    _check_sizes(param, grad, low_precision)
    if _is_portable(target):
        reference.sgd(param, _bits(grad), _bits(low_precision), scalars)
    else:
        arrays = host_array(param), host_array(grad), _output(low_precision)
        native_optimizer.sgd(*arrays, scalars, threads=threads)


def sum_of_squares_host(values: np.ndarray, *, target: str | None = None, threads: int = 0) -> float:
    """:func:`ms_zero.kernels.sum_of_squares` of a numpy array: an fp32 value."""
    array = host_array(values)
    if _is_portable(target):
        return float(reference.sum_of_squares(_bits(values)))
    return native_optimizer.sum_of_squares(array, threads=threads)


def host_array(values: np.ndarray) -> HostArray:
    """What the C++ library is told about an array."""
    values = _bits(values)
    assert values.dtype in _CODES, f"expected float32, float16 or bf16 bits in uint16, got {values.dtype}"
    assert values.ndim == 1 and values.flags.c_contiguous, "expected a contiguous flat array"
    return HostArray(values.ctypes.data, values.size, _CODES[values.dtype])


def _is_portable(target: str | None) -> bool:
    chosen = resolve_target(target)
    assert target is None or chosen.startswith("CPU"), f"arrays of the host are not updated on {target}"
    return chosen.endswith(PORTABLE)


def _bits(values: np.ndarray | None) -> np.ndarray | None:
    """bf16 as its bits in uint16, sharing the storage; anything else as it is."""
    return values.view(np.uint16) if values is not None and values.dtype.name == "bfloat16" else values


def _output(low_precision: np.ndarray | None) -> HostArray | None:
    if low_precision is None:
        return None
    assert low_precision.dtype != np.float32, "low_precision: expected float16 or bf16 bits in uint16"
    assert low_precision.flags.writeable, "low_precision is read-only"
    return host_array(low_precision)


def _check_updated(*arrays: np.ndarray) -> None:
    for each in arrays:
        assert each.dtype == np.float32, f"expected float32, got {each.dtype}"
        assert each.flags.writeable, "an updated array is read-only"


def _check_sizes(*arrays: np.ndarray | None) -> None:
    shapes = {each.shape for each in arrays if each is not None}
    assert len(shapes) == 1 and len(shapes.pop()) == 1, "expected flat arrays of one length"
