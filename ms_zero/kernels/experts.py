"""Products of stacked weights with rows that are sorted by expert, and the weighted sum of what comes out.

Kept for backward by the native CPU kernels:

| kernel | kept | elements |
|---|---|---|
| GroupedLinear | x | rows * in, of its dtype |
| CombineRows | rows | rows * H, of their dtype |
| | places | N * k, int32 |
| | weights | N * k, fp32 |

The gradient of a stacked weight can be put off, see `ms_zero.kernels.deferred`: x and dy are kept until then.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops

from ms_zero._compat import finish_queued, function_class, host_view
from ms_zero.errors import UserError
from ms_zero.kernels import cpu
from ms_zero.kernels.deferred import PutOff, put_off_to
from ms_zero.kernels.dispatch import select
from ms_zero.kernels.saved import Saved


def groups_of(counts: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(group, first row, stop row) of each group that has rows."""
    start = 0
    for group, count in enumerate(counts):
        if count:
            yield group, start, start + count
        start += count


class _GroupedLinearNative(function_class):
    """One product of the C++ library for each group, at its place in the stacked weight."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...], later: "_Later | None"
    ) -> Tensor:
        x = cpu.packed(x)
        _check_grouped(x, weight, counts)
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.later = counts, later
        _, size_out, size_in = weight.shape
        y = mint.empty((x.shape[0], size_out), dtype=x.dtype)
        code = cpu.dtype_code(x)
        for group, start, stop in groups_of(counts):
            at = _address(weight, group)
            cpu.call("msz_linear", _address(x, start), at, None, _address(y, start), code, stop - start,
                     size_in, size_out)  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dy, code, shape = cpu.packed(dy), cpu.dtype_code(x), weight.shape
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dx = cpu.like(x) if wants_x else None
        for group, start, stop in groups_of(ctx.counts) if wants_x else ():
            at = _address(weight, group)
            cpu.call("msz_linear_grad_input", _address(dy, start), at, _address(dx, start), code,
                     stop - start, shape[2], shape[1])  # fmt: skip
        of_weight = partial(_native_grad_weight, dy, x, ctx.counts, shape)
        return dx, _now_or_later(of_weight, ctx.later) if wants_weight else None, None, None


def _native_grad_weight(dy: Tensor, x: Tensor, counts: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    dweight = _zeros(shape, x.dtype)
    for group, start, stop in groups_of(counts):
        at = _address(dweight, group)
        cpu.call("msz_linear_grad_weight", _address(dy, start), _address(x, start), at, cpu.dtype_code(x),
                 stop - start, shape[2], shape[1])  # fmt: skip
    return dweight


# Where the gradient of a weight may wait, and the weight.
_Later = tuple[PutOff, Parameter]


def _later(weight: Tensor) -> _Later | None:
    waiting = put_off_to(weight)
    return None if waiting is None else (waiting, weight)


def _now_or_later(compute: Callable[[], Tensor], later: _Later | None) -> Tensor | None:
    if later is None:
        return compute()
    waiting, weight = later
    waiting.add(weight, compute)
    return None


def _address(tensor: Tensor, row: int) -> int:
    """Where element `row` of the first dim begins; every operation that writes the tensor has run."""
    if tensor.is_meta:
        raise UserError("kernels: stacked weights have no values yet: initialise the model before it is used")
    finish_queued()
    return tensor.data_ptr() + row * (tensor.nbytes // max(1, tensor.shape[0]))


def _zeros(shape: tuple[int, ...], dtype: ms.Type) -> Tensor:
    if dtype == ms.bfloat16:  # numpy has none
        return mint.zeros(shape, dtype=dtype)
    # The system clears memory when it is touched: groups with rows are not written twice.
    return Tensor.from_numpy(np.zeros(shape, ms.dtype_to_nptype(dtype)))


def _check_grouped(x: Tensor, weight: Tensor, counts: Sequence[int]) -> None:
    fits = x.ndim == 2 and weight.ndim == 3 and x.shape[1] == weight.shape[2] and x.dtype == weight.dtype
    if not fits or len(counts) != weight.shape[0] or sum(counts) != x.shape[0]:
        raise UserError(
            f"grouped linear: x {x.dtype} {list(x.shape)}, weight {weight.dtype} {list(weight.shape)} and "
            f"{len(counts)} counts of {sum(counts)} rows do not fit: expected one dtype, [rows, in], "
            f"[groups, out, in] and a count for each group"
        )
    assert weight.is_contiguous()


class _GroupedLinearComposed(function_class):
    """The same by MindSpore's operators: the weight is read at its place, its gradient is made once."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...], later: _Later | None
    ) -> Tensor:
        _check_grouped(x, weight, counts)
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.later = counts, later
        product = ops.MatMul(transpose_b=True)
        parts = [product(x[start:stop], weight[group]) for group, start, stop in groups_of(counts)]
        return _joined(parts, (0, weight.shape[1]), x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dx = None
        if wants_x:
            product = ops.MatMul()
            groups = groups_of(ctx.counts)
            parts = [product(dy[start:stop], weight[group]) for group, start, stop in groups]
            dx = _joined(parts, (0, weight.shape[2]), x.dtype)
        of_weight = partial(_composed_grad_weight, dy, x, ctx.counts, weight.shape)
        return dx, _now_or_later(of_weight, ctx.later) if wants_weight else None, None, None


def _composed_grad_weight(dy: Tensor, x: Tensor, counts: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    product = ops.MatMul(transpose_a=True)
    by_group = {group: product(dy[start:stop], x[start:stop]) for group, start, stop in groups_of(counts)}
    empty = mint.zeros(shape[1:], dtype=x.dtype)
    return mint.cat(tuple(by_group.get(group, empty) for group in range(len(counts)))).reshape(shape)


def _joined(parts: Sequence[Tensor], empty: tuple[int, int], dtype: ms.Type) -> Tensor:
    return mint.cat(tuple(parts)) if parts else mint.empty(empty, dtype=dtype)


class _GroupedLinearFused(function_class):
    """The same by Ascend's grouped product: one kernel for all groups, for each of the three products."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...], later: _Later | None
    ) -> Tensor:
        _check_grouped(x, weight, counts)
        ctx.save_for_backward(x, weight)
        ctx.counts, ctx.later = counts, later
        if not x.shape[0]:
            return mint.empty((0, weight.shape[1]), dtype=x.dtype)
        return _grouped_product(x, mint.transpose(weight, 1, 2), counts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        dx = None
        if wants_x and x.shape[0]:
            dx = _grouped_product(dy, weight, ctx.counts)
        elif wants_x:
            dx = mint.empty(x.shape, dtype=x.dtype)
        of_weight = partial(_fused_grad_weight, dy, x, ctx.counts, weight.shape)
        return dx, _now_or_later(of_weight, ctx.later) if wants_weight else None, None, None


def _fused_grad_weight(dy: Tensor, x: Tensor, counts: Sequence[int], shape: tuple[int, ...]) -> Tensor:
    if not x.shape[0]:
        return mint.zeros(shape, dtype=x.dtype)
    # The operator wants its first factor as a transposed view.
    return _grouped_product(mint.transpose(dy.contiguous(), 0, 1), x, counts, group_type=_BY_COLUMNS)


# What the groups cut: the rows of the first factor, or its columns, which are the rows of the second.
_BY_ROWS, _BY_COLUMNS = 0, 2


def _grouped_product(
    first: Tensor, second: Tensor, counts: Sequence[int], group_type: int = _BY_ROWS
) -> Tensor:
    """[rows, in] x [groups, in, out] by rows, [out, rows] x [rows, in] -> [groups, out, in] by columns."""
    stops = Tensor(np.cumsum(counts, dtype=np.int64))
    return ops.auto_generate.GmmV2()([first], [second], None, stops, group_type, 0)[0]


class GroupedLinear(nn.Cell):
    """y[r] = W[g] x[r] for rows that are sorted by group g.

    x [rows, in], weight [groups, out, in], counts: rows of each group, on the host -> [rows, out]. PyNative
    only. Each row's bits depend on that row and its weight alone with the native CPU kernel. On Ascend one
    grouped product of MindSpore's (`mindspore.ops.function.math_func.gmm`), which has none for GPUs: there
    one product a group. Not run on either.
    """

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        implementations = {
            "CPU": _GroupedLinearNative,
            "CPU-portable": _GroupedLinearComposed,
            "GPU": _GroupedLinearComposed,
            "Ascend": _GroupedLinearFused,
        }
        self.function = select("GroupedLinear", implementations, target)

    def construct(self, x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Apply the products."""
        return self.function.apply(x, weight, counts, _later(weight))

    @staticmethod
    def saved_elements(rows: int, in_features: int) -> tuple[Saved, ...]:
        """What the native CPU kernel keeps for backward."""
        return (Saved("x", rows * in_features),)


class _CombineOnHost(function_class):
    """Sums in fp32, choice by choice; by numpy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(rows, places, weights)
        values, where, factors = host_view(cpu.packed(rows)), host_view(places), host_view(weights)
        total = np.zeros((where.shape[0], values.shape[1]), np.float32)
        for choice in range(where.shape[1]):
            kept, place = _kept(where[:, choice])
            total[kept] += values[place] * factors[kept, choice, None]
        return Tensor.from_numpy(total.astype(values.dtype, copy=False))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        rows, places, weights = ctx.saved_tensors
        values, where, factors = host_view(rows), host_view(places), host_view(weights)
        upstream = host_view(cpu.packed(grad))
        drows, dweights = np.zeros_like(values), np.zeros_like(factors)
        for choice in range(where.shape[1]):
            kept, place = _kept(where[:, choice])
            mine = upstream[kept].astype(np.float32, copy=False)
            drows[place] = mine * factors[kept, choice, None]
            dweights[kept, choice] = np.einsum("nh,nh->n", mine, values[place].astype(np.float32, copy=False))
        return Tensor.from_numpy(drows), None, Tensor.from_numpy(dweights)


def _kept(places: np.ndarray) -> tuple[np.ndarray | slice, np.ndarray]:
    """Tokens whose choice was not dropped, and the places of their rows."""
    if (places >= 0).all():
        return slice(None), places
    kept = np.flatnonzero(places >= 0)
    return kept, places[kept]


def _combine_composed(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """By MindSpore's operators; a dropped choice reads row 0 with weight 0."""
    is_kept = (places >= 0).astype(ms.float32)
    total = None
    for choice in range(places.shape[1]):
        picked = ops.gather(rows, ops.maximum(places[:, choice], 0), 0).astype(ms.float32)
        part = picked * (weights[:, choice] * is_kept[:, choice]).reshape(-1, 1)
        total = part if total is None else total + part
    return total.astype(rows.dtype)


class CombineRows(nn.Cell):
    """out[n] = sum over choices c of weights[n, c] rows[places[n, c]], in the order of the choices.

    rows [M, H]; places int32 [N, k]: -1 for a choice that was dropped; weights fp32 [N, k] -> [N, H] of the
    rows' dtype, summed in fp32. A row has at most one place. PyNative only. On Ascend and GPU by MindSpore's
    operators; not run there.
    """

    fp32_arguments = ("weights",)  # read by ms_zero.precision

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        implementations: dict[str, Callable[..., Tensor]] = {
            "CPU": _CombineOnHost.apply,
            "GPU": _combine_composed,
            "Ascend": _combine_composed,
        }
        self.combine = select("CombineRows", implementations, target)

    def construct(self, rows: Tensor, places: Tensor, *, weights: Tensor) -> Tensor:
        """Add up."""
        return self.combine(rows, places, weights)

    @staticmethod
    def saved_elements(rows: int, tokens: int, choices: int, hidden_size: int) -> tuple[Saved, ...]:
        """What the CPU kernel keeps for backward."""
        return (
            Saved("rows", rows * hidden_size),
            Saved("places", tokens * choices, dtype="int32", role="extra"),
            Saved("weights", tokens * choices, dtype="fp32", role="extra"),
        )
