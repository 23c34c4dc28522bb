"""Makes a plain Cell compute under a policy, by hooks on its Cells.

What each kind of Cell does under a 16-bit policy ("working" is `Policy.working`: a dtype and, on a device
without kernels for it, a grid to which values are rounded):

- root: float arguments are made working.
- leaf (a Cell without Cells, or one of `ms_zero.kernels`): float arguments and outputs are made working.
- fp32 Cell (norms, softmax, and what the caller adds): computes in fp32; its arguments are widened, unless
  its attribute ``widens_itself`` says that it takes working ones. Its outputs are made working. What is
  inside it is left alone.
- loss: computes in fp32 and returns fp32.
- other: nothing with native kernels. With a grid its outputs are rounded, since residual sums and the like
  happen between Cells; the root's outputs are not (they may be a loss).

MindSpore takes no exit hook on a Cell with a ``bprop`` of its own (silently, 2.10.0): what leaves one is
converted by the Cell that reads it.

Integers, Parameters and 0-d tensors are never touched, nor is what a Cell keeps in fp32 by its attributes
``fp32_arguments`` (names of keyword arguments) and ``fp32_outputs`` (positions in the tuple that it returns),
such as a loss that rides along with the activations. Gradients pass the same borders backwards: they are
converted or rounded where their values were. Parameters are not this module's matter: whoever makes the
working copies asks `fp32_parameters` which ones stay fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, mint, nn

from ms_zero import kernels
from ms_zero.errors import UserError
from ms_zero.precision.cast import cast, round_gradient, round_to_grid
from ms_zero.precision.policy import Policy, Working

_FLOATS = (ms.float32, ms.float16, ms.bfloat16)
_FP32_CELLS = (
    nn.LayerNorm,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
    nn.Softmax,
    nn.Softmax2d,
    nn.LogSoftmax,
    mint.nn.LayerNorm,
    mint.nn.GroupNorm,
    mint.nn.BatchNorm1d,
    mint.nn.BatchNorm2d,
    mint.nn.BatchNorm3d,
    mint.nn.SyncBatchNorm,
    mint.nn.Softmax,
    mint.nn.LogSoftmax,
)
_LOSSES = (
    nn.LossBase,
    kernels.CrossEntropySum,
    mint.nn.BCELoss,
    mint.nn.BCEWithLogitsLoss,
    mint.nn.CosineEmbeddingLoss,
    mint.nn.CrossEntropyLoss,
    mint.nn.KLDivLoss,
    mint.nn.MSELoss,
    mint.nn.NLLLoss,
    mint.nn.SmoothL1Loss,
)

# How an operator of ours is built of Cells is its own affair.
_OPERATORS = (
    kernels.CausalAttention,
    kernels.CombineRows,
    kernels.DocumentMask,
    kernels.Embedding,
    kernels.GELU,
    kernels.GroupedLinear,
    kernels.LayerNorm,
    kernels.Linear,
    kernels.RMSNorm,
    kernels.RotaryEmbedding,
    kernels.SwiGLU,
)

#: What tells further fp32 Cells: a class, or a function of a Cell.
Matcher = type[nn.Cell] | Callable[[nn.Cell], bool]
_Convert = Callable[[Tensor], Tensor]
# Set on tensors that a border has rounded or leaves in fp32, so that the borders around it let them pass.
_SETTLED = "precision_settled"


def keeps_fp32(cell: nn.Cell, fp32: Sequence[Matcher] = ()) -> bool:
    """Whether a Cell computes in fp32, with fp32 weights, under every policy.

    True for normalisations, softmax and losses of MindSpore, for Cells whose attribute ``keeps_fp32`` is true
    (the norms of ours), and for what ``fp32`` matches by class or predicate.
    """
    return _is_loss(cell) or _is_wide(cell, fp32)


def fp32_parameters(root: nn.Cell, fp32: Sequence[Matcher] = ()) -> frozenset[str]:
    """Names (paths in `root`) of the parameters of fp32 Cells: their working copies are fp32."""
    wide = [cell for cell in _cells(root, fp32) if keeps_fp32(cell, fp32)]
    owned = {id(parameter) for cell in wide for parameter in cell.get_parameters()}
    return frozenset(name for name, parameter in root.parameters_and_names() if id(parameter) in owned)


class Handle:
    """The hooks of one `apply`."""

    def __init__(self) -> None:
        self._hooks: list[Any] = []
        self._cells: list[nn.Cell] = []

    @property
    def num_hooks(self) -> int:
        """Hooks that are registered now."""
        return len(self._hooks)

    def remove(self) -> None:
        """Let the Cells compute as before; may be called again."""
        for hook in self._hooks:
            hook.remove()
        for cell in self._cells:
            cell.under_policy = False
        self._hooks, self._cells = [], []

    def hook(self, cell: nn.Cell, before: _Convert | None, after: _Convert | None) -> None:
        """Convert the tensors that enter a Cell, and those that leave it."""
        if before is not None:
            hook = cell.register_forward_pre_hook(_entry_hook(before), with_kwargs=True)
            self._hooks.append(hook)
        if after is not None:
            self._hooks.append(cell.register_forward_hook(_exit_hook(after)))
        cell.under_policy = True
        self._cells.append(cell)


def apply(root: nn.Cell, policy: Policy, target: str, *, fp32: Sequence[Matcher] = ()) -> Handle:
    """Make `root` and the Cells in it compute under `policy`; see the module for what that means.

    PyNative only. Hooks are registered here once; Cells that join `root` later have none. Under a policy that
    computes in fp32 nothing is registered.

    Args:
        root: any Cell; its arguments may be nested in tuples, lists and dicts.
        policy: the dtypes.
        target: device target, "CPU", "GPU" or "Ascend".
        fp32: further Cells that compute in fp32, by class or predicate.

    Raises:
        UserError: a Cell computes under a policy already, or the mode is graph mode.
    """
    handle = Handle()
    if policy.compute == "fp32":
        return handle
    if ms.get_context("mode") != ms.PYNATIVE_MODE:
        raise UserError("precision: a policy needs PyNative mode: call mindspore.set_context(mode=1) first")
    cells = list(_cells(root, fp32))
    taken = next((cell for cell in cells if getattr(cell, "under_policy", False)), None)
    if taken is not None:
        raise UserError(
            f"precision: {type(taken).__name__} in {type(root).__name__} computes under a policy already: "
            f"call remove() of its handle first"
        )
    converter = _Converter(policy.working(target))
    for cell in cells:
        handle.hook(cell, *_conversions(cell, converter, fp32, is_root=cell is root))
    return handle


def _is_loss(cell: nn.Cell) -> bool:
    return isinstance(cell, _LOSSES)


def _is_wide(cell: nn.Cell, fp32: Sequence[Matcher]) -> bool:
    if isinstance(cell, _FP32_CELLS) or getattr(cell, "keeps_fp32", False):
        return True
    return any(
        isinstance(cell, matcher) if isinstance(matcher, type) else matcher(cell) for matcher in fp32
    )


def _is_leaf(cell: nn.Cell) -> bool:
    return isinstance(cell, _OPERATORS) or not cell.cells()


def _cells(root: nn.Cell, fp32: Sequence[Matcher]) -> Iterator[nn.Cell]:
    """Every Cell once, those inside fp32 Cells and leaves left out."""
    seen, waiting = set(), [root]
    while waiting:
        cell = waiting.pop()
        if id(cell) in seen:
            continue
        seen.add(id(cell))
        yield cell
        if not (keeps_fp32(cell, fp32) or _is_leaf(cell)):
            waiting += cell.cells()


@dataclass(frozen=True)
class _Converter:
    """Conversions of one tensor at a border."""

    working: Working

    def enter(self, x: Tensor) -> Tensor:
        """To the working dtype and grid; the gradient is rounded for each reader of x, before they add up."""
        x = cast(x, self.working.dtype)
        if self.working.grid is None:
            return x
        rounded = round_gradient if _is_settled(x) else round_to_grid
        return _settle(rounded(x, self.working.grid))

    def leave(self, x: Tensor) -> Tensor:
        """To the working dtype and grid."""
        return self.leave_block(cast(x, self.working.dtype))

    def leave_block(self, x: Tensor) -> Tensor:
        """To the grid; a tensor of another dtype is no activation and stays."""
        if self.working.grid is None or x.dtype != self.working.dtype or _is_settled(x):
            return x
        return _settle(round_to_grid(x, self.working.grid))


def _widen(x: Tensor) -> Tensor:
    return cast(x, ms.float32)


def _is_settled(x: Tensor) -> bool:
    return getattr(x, _SETTLED, False)


def _settle(x: Tensor) -> Tensor:
    setattr(x, _SETTLED, True)
    return x


def _conversions(
    cell: nn.Cell, converter: _Converter, fp32: Sequence[Matcher], *, is_root: bool
) -> tuple[_Convert | None, _Convert | None]:
    """What is done to the tensors that enter a Cell and to those that leave it."""
    has_grid = converter.working.grid is not None
    if _is_loss(cell):
        return _widen, _settle
    if _is_wide(cell, fp32):
        takes_working = has_grid or getattr(cell, "widens_itself", False)
        return converter.enter if takes_working else _widen, converter.leave
    if _is_leaf(cell):
        return converter.enter, converter.leave
    if is_root:
        return converter.enter, None
    return None, converter.leave_block if has_grid else None


def _entry_hook(convert: _Convert) -> Callable[..., Any]:
    def before(cell: nn.Cell, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        kept = getattr(cell, "fp32_arguments", ())
        named = {name: value if name in kept else _map(convert, value) for name, value in kwargs.items()}
        return _map(convert, args), named

    return before


def _exit_hook(convert: _Convert) -> Callable[..., Any]:
    def after(cell: nn.Cell, args: tuple, output: Any) -> Any:
        kept = getattr(cell, "fp32_outputs", ())
        if not kept:
            return _map(convert, output)
        parts = [part if at in kept else _map(convert, part) for at, part in enumerate(output)]
        return type(output)(*parts) if hasattr(output, "_fields") else tuple(parts)

    return after


def _map(convert: _Convert, value: Any) -> Any:
    """Apply a conversion to the activations in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        is_activation = value.dtype in _FLOATS and value.ndim > 0 and not isinstance(value, Parameter)
        return convert(value) if is_activation else value
    if isinstance(value, tuple):
        items = [_map(convert, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [_map(convert, item) for item in value]
    if isinstance(value, dict):
        return {key: _map(convert, item) for key, item in value.items()}
    return value
