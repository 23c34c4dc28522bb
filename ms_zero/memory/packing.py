"""Keeping the tensors that cells save for backward in another form, by saved-tensor hooks.

What is packed, of all that the operators of a chosen cell save:

- floating-point and bool tensors of at least `min_bytes`; integers are indices, mostly shared constants;
- no parameters: backward reads what a parameter holds by then, so that weights that are freed after forward
  and fetched again (ZeRO stage 3) are neither copied nor kept;
- no arguments of the cell that need no gradient (masks, rotary tables): the caller holds them anyway, and all
  blocks share them.

A tensor that several operators of a cell save is packed once and unpacked once. That is decided by its
address, shape, strides and dtype, while the cell runs: its saved tensors are held until then, for an address
says nothing once a tensor is freed. A view is packed by its own elements.

Of a recomputed cell the kept inputs are packed. What its second forward saves is used at once and stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Protocol

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from ms_zero._compat import is_recording, needs_gradient
from ms_zero.errors import UserError
from ms_zero.memory.apply import find_blocks
from ms_zero.memory.construct import (
    Construct,
    Replacement,
    is_recomputed,
    replace_construct,
    replacement_of,
)
from ms_zero.memory.tree import flatten

DEFAULT_MIN_BYTES = 1 << 16


class Codec(Protocol):
    """One way to keep a tensor."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether tensors of this dtype can be kept."""

    def encode(self, tensor: Tensor) -> tuple[Any, int, int]:
        """The kept form, and its bytes on the device and in host memory."""

    def decode(self, kept: Any) -> Tensor:
        """The tensor again, contiguous."""


@dataclass
class Ledger:
    """Bytes by place. On CPU device and host are the same memory: this tells what would be where.

    Attributes:
        original_bytes: on the device, had nothing been packed.
        device_bytes: of packed forms on the device now.
        host_bytes: of packed forms in host memory now.
        peak_original_bytes, peak_device_bytes, peak_host_bytes: the most of each so far.
        packed: tensors packed so far.
        shared: times that a packed tensor was asked for again.
    """

    original_bytes: int = 0
    device_bytes: int = 0
    host_bytes: int = 0
    peak_original_bytes: int = 0
    peak_device_bytes: int = 0
    peak_host_bytes: int = 0
    packed: int = 0
    shared: int = 0

    def add(self, original: int, device: int, host: int) -> None:
        """Enter a packed tensor; negative sizes take it out."""
        self.original_bytes += original
        self.device_bytes += device
        self.host_bytes += host
        self.peak_original_bytes = max(self.peak_original_bytes, self.original_bytes)
        self.peak_device_bytes = max(self.peak_device_bytes, self.device_bytes)
        self.peak_host_bytes = max(self.peak_host_bytes, self.host_bytes)


@dataclass(frozen=True)
class PackedActivations:
    """Cells whose saved tensors are packed.

    Attributes:
        ledger: bytes by place.
        cells: path in the model -> cell.
    """

    ledger: Ledger
    cells: dict[str, nn.Cell]
    replacements: tuple[Replacement, ...]

    def remove(self) -> None:
        """Save tensors as they are again. What is packed now can still be unpacked."""
        for replacement in self.replacements:
            replacement.remove()


def pack_activations(
    model: nn.Cell, codec: Codec, *, cells: str | Sequence[str] | None, min_bytes: int
) -> PackedActivations:
    """Keep by `codec` what cells of `model` save; see the module for what is packed.

    Args:
        model: any model.
        codec: the form.
        cells: patterns of paths (``*`` matches dots too); None: the blocks of the model. Where one chosen
            cell lies within another, the inner one's packing takes its tensors.
        min_bytes: smaller tensors are saved as they are.

    Raises:
        UserError: a pattern matches no cell, a cell is packed already, or it lies within a recomputed one.
    """
    chosen = find_blocks(model) if cells is None else _matching(model, cells)
    _check_outside(model, chosen)
    inside = {id(param) for cell in chosen.values() for param in cell.get_parameters()}
    outside = [param for param in model.get_parameters() if id(param) not in inside]
    ledger = Ledger()
    replacements: list[Replacement] = []
    with ExitStack() as undo:  # all or nothing
        for cell in chosen.values():
            params = [*cell.get_parameters(), *outside]
            present = replacement_of(cell)
            saves = (lambda: True) if present is None else present.saves
            run = _Packing(cell.construct, saves, codec, params, min_bytes, ledger)
            replacements.append(replace_construct(cell, "packed", run))
            undo.callback(replacements[-1].remove)
        undo.pop_all()
    return PackedActivations(ledger, chosen, tuple(replacements))


def _check_outside(model: nn.Cell, cells: dict[str, nn.Cell]) -> None:
    recomputed = [path for path, cell in model.cells_and_names() if is_recomputed(cell)]
    for path, cell in cells.items():
        outer = next((other for other in recomputed if path.startswith(f"{other}.")), None)
        if outer is not None:
            raise UserError(
                f"memory: {path} ({type(cell).__name__}) lies within {outer}, which is recomputed: "
                f"pack that one"
            )


def _matching(model: nn.Cell, patterns: str | Sequence[str]) -> dict[str, nn.Cell]:
    patterns = [patterns] if isinstance(patterns, str) else patterns
    cells = {path: cell for path, cell in model.cells_and_names() if path}
    found: dict[str, nn.Cell] = {}
    for pattern in patterns:
        matches = {path: cell for path, cell in cells.items() if fnmatchcase(path, pattern)}
        if not matches:
            example = list(cells)[-1]
            raise UserError(
                f"memory: no cell of {type(model).__name__} matches {pattern!r}: paths look like {example!r}"
            )
        found |= matches
    return found


class _Packed:
    """One tensor in its kept form, for all operators that saved it."""

    def __init__(self, tensor: Tensor, codec: Codec, ledger: Ledger) -> None:
        self._codec, self._ledger = codec, ledger
        self._kept, device, host = codec.encode(tensor)
        self._bytes = tensor.nbytes, device, host
        self._waiting = 0
        self._tensor: Tensor | None = None
        ledger.packed += 1
        ledger.add(*self._bytes)

    def save(self) -> _Packed:
        self._waiting += 1
        return self

    def unpack(self) -> Tensor:
        tensor = self._codec.decode(self._kept) if self._tensor is None else self._tensor
        self._waiting -= 1
        self._tensor = tensor if self._waiting > 0 else None
        return tensor

    def __del__(self) -> None:
        self._ledger.add(*[-size for size in self._bytes])


@dataclass(frozen=True)
class _Current:
    """What a parameter holds when backward comes to it."""

    param: Parameter

    def unpack(self) -> Tensor:
        return self.param.data


@dataclass(frozen=True)
class _AsItIs:
    tensor: Tensor

    def unpack(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True)
class _Packing:
    """Runs a construct whose saved tensors are packed."""

    construct: Construct
    saves: Callable[[], bool]
    codec: Codec
    params: Sequence[Parameter]
    min_bytes: int
    ledger: Ledger

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not (is_recording() and self.saves()):
            return self.construct(*args, **kwargs)
        tensors, _ = flatten((args, kwargs))
        session = _Session(self, [tensor for tensor in tensors if not needs_gradient(tensor)])
        with ms.saved_tensors_hooks(session.pack, lambda saved: saved.unpack()):
            outputs = self.construct(*args, **kwargs)
        session.end()
        return outputs


class _Session:
    """The saving of one call."""

    def __init__(self, packing: _Packing, shared: Iterable[Tensor]) -> None:
        self._packing = packing
        self._shared = {tensor.data_ptr() for tensor in shared}
        self._found: dict[tuple, tuple[Tensor, _Packed]] = {}

    def end(self) -> None:
        """Let go of the tensors themselves."""
        self._found.clear()

    def pack(self, tensor: Tensor) -> _Packed | _Current | _AsItIs:
        param = self._param_of(tensor)
        if param is not None:
            same = param.shape == tensor.shape and param.dtype == tensor.dtype
            return _Current(param) if same else _AsItIs(tensor.data)
        if not self._is_worth(tensor):
            return _AsItIs(tensor.data)
        key = (tensor.data_ptr(), tensor.shape, tensor.strides, tensor.dtype)
        if key in self._found:
            self._packing.ledger.shared += 1
        else:
            packed = _Packed(tensor, self._packing.codec, self._packing.ledger)
            self._found[key] = tensor.data, packed
        return self._found[key][1].save()

    def _param_of(self, tensor: Tensor) -> Parameter | None:
        address = tensor.data_ptr()
        return next((param for param in self._packing.params if param.data_ptr() == address), None)

    def _is_worth(self, tensor: Tensor) -> bool:
        large = tensor.nbytes >= self._packing.min_bytes and tensor.data_ptr() not in self._shared
        return large and self._packing.codec.takes(tensor)
