"""In-place optimizer updates and gradient statistics on flat fp32 tensors (PyNative).

Every updated tensor must own its storage: MindSpore's optimizer operators silently write nothing into a view.
Part of a storage is refused; a reshape of a whole tensor cannot be told from the tensor, so never pass one.
Views of an updated tensor see the update.

On CPU numpy works on the tensors' own storage. MindSpore's CPU operators choose their number of threads by
timing themselves, and their vector body and scalar tail round differently, so two equal runs differ in the
last bit near the borders between threads. Here an element's result depends on nothing but its inputs.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_zero._compat import host_view
from ms_zero.kernels.dispatch import select

_FP32_BYTES = 4
# Elements worked on at once on the host: the arrays of one block stay in a core's cache.
_HOST_BLOCK = 1 << 15
# Elements whose squares are added at once: few enough for BLAS to use one thread, hence one order.
_DOT_BLOCK = 1 << 13

# Primitives hold no state between calls.
_ADAM = ops.Adam()
_ADAMW_NATIVE = ops.auto_generate.AdamW()
_GRADIENT_DESCENT = ops.ApplyGradientDescent()
_SQUARE = ops.Square()
_SUM = ops.ReduceSum()


@dataclass(frozen=True)
class _AdamScalars:
    """The arguments of one AdamW step, see :func:`adamw_update`."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float


def adamw_update(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    target: str | None = None,
) -> None:
    """Apply one AdamW step in place (Loshchilov and Hutter 2019, as torch.optim.AdamW).

    With g = grad * grad_scale: p -= lr*weight_decay*p; m = beta1*m + (1-beta1)*g;
    v = beta2*v + (1-beta2)*g^2; p -= lr * (m / (1-beta1^step)) / (sqrt(v / (1-beta2^step)) + eps).

    Args:
        param: p, fp32 [n], updated.
        exp_avg: m, fp32 [n], updated.
        exp_avg_sq: v, fp32 [n], updated.
        grad: fp32 [n], left as it is.
        lr: learning rate.
        beta1: decay rate of m, rounded to fp32.
        beta2: decay rate of v, rounded to fp32; 1-beta and the bias corrections follow the rounded rates.
        eps: added to the root.
        weight_decay: decoupled decay coefficient.
        step: number of this update, from 1.
        grad_scale: factor on the gradient (clip coefficient, inverse loss scale).
        target: device target; None for the current one. The implementations for Ascend (native AdamW) and GPU
            have not been run on a device.
    """
    assert step >= 1, step
    for tensor in (param, exp_avg, exp_avg_sq):
        _check_updatable(tensor)
    scalars = _AdamScalars(
        lr=float(lr),
        beta1=float(np.float32(beta1)),
        beta2=float(np.float32(beta2)),
        eps=float(eps),
        weight_decay=float(weight_decay),
        step=int(step),
        grad_scale=float(grad_scale),
    )
    update = select("adamw_update", {"CPU": _adamw_host, "GPU": _adam, "Ascend": _adamw_native}, target)
    update(param, exp_avg, exp_avg_sq, grad, scalars)


def _adamw_host(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, scalars: _AdamScalars
) -> None:
    beta1, beta2 = scalars.beta1, scalars.beta2
    step_size = scalars.lr / (1.0 - beta1**scalars.step)
    inverse_root = 1.0 / math.sqrt(1.0 - beta2**scalars.step)
    keep = 1.0 - scalars.lr * scalars.weight_decay
    scaled_block, scratch_block = np.empty((2, _HOST_BLOCK), np.float32)
    for p, m, v, g in _host_blocks(param, exp_avg, exp_avg_sq, grad):
        scaled, scratch = scaled_block[: p.size], scratch_block[: p.size]
        if scalars.grad_scale != 1.0:
            g = np.multiply(g, scalars.grad_scale, out=scaled)
        m *= beta1
        m += np.multiply(g, 1.0 - beta1, out=scratch)
        v *= beta2
        np.multiply(g, g, out=scratch)
        v += np.multiply(scratch, 1.0 - beta2, out=scratch)
        np.sqrt(v, out=scratch)
        scratch *= inverse_root
        scratch += scalars.eps
        np.divide(m, scratch, out=scratch)
        p *= keep
        p -= np.multiply(scratch, step_size, out=scratch)


def _host_blocks(*tensors: Tensor, block: int = _HOST_BLOCK) -> Iterator[tuple[np.ndarray, ...]]:
    """Matching blocks of the storages of flat CPU tensors of one length."""
    views = [host_view(tensor) for tensor in tensors]
    for start in range(0, views[0].size, block):
        yield tuple(view[start : start + block] for view in views)


def _adam(param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, scalars: _AdamScalars) -> None:
    if scalars.weight_decay:
        _GRADIENT_DESCENT(param, scalars.lr * scalars.weight_decay, param)
    # Adam computes p -= lr * sqrt(1-power2)/(1-power1) * m / (sqrt(v) + eps). With both powers 0 and the bias
    # corrections moved into lr and eps, in double precision, this is the update above exactly.
    root = math.sqrt(1.0 - scalars.beta2**scalars.step)
    _ADAM(
        param,
        exp_avg,
        exp_avg_sq,
        0.0,
        0.0,
        scalars.lr * root / (1.0 - scalars.beta1**scalars.step),
        scalars.beta1,
        scalars.beta2,
        scalars.eps * root,
        _scaled(grad, scalars.grad_scale),
    )


def _adamw_native(
    param: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, scalars: _AdamScalars
) -> None:
    # The native operator counts steps from 0. Without amsgrad it does not read its fourth argument.
    previous = Tensor([scalars.step - 1], ms.float32)
    _ADAMW_NATIVE(
        param,
        exp_avg,
        exp_avg_sq,
        exp_avg_sq,
        _scaled(grad, scalars.grad_scale),
        previous,
        scalars.lr,
        scalars.beta1,
        scalars.beta2,
        scalars.weight_decay,
        scalars.eps,
        False,
        False,
    )


def sgd_update(
    param: Tensor,
    grad: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    target: str | None = None,
) -> None:
    """Apply p -= lr*weight_decay*p, then p -= lr * grad_scale * grad, in place on param fp32 [n]."""
    _check_updatable(param)
    update = select("sgd_update", {"CPU": _sgd_host, "GPU": _sgd, "Ascend": _sgd}, target)
    update(param, grad, float(lr) * float(weight_decay), float(lr) * float(grad_scale))


def _sgd_host(param: Tensor, grad: Tensor, decay: float, rate: float) -> None:
    for p, g in _host_blocks(param, grad):
        p *= 1.0 - decay
        p -= g * rate


def _sgd(param: Tensor, grad: Tensor, decay: float, rate: float) -> None:
    if decay:
        _GRADIENT_DESCENT(param, decay, param)
    _GRADIENT_DESCENT(param, rate, grad)


def sum_of_squares(flat: Tensor, *, target: str | None = None) -> Tensor:
    """Return the sum of the squares of a flat tensor as an fp32 0-d tensor.

    inf or nan in, inf or nan out, and inf where the sum exceeds fp32. On CPU the sum is made in fp64 in one
    fixed order; elsewhere in fp32 by the device's reduction.
    """
    compute = {"CPU": _sum_of_squares_host, "GPU": _sum_of_squares, "Ascend": _sum_of_squares}
    return select("sum_of_squares", compute, target)(flat)


def _sum_of_squares_host(flat: Tensor) -> Tensor:
    total, wide = 0.0, np.empty(_DOT_BLOCK)
    for (part,) in _host_blocks(flat, block=_DOT_BLOCK):
        values = wide[: part.size]
        np.copyto(values, part)
        total += float(np.dot(values, values))
    with np.errstate(over="ignore"):  # a sum that exceeds fp32 is inf by contract
        return Tensor(np.float32(total))


def _sum_of_squares(flat: Tensor) -> Tensor:
    return _SUM(_SQUARE(flat))


def _scaled(grad: Tensor, grad_scale: float) -> Tensor:
    return grad if grad_scale == 1.0 else grad * grad_scale


def _check_updatable(tensor: Tensor) -> None:
    assert tensor.dtype == ms.float32, f"expected float32, got {tensor.dtype}"
    assert tensor.ndim == 1, f"expected a flat tensor, got shape {tensor.shape}"
    storage = tensor.untyped_storage().size()
    assert storage == tensor.size * _FP32_BYTES, (
        f"a view cannot be updated in place: {tensor.size} elements of a storage of {storage} bytes"
    )
