"""In-place optimizer updates and gradient statistics on flat fp32 tensors (PyNative).

Every updated tensor must own its storage: MindSpore's optimizer operators silently write nothing into a view.
Part of a storage is refused; a reshape of a whole tensor cannot be told from the tensor, so never pass one.
Views of an updated tensor see the update.
"""

import math

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from ms_zero.kernels.dispatch import select

_FP32_BYTES = 4

# Primitives hold no state between calls.
_ADAM = ops.Adam()
_ADAMW_NATIVE = ops.auto_generate.AdamW()
_GRADIENT_DESCENT = ops.ApplyGradientDescent()
_SQUARE = ops.Square()
_SUM = ops.ReduceSum()


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
        target: device target; None for the current one. The Ascend implementation (native AdamW) has not been
            run on an NPU.
    """
    assert step >= 1, step
    for tensor in (param, exp_avg, exp_avg_sq):
        _check_updatable(tensor)
    update = select("adamw_update", {"CPU": _adam, "GPU": _adam, "Ascend": _adamw_native}, target)
    update(
        param,
        exp_avg,
        exp_avg_sq,
        _scaled(grad, grad_scale),
        lr=float(lr),
        beta1=float(np.float32(beta1)),
        beta2=float(np.float32(beta2)),
        eps=float(eps),
        weight_decay=float(weight_decay),
        step=int(step),
    )


def _adam(
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
) -> None:
    if weight_decay:
        _GRADIENT_DESCENT(param, lr * weight_decay, param)
    # Adam computes p -= lr * sqrt(1-power2)/(1-power1) * m / (sqrt(v) + eps). With both powers 0 and the bias
    # corrections moved into lr and eps, in double precision, this is the update above exactly.
    root = math.sqrt(1.0 - beta2**step)
    _ADAM(
        param,
        exp_avg,
        exp_avg_sq,
        0.0,
        0.0,
        lr * root / (1.0 - beta1**step),
        beta1,
        beta2,
        eps * root,
        grad,
    )


def _adamw_native(
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
) -> None:
    # The native operator counts steps from 0. Without amsgrad it does not read its fourth argument.
    previous = Tensor([step - 1], ms.float32)
    _ADAMW_NATIVE(
        param,
        exp_avg,
        exp_avg_sq,
        exp_avg_sq,
        grad,
        previous,
        lr,
        beta1,
        beta2,
        weight_decay,
        eps,
        False,
        False,
    )


def sgd_update(
    param: Tensor, grad: Tensor, *, lr: float, weight_decay: float = 0.0, grad_scale: float = 1.0
) -> None:
    """Apply p -= lr*weight_decay*p, then p -= lr * grad_scale * grad, in place on param fp32 [n]."""
    _check_updatable(param)
    if weight_decay:
        _GRADIENT_DESCENT(param, lr * weight_decay, param)
    _GRADIENT_DESCENT(param, lr * grad_scale, grad)


def sum_of_squares(flat: Tensor) -> Tensor:
    """Return the sum of the squares of a tensor as an fp32 0-d tensor.

    Deterministic. inf or nan in, inf or nan out, and inf where the sum exceeds fp32. On CPU the relative
    error stays below 1e-6 for tens of millions of elements: the reduction is blocked.
    """
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
