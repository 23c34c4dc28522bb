"""When a unit's parameters are whole: windows around its forward and its backward.

Roles of the tensors a Parameter shows:

- resting: outside windows. Under stage 3 a placeholder of one element, which is not a number, so that no
  use of it goes unnoticed; else a part of the bucket's store.
- working: inside a window. A part of full, cast to the dtype that the device computes in where that differs
  from the stored one. The cast is made anew in each window instead of once: otherwise a second copy of all
  weights would linger. Backward reads it through the Parameter: autograd saves that, not its value.

Events come from cell hooks, in the order of execution: before forward (open, gather what the next unit
needs), after forward (close), before backward (open again), after backward (close; the unit's gradients are
complete). A cell that is recomputed runs its second forward between the last two, with the weights of that
window; when several units are recomputed as one, each opens in the second forward and stays open until its
backward has ended.

Several graphs may be recorded before the first has its backward (microbatches of a pipeline). A backward
of a unit is over when it ended as often as the unit ran forward in the graph, see :meth:`Windows.select`.

A unit of several cells stays open from its first to its last one. What is gathered ahead is what the last
complete pass opened next, as long as this one takes the same course; the first pass gathers on demand. What
was gathered ahead does not outlive its pass: it might be used after an update.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from ms_zero._compat import finish_queued, function_class, is_recording
from ms_zero.comm import Communicator, Handle
from ms_zero.errors import UserError
from ms_zero.memory.tree import flatten, unflatten
from ms_zero.zero.bucket import Bucket
from ms_zero.zero.convert import as_dtype, part_of
from ms_zero.zero.layout import Slot


@dataclass(frozen=True)
class Place:
    """One parameter of a unit: where it lies and what it shows.

    Attributes:
        param: the parameter.
        resting: what it shows outside windows.
        bucket: where it is stored.
        slot: its range there.
        working: dtype inside a window.
        grid: dtype to whose values it is rounded first, or None.
    """

    param: Parameter
    resting: Tensor
    bucket: Bucket
    slot: Slot
    working: ms.Type
    grid: ms.Type | None

    @property
    def needs_window(self) -> bool:
        """Whether working and resting differ."""
        return self.bucket.is_sharded or self.grid is not None or self.working != self.bucket.dtype

    def show(self, full: Tensor) -> None:
        """Set the parameter to the working form of its part of full."""
        value = part_of(full, self.slot)
        if self.grid is not None:
            value = as_dtype(value, self.grid)
        self.param.data = as_dtype(value, self.working)


@dataclass
class Unit:
    """Cells with one window, and its state."""

    number: int
    name: str
    cells: tuple[nn.Cell, ...]
    places: tuple[Place, ...]
    is_open: bool = False
    gathers: list[Handle[Tensor]] = field(default_factory=list)
    ran: set[int] = field(default_factory=set)
    ended: int = 0  # backwards that have ended in this pass

    @property
    def buckets(self) -> list[Bucket]:
        """Buckets with its parameters, each once."""
        return list({id(place.bucket): place.bucket for place in self.places}.values())

    @property
    def sharded_buckets(self) -> list[Bucket]:
        """Those of them that have to be gathered."""
        return [bucket for bucket in self.buckets if bucket.is_sharded]


class Windows:
    """Opens and closes the windows of one model's units."""

    def __init__(
        self,
        root: nn.Cell,
        units: Sequence[Unit],
        *,
        comm: Communicator,
        reshard_after_forward: bool,
        prefetch: int,
        on_unit_end: Callable[[int], None],
    ) -> None:
        """Register hooks.

        Args:
            root: the model.
            units: all units; each parameter is a place of exactly one.
            comm: the communicator.
            reshard_after_forward: whether a recorded forward closes windows.
            prefetch: how many units are gathered ahead.
            on_unit_end: called with the unit's number when its backward in a microbatch is over.
        """
        self._units, self._comm = list(units), comm
        self._reshard_after_forward, self._prefetch = reshard_after_forward, prefetch
        self._on_unit_end = on_unit_end
        self._in_backward = False
        self._graph: Hashable = None
        # How often the units ran forward, recorded, by graph and number.
        self._calls: dict[Hashable, dict[int, int]] = {}
        # Numbers of the units in the order of this pass so far, and of the last complete one.
        self._current: list[int] = []
        self._recorded: dict[bool, list[int]] = {False: [], True: []}
        root.register_forward_pre_hook(self._begin_forward)
        for unit in self._units:
            for cell in unit.cells:
                self._register(unit, cell)
        root.register_forward_hook(self._end_of_forward)

    def select(self, graph: Hashable) -> None:
        """Say which of several recorded graphs the next forward or backward belongs to."""
        self._graph = graph

    def forget(self) -> None:
        """The selected graph has no further backward."""
        self._calls.pop(self._graph, None)

    def forget_all(self) -> None:
        """No graph has a further backward."""
        self._calls.clear()

    def close_all(self, *, complete: bool = True) -> None:
        """End a pass; one that was not complete says nothing about the next."""
        for unit in self._units:
            unit.ended = 0
            unit.ran.clear()
            self._close(unit)
        if not complete:
            self._current = []
        self._end_pass()
        self._in_backward = False

    def open_bytes(self) -> int:
        """Bytes of parameters that exist only because windows are open or being opened."""
        return sum(_shown_bytes(unit) for unit in self._units if unit.is_open or unit.gathers)

    def _register(self, unit: Unit, cell: nn.Cell) -> None:
        cell.register_forward_pre_hook(lambda *_: self._before(unit, backward=False))
        cell.register_forward_hook(lambda cell, inputs, output: self._after_forward(unit, cell, output))
        cell.register_backward_pre_hook(lambda *_: self._before(unit, backward=True))
        cell.register_backward_hook(lambda *_: self._after_backward(unit))

    def _before(self, unit: Unit, *, backward: bool) -> None:
        if backward and not self._in_backward:
            self._current.clear()
            self._in_backward = True
        if unit.is_open and self._current[-1:] == [unit.number]:
            return  # told twice of one run
        self._open(unit)
        position = len(self._current)
        self._current.append(unit.number)
        recorded = self._recorded[self._in_backward]
        if recorded[position : position + 1] == [unit.number]:
            for ahead in recorded[position + 1 : position + 1 + self._prefetch]:
                self._gather(self._units[ahead])

    def _begin_forward(self, *_: object) -> None:
        """Forget a forward that an exception broke off."""
        if self._current and not self._in_backward:
            self._current = []
            for unit in self._units:
                unit.ran.clear()
            self._end_pass()

    def _end_pass(self) -> None:
        for unit in self._units:
            for handle in unit.gathers:
                handle.wait()  # the shard that it reads may be written from now on
            unit.gathers.clear()
        if self._current:
            self._recorded[self._in_backward] = self._current
            self._current = []

    def _after_forward(self, unit: Unit, cell: nn.Cell, output: Any) -> Any:
        """End the window, and return an output whose backward opens it again."""
        if is_recording():
            calls = self._calls.setdefault(self._graph, {})
            calls[unit.number] = calls.get(unit.number, 0) + 1
        unit.ran.add(id(cell))
        if len(unit.ran) == len(unit.cells):
            self._end_forward_window(unit)
        if not is_recording() or not _is_nested(output):
            self._check_followed(unit, output)
            return None
        # The framework calls a backward-pre hook for tensors and flat tuples only.
        tensors, spec = flatten(output)
        return unflatten(iter(_Watched.apply(lambda: self._before(unit, backward=True), *tensors)), spec)

    def _check_followed(self, unit: Unit, output: Any) -> None:
        """Nothing would open the window for the backward of what an object hides."""
        is_opaque = hasattr(output, "__dict__") and not flatten(output)[0]
        if is_recording() and is_opaque and any(place.needs_window for place in unit.places):
            raise UserError(
                f"zero: {unit.name} returns a {type(output).__name__}, whose tensors cannot be followed: "
                f"return them in tuples, lists, dicts or dataclasses, or leave the cell to the root by wrap="
            )

    def _end_of_forward(self, *_: object) -> None:
        for unit in self._units:
            # The framework calls no forward hook of a cell with its own bprop: its window is still open.
            if unit.ran or (unit.is_open and not self._in_backward):
                self._end_forward_window(unit)
        if not self._in_backward:
            self._end_pass()

    def _end_forward_window(self, unit: Unit) -> None:
        unit.ran.clear()
        if not is_recording() or (self._reshard_after_forward and not self._in_backward):
            self._close(unit)

    def _after_backward(self, unit: Unit) -> None:
        unit.ended += 1
        if unit.ended == self._calls.get(self._graph, {}).get(unit.number):
            self._close(unit)
            self._on_unit_end(unit.number)

    def _gather(self, unit: Unit) -> None:
        if unit.is_open or unit.gathers:
            return
        for bucket in unit.sharded_buckets:
            unit.gathers.append(self._comm.all_gather_async(bucket.store, bucket.groups.shard))

    def _open(self, unit: Unit) -> None:
        if unit.is_open:
            return
        self._gather(unit)
        gathered = [handle.wait() for handle in unit.gathers]
        unit.gathers.clear()
        full = {id(bucket): bucket.store for bucket in unit.buckets}
        full |= zip((id(bucket) for bucket in unit.sharded_buckets), gathered, strict=True)
        finish_queued()  # an operation reads what its parameter shows when it runs, not when it was called
        for place in unit.places:
            if place.needs_window:
                place.show(full[id(place.bucket)])
        unit.is_open = True

    def _close(self, unit: Unit) -> None:
        if not unit.is_open:
            return
        finish_queued()
        for place in unit.places:
            if place.needs_window:
                place.param.data = place.resting
        unit.is_open = False


class _Watched(function_class):
    """Tensors as they are; calls a function before their backward."""

    @staticmethod
    def forward(ctx: Any, before: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.before = before
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*[tensor for tensor in tensors if not tensor.is_floating_point()])
        return tensors

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.before()
        return None, *grads


def _is_nested(output: Any) -> bool:
    parts = output if type(output) is tuple else (output,)
    return any(not isinstance(part, Tensor) and flatten(part)[0] for part in parts)


def _shown_bytes(unit: Unit) -> int:
    if unit.gathers:
        return sum(bucket.full_bytes for bucket in unit.sharded_buckets)
    return sum(place.param.data.nbytes for place in unit.places if place.needs_window)
