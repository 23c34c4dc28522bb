"""In-place optimizer updates and gradient statistics on flat tensors (PyNative).

Every updated tensor must own its storage: MindSpore's optimizer operators silently write nothing into a view.
Part of a storage is refused; a reshape of a whole tensor cannot be told from the tensor, so never pass one.
Views of an updated tensor see the update.

On CPU the project's C++ library (or numpy, if asked for: the same bits) works on the tensors' own storage,
once every queued operation is done. MindSpore's CPU operators choose their number of threads by timing
themselves, and their vector body and scalar tail round differently, so two equal runs differ in the last bit
near the borders between threads. Here an element's result depends on nothing but its inputs (see the contract
in ``ops/README.md``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_zero._compat import finish_queued, host_view
from ms_zero.kernels import native_optimizer, reference
from ms_zero.kernels.dispatch import select
from ms_zero.kernels.graph_optimizer import FusedAdamW, SumOfSquares
from ms_zero.kernels.native_optimizer import BF16, FP16, FP32, HostArray

_CODES = {ms.float32: FP32, ms.float16: FP16, ms.bfloat16: BF16}

# Primitives hold no state between calls.
_ADAM = ops.Adam()
_ADAMW_NATIVE = ops.auto_generate.AdamW()
_GRADIENT_DESCENT = ops.ApplyGradientDescent()
_SQUARE = ops.Square()
_SUM = ops.ReduceSum()
_CAT = ops.Concat()


@dataclass(frozen=True)
class _AdamScalars:
    """The arguments of one AdamW step, see :func:`adamw_update`; the rates rounded to fp32."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int
    grad_scale: float

    def tensor(self) -> np.ndarray:
        """The scalar tensor of the fused operator."""
        return reference.adamw_scalars(
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            step=self.step,
            grad_scale=self.grad_scale,
        )


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
    low_precision: Tensor | None = None,
    target: str | None = None,
) -> None:
    """Apply one AdamW step in place (Loshchilov and Hutter 2019, as torch.optim.AdamW).

    With g = grad * grad_scale: p -= lr*weight_decay*p; m = beta1*m + (1-beta1)*g;
    v = beta2*v + (1-beta2)*g^2; p -= lr * (m / (1-beta1^step)) / (sqrt(v / (1-beta2^step)) + eps).

    Args:
        param: p, fp32 [n], updated.
        exp_avg: m, fp32 [n], updated.
        exp_avg_sq: v, fp32 [n], updated.
        grad: fp32, fp16 or bf16 [n], left as it is.
        lr: learning rate.
        beta1: decay rate of m, rounded to fp32.
        beta2: decay rate of v, rounded to fp32; 1-beta and the bias corrections follow the rounded rates.
        eps: added to the root.
        weight_decay: decoupled decay coefficient.
        step: number of this update, from 1.
        grad_scale: factor on the gradient (clip coefficient, inverse loss scale).
        low_precision: fp16 or bf16 [n], written with the new p rounded to nearest even.
        target: see :mod:`ms_zero.kernels.dispatch`; None for the current device. The implementations for
            Ascend and GPU have not been run on a device.

    Raises:
        UserError: the C++ library is asked for and cannot be built.
    """
    assert step >= 1, step
    _check_arguments((param, exp_avg, exp_avg_sq), grad, low_precision)
    scalars = _AdamScalars(
        lr=float(lr),
        beta1=float(np.float32(beta1)),
        beta2=float(np.float32(beta2)),
        eps=float(eps),
        weight_decay=float(weight_decay),
        step=int(step),
        grad_scale=float(grad_scale),
    )
    select("adamw_update", _ADAMW, target)(param, exp_avg, exp_avg_sq, grad, low_precision, scalars)


def _adamw_cpu(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    low_precision: Tensor | None,
    scalars: _AdamScalars,
) -> None:
    finish_queued()
    low = None if low_precision is None else _host_array(low_precision)
    arrays = [_host_array(each) for each in (param, exp_avg, exp_avg_sq, grad)]
    native_optimizer.adamw(*arrays, low, scalars.tensor())


def _adamw_portable(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    low_precision: Tensor | None,
    scalars: _AdamScalars,
) -> None:
    low = None if low_precision is None else _host_bits(low_precision)
    arrays = [_host_bits(each) for each in (param, exp_avg, exp_avg_sq, grad)]
    reference.adamw(*arrays, low, scalars.tensor())


def _adam(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    low_precision: Tensor | None,
    scalars: _AdamScalars,
) -> None:
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
    _write_rounded(param, low_precision)


def _adamw_native(
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    low_precision: Tensor | None,
    scalars: _AdamScalars,
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
    _write_rounded(param, low_precision)


@cache  # an operator is made once a process; it holds no state between calls
def _own_update(low_precision: bool, target: str) -> nn.Cell:
    return FusedAdamW(low_precision, target)


def _adamw_custom(
    target: str,
    param: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    low_precision: Tensor | None,
    scalars: _AdamScalars,
) -> None:
    low = () if low_precision is None else (low_precision,)
    update = _own_update(low_precision is not None, target)
    update(param, exp_avg, exp_avg_sq, grad, Tensor(scalars.tensor()), *low)


_ADAMW = {
    "CPU": _adamw_cpu,
    "CPU-portable": _adamw_portable,
    "GPU": _adam,
    "GPU-custom": partial(_adamw_custom, "GPU-custom"),
    "Ascend": _adamw_native,
    "Ascend-custom": partial(_adamw_custom, "Ascend-custom"),
}


def sgd_update(
    param: Tensor,
    grad: Tensor,
    *,
    lr: float,
    weight_decay: float = 0.0,
    grad_scale: float = 1.0,
    low_precision: Tensor | None = None,
    target: str | None = None,
) -> None:
    """Apply p -= lr*weight_decay*p, then p -= lr * grad_scale * grad, in place on param fp32 [n].

    grad is fp32, fp16 or bf16 [n]; low_precision and target as in :func:`adamw_update`.
    """
    _check_arguments((param,), grad, low_precision)
    scalars = {"lr": float(lr), "weight_decay": float(weight_decay), "grad_scale": float(grad_scale)}
    select("sgd_update", _SGD, target)(param, grad, low_precision, **scalars)


def _sgd_cpu(param: Tensor, grad: Tensor, low_precision: Tensor | None, **scalars: float) -> None:
    finish_queued()
    low = None if low_precision is None else _host_array(low_precision)
    native_optimizer.sgd(_host_array(param), _host_array(grad), low, reference.sgd_scalars(**scalars))


def _sgd_portable(param: Tensor, grad: Tensor, low_precision: Tensor | None, **scalars: float) -> None:
    low = None if low_precision is None else _host_bits(low_precision)
    reference.sgd(_host_bits(param), _host_bits(grad), low, reference.sgd_scalars(**scalars))


def _sgd(
    param: Tensor,
    grad: Tensor,
    low_precision: Tensor | None,
    *,
    lr: float,
    weight_decay: float,
    grad_scale: float,
) -> None:
    if lr * weight_decay:
        _GRADIENT_DESCENT(param, lr * weight_decay, param)
    _GRADIENT_DESCENT(param, lr * grad_scale, _scaled(grad, 1.0))
    _write_rounded(param, low_precision)


_SGD = {
    "CPU": _sgd_cpu,
    "CPU-portable": _sgd_portable,
    **dict.fromkeys(("GPU", "GPU-custom", "Ascend", "Ascend-custom"), _sgd),
}


def sum_of_squares(flat: Tensor, *, target: str | None = None) -> Tensor:
    """Return the sum of the squares of a flat fp32, fp16 or bf16 tensor as an fp32 0-d tensor.

    Not finite exactly when an element is not finite or the sum exceeds fp32: inf or nan in, inf or nan out.
    On CPU the sum is made in fp64 in one fixed order; elsewhere in fp32 by the device's reduction.
    """
    return select("sum_of_squares", _SUM_OF_SQUARES, target)(flat)


def _sum_of_squares_cpu(flat: Tensor) -> Tensor:
    finish_queued()
    return Tensor(np.float32(native_optimizer.sum_of_squares(_host_array(flat))))


def _sum_of_squares_portable(flat: Tensor) -> Tensor:
    return Tensor(reference.sum_of_squares(_host_bits(flat)))


def _sum_of_squares(flat: Tensor) -> Tensor:
    return _SUM(_SQUARE(_scaled(flat, 1.0)))


@cache  # an operator is made once a process; it holds no state between calls
def _own_sum(target: str) -> nn.Cell:
    return SumOfSquares(target)


_SUM_OF_SQUARES: dict[str, Callable[[Tensor], Tensor]] = {
    "CPU": _sum_of_squares_cpu,
    "CPU-portable": _sum_of_squares_portable,
    "GPU": _sum_of_squares,
    "GPU-custom": lambda flat: _own_sum("GPU-custom")(flat),
    "Ascend": _sum_of_squares,
    "Ascend-custom": lambda flat: _own_sum("Ascend-custom")(flat),
}


def squares_in_parts(flats: Sequence[Tensor], *, target: str | None = None) -> Tensor:
    """fp32 [2] whose sum in fp64 is the sum of the squares of flat fp32, fp16 or bf16 tensors.

    The parts of several ranks add up to the sum over all of them. On CPU the sum is made in fp64 and given as
    its rounding to fp32 and the rest, so that after rounding the whole to fp32 it does not show how elements
    were distributed over tensors and ranks. Elsewhere it is the fp32 sum of :func:`sum_of_squares` of each
    tensor, and zero. Not finite as there.
    """
    return select("squares_in_parts", _SQUARES_IN_PARTS, target)(flats)


def _squares_in_parts_cpu(flats: Sequence[Tensor]) -> Tensor:
    finish_queued()
    return _two_parts(sum(native_optimizer.sum_of_squares_fp64(_host_array(flat)) for flat in flats))


def _squares_in_parts_portable(flats: Sequence[Tensor]) -> Tensor:
    return _two_parts(sum(float(reference.sum_of_squares_fp64(_host_bits(flat))) for flat in flats))


def _two_parts(total: float) -> Tensor:
    with np.errstate(over="ignore"):
        high = np.float32(total)
    rest = np.float32(total - float(high)) if np.isfinite(high) else np.float32(0)
    return Tensor(np.array([high, rest], np.float32))


def _squares_in_parts(flats: Sequence[Tensor], target: str) -> Tensor:
    nothing = Tensor(np.zeros(1, np.float32))
    total = sum((sum_of_squares(flat, target=target).reshape((1,)) for flat in flats), nothing)
    return _CAT((total, nothing))


_SQUARES_IN_PARTS: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "CPU": _squares_in_parts_cpu,
    "CPU-portable": _squares_in_parts_portable,
    **{
        name: partial(_squares_in_parts, target=name)
        for name in ("GPU", "GPU-custom", "Ascend", "Ascend-custom")
    },
}


def _scaled(grad: Tensor, grad_scale: float) -> Tensor:
    wide = grad if grad.dtype == ms.float32 else grad.astype(ms.float32)
    return wide if grad_scale == 1.0 else wide * grad_scale


def _write_rounded(param: Tensor, low_precision: Tensor | None) -> None:
    if low_precision is not None:
        low_precision.copy_(param.astype(low_precision.dtype))


def _host_array(tensor: Tensor) -> HostArray:
    """Where a flat CPU tensor lies; what is queued has to be finished first."""
    return HostArray(tensor.data_ptr(), tensor.size, _CODES[tensor.dtype])


def _host_bits(tensor: Tensor) -> np.ndarray:
    """The storage of a flat CPU tensor as an array, bf16 as its bits."""
    view = host_view(tensor)
    return view.view(np.uint16) if tensor.dtype == ms.bfloat16 else view


def _check_arguments(updated: tuple[Tensor, ...], grad: Tensor, low_precision: Tensor | None) -> None:
    for tensor in updated:
        assert tensor.dtype == ms.float32, f"expected float32, got {tensor.dtype}"
        _check_updatable(tensor)
    _check_flat(grad)
    others = [*updated[1:], grad]
    if low_precision is not None:
        assert low_precision.dtype in (ms.float16, ms.bfloat16), f"low_precision is {low_precision.dtype}"
        _check_updatable(low_precision)
        others.append(low_precision)
    size = updated[0].size
    assert all(other.size == size for other in others), f"lengths differ from {size}"


def _check_flat(tensor: Tensor) -> None:
    assert tensor.dtype in _CODES, f"expected a float dtype, got {tensor.dtype}"
    assert tensor.ndim == 1, f"expected a flat tensor, got shape {tensor.shape}"
    assert tensor.is_contiguous(), "expected a contiguous tensor"


def _check_updatable(tensor: Tensor) -> None:
    _check_flat(tensor)
    storage = tensor.untyped_storage().size()
    assert storage == tensor.size * tensor.itemsize, (
        f"a view cannot be updated in place: {tensor.size} elements of a storage of {storage} bytes"
    )
