"""Reduction of gradients: from what backward delivers on each rank to each rank's chunk of the sum.

A bucket's gradient of a microbatch is complete when the backward of all units with a parameter in it has
ended; a parameter that got none by then counts as zero, whatever the reason. What happens next depends:

- synchronised: the bucket is reduce-scattered at once, its full gradient is freed, and this rank's chunk is
  added to the reduced gradient of the step. Gradients exist only as shards, plus the buckets under way.
- not synchronised: the full gradient is added to what this rank holds; the last microbatch reduces that.

A microbatch may concern some of the buckets only: a rank of a pipeline with several stages runs one of them
at a time, and reduces that one's.

Reduce-scatter sums in rank order at the owner, so the sum of an element does not depend on which bucket it
lies in: stages agree bitwise. Chunks that other ranks hold too are summed over them once per step: with
replicas of the shard group (HSDP), and where ranks that share the data have parts of the sum (sequence
parallelism).

Every rank must issue the same collectives in the same order, though ranks may leave different parameters
unused. Stages 0 to 2 therefore issue buckets in one fixed order. Stage 3 issues them as units end, between
the gathers of the units, which all ranks run in one order anyway.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence

import mindspore as ms
from mindspore import Tensor

from ms_zero.comm import Communicator, Group, Handle
from ms_zero.errors import UserError
from ms_zero.zero.bucket import Bucket
from ms_zero.zero.convert import as_dtype

# Reductions under way at once: enough to hide one behind the other, few enough to bound what they hold.
_MAX_IN_FLIGHT = 2

# States of the gradient of a step; those that an operation may refuse say why.
_EMPTY = "the step has no gradient: call backward(loss) before the optimizer's step"
_PARTIAL = "the gradient of the step is not complete: pass last=True with its last microbatch"
_BROKEN = "a microbatch of this step failed: call drop_gradients() and repeat the whole step"
_COMPLETE, _REDUCED = "complete", "reduced"


class GradientReducer:
    """Follows the gradients of one model through the microbatches of a step."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        units_of: Sequence[frozenset[int]],
        *,
        comm: Communicator,
        partial_groups: Sequence[Sequence[Group]],
        wire_dtype: ms.Type,
        kept_dtype: ms.Type,
        synchronise: bool,
        in_order: bool,
    ) -> None:
        """Start with no gradient.

        Args:
            buckets: with trained parameters, in the order in which backward is expected to finish them; each
                is reduced over its own groups.
            units_of: per bucket the numbers of the units that have a parameter in it.
            comm: the communicator.
            partial_groups: per bucket further groups of ranks that own the same chunk, each with a part of
                the gradient's sum.
            wire_dtype: of a reduction.
            kept_dtype: of gradients kept between microbatches and until the update.
            synchronise: whether each microbatch is reduced, or only their sum in the last one.
            in_order: whether buckets are issued in the order given.
        """
        self.buckets = list(buckets)
        self._units_of = list(units_of)
        self._comm = comm
        replicas = [bucket.groups.replica for bucket in self.buckets]
        pairs = zip(replicas, partial_groups, strict=True)
        self._sum_groups = [[replica] * (replica.size > 1) + list(groups) for replica, groups in pairs]
        self._wire_dtype, self._kept_dtype = wire_dtype, kept_dtype
        self._synchronise, self._in_order = synchronise, in_order
        self._is_last = False
        self._state = _EMPTY
        self._in_microbatch = False
        self._active = list(range(len(self.buckets)))
        self._waiting_for: list[set[int]] = [set() for _ in self.buckets]
        self._deliveries: dict[int, int] | None = None  # still to come, by bucket; None: units say when
        self._complete: set[int] = set()  # not yet issued
        self._issued: set[int] = set()
        self._in_flight: deque[tuple[Bucket, Handle[Tensor]]] = deque()
        #: The most bytes of gradients that were kept at the end of a microbatch so far.
        self.most_bytes = 0

    def begin(self, *, last: bool, active: Collection[int] | None = None) -> None:
        """Start a microbatch.

        Args:
            last: whether the step has no further one.
            active: numbers of the buckets that it concerns; None: all.

        Raises:
            UserError: an earlier one of the step failed, or the step is reduced already.
        """
        self._refuse(_BROKEN)
        if self._state == _REDUCED:
            raise UserError(
                "zero: the gradient of the step is reduced already: update, or call drop_gradients(), before "
                "a further microbatch"
            )
        self._is_last, self._in_microbatch, self._state = last, True, _BROKEN  # until it has ended
        everything = range(len(self.buckets))
        if active is None or (last and not self._synchronise):  # the sums of the others are reduced as well
            active = everything
        self._active = sorted(active)
        self._waiting_for = [set(self._units_of[i]) if i in active else set() for i in everything]
        self._deliveries = None
        self._complete.clear()
        self._issued.clear()

    def expect(self, deliveries: Mapping[int, int]) -> None:
        """Let buckets be complete after so many gradients, instead of when their units end.

        Follows :meth:`begin`. What is not named gets none.
        """
        for units in self._waiting_for:
            units.clear()
        self._deliveries = {index: count for index, count in deliveries.items() if count}
        self._complete.update(index for index in self._active if index not in self._deliveries)
        self._issue()

    def deliver(self, index: int, name: str, grad: Tensor) -> None:
        """Take a gradient.

        Raises:
            UserError: no microbatch is open, or the parameter's unit has ended: it is also used outside the
                cells of its unit.
        """
        if not self._in_microbatch:
            raise UserError(
                f"zero: parameter {name} got a gradient outside of a microbatch: take gradients by "
                f"model.backward(loss), or inside `with model.microbatch(last=...)`"
            )
        if index in self._complete or index in self._issued:
            raise UserError(
                f"zero: parameter {name} got a gradient after the backward of its unit had ended: it is used "
                f"outside of the cell that holds it, or by a recomputed cell that runs more than once (leave "
                f"this cell to the root unit), or recompute() was not given the enclosing cells"
            )
        if index not in self._active:
            raise UserError(
                f"zero: parameter {name} got a gradient in a microbatch of another stage of its rank: it is "
                f"used outside of the stage that holds it"
            )
        self.buckets[index].deliver(name, grad)
        if self._deliveries is not None:
            self._deliveries[index] -= 1
            if not self._deliveries[index]:
                self._complete.add(index)
                self._issue()

    def end_unit(self, unit: int) -> None:
        """The backward of a unit is over in this microbatch."""
        for index, units in enumerate(self._waiting_for):
            if unit in units:
                units.remove(unit)
                if not units:
                    self._complete.add(index)
        self._issue()

    def end(self) -> None:
        """Backward is over: what is missing counts as zero."""
        for index, units in enumerate(self._waiting_for):
            if units:
                units.clear()
                self._complete.add(index)
        self._issue()
        assert len(self._issued) == len(self._active)
        self._in_microbatch = False
        self._state = _COMPLETE if self._is_last else _PARTIAL
        self.most_bytes = max(self.most_bytes, self._kept_bytes())

    def abandon(self) -> None:
        """The microbatch failed: what the step has gathered so far is of no use."""
        self.drop()
        self._state = _BROKEN

    def drop(self) -> None:
        """Forget the gradients of the step."""
        while self._in_flight:
            self._in_flight.popleft()[1].wait()
        for bucket in self.buckets:
            bucket.drop_gradients()
        self._in_microbatch, self._state = False, _EMPTY

    def finish(self) -> None:
        """Wait for the reductions of the step and sum the chunks over the replicas; once.

        Raises:
            UserError: the step has no gradient, or not all of it.
        """
        self._refuse(_BROKEN, _PARTIAL)
        if self._state == _REDUCED:
            return
        while self._in_flight:
            self._collect()
        if any(bucket.reduced is None for bucket in self.buckets):
            self._refuse(_EMPTY)
        self._state = _REDUCED
        for bucket, groups in zip(self.buckets, self._sum_groups, strict=True):
            for group in groups:
                wire = as_dtype(bucket.reduced, self._wire_dtype)
                bucket.reduced = as_dtype(self._comm.all_reduce(wire, group), self._kept_dtype)

    def held_bytes(self) -> int:
        """Bytes of gradients, chunks whose reduction is under way included."""
        return self._kept_bytes() + self._chunk_bytes(
            bucket for bucket, _ in self._in_flight if bucket.reduced is not None
        )

    def _kept_bytes(self) -> int:
        """The same without chunks on their way to be added to others."""
        new = self._chunk_bytes(bucket for bucket, _ in self._in_flight if bucket.reduced is None)
        return new + sum(bucket.buffers()["gradients"] for bucket in self.buckets)

    def _chunk_bytes(self, buckets: Iterable[Bucket]) -> int:
        size = 4 if self._wire_dtype == ms.float32 else 2
        return sum(size * (bucket.chunk[1] - bucket.chunk[0]) for bucket in buckets)

    def _refuse(self, *states: str) -> None:
        if self._state in states:
            raise UserError(f"zero: {self._state}")

    def _issue(self) -> None:
        while self._complete:
            index = self._active[len(self._issued)] if self._in_order else min(self._complete)
            if index not in self._complete:
                return
            self._complete.remove(index)
            self._issued.add(index)
            self._finish(self.buckets[index])

    def _finish(self, bucket: Bucket) -> None:
        if self._synchronise:
            self._reduce(bucket, bucket.flatten(self._wire_dtype))
            return
        flat = bucket.flatten(self._kept_dtype)
        bucket.held = flat if bucket.held is None else bucket.held + flat
        if self._is_last:
            total, bucket.held = bucket.held, None
            self._reduce(bucket, as_dtype(total, self._wire_dtype))

    def _reduce(self, bucket: Bucket, flat: Tensor) -> None:
        self._in_flight.append((bucket, self._comm.reduce_scatter_async(flat, bucket.groups.shard)))
        while len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._collect()

    def _collect(self) -> None:
        bucket, handle = self._in_flight.popleft()
        chunk = as_dtype(handle.wait(), self._kept_dtype)
        bucket.reduced = chunk if bucket.reduced is None else bucket.reduced + chunk
