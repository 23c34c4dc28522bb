"""Searches all layouts of a model on a cluster for the fastest that fit.

Branch and bound. The quickest variant of a skeleton bounds all its variants, so skeletons are visited in that
order until none can enter the list any more. Within a skeleton, more recompute and more offload never make a
step shorter nor its memory larger: for each use of host memory only the least recompute that fits is of
interest. Only where activations are on the host, recompute may also save transfers, and every kind is tried.
Closed forms decide; the best are then run event by event and ranked again.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from ms_zero.plan.candidates import (
    OFFLOAD,
    RECOMPUTE,
    Offload,
    Space,
    recompute_choices,
    skeleton_of,
    skeletons,
    smallest,
    variants,
    with_offload,
    zero_variants,
)
from ms_zero.plan.layout import Layout
from ms_zero.plan.report import MemoryReport, TimeReport
from ms_zero.plan.shapes import ModelShape
from ms_zero.plan.time import TimeModel

_SLACK = 1.05

SIMULATED = 20
"""Layouts that are run event by event."""


class Memory(Protocol):
    """What the search asks of a memory model."""

    def peak(self, layout: Layout) -> float:
        """Bytes of the fullest device."""
        ...

    def report(self, layout: Layout) -> MemoryReport:
        """Every stage, part by part, host memory included."""
        ...


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Bytes that a layout may use.

    Args:
        device: of each device.
        host: of each device's share of its host; 0: nothing can be offloaded.

    """

    device: float
    host: float = 0.0

    def admits(self, memory: Memory, layout: Layout, peak: float) -> bool:
        """Say whether a layout fits whose device memory is ``peak``."""
        return peak <= self.device and self.admits_host(memory, layout)

    def admits_host(self, memory: Memory, layout: Layout) -> bool:
        """Say whether what a layout offloads fits into the host."""
        offloads = layout.optimizer_offload or layout.activation_offload or layout.parameter_offload
        return not offloads or memory.report(layout).host_peak <= self.host


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A layout that fits, and what is predicted for it."""

    layout: Layout
    time: TimeReport
    memory: float


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search found.

    Args:
        best: fastest first, every pipeline run event by event.
        skeletons: combinations of degrees, micro batch and schedule that exist.
        visited: of those, the ones whose variants were looked at; the others are slower than ``best``.
        estimated: layouts whose time was predicted.

    """

    best: tuple[Candidate, ...]
    skeletons: int
    visited: int
    estimated: int


def search(
    shape: ModelShape,
    time: TimeModel,
    memory: Memory,
    space: Space,
    capacity: Capacity,
    count: int = SIMULATED,
) -> Found:
    """Find the ``count`` fastest layouts that fit into ``capacity``.

    At most one variant of a skeleton is kept: the fastest.
    """
    bounds = sorted(
        (
            (time.step_seconds(layout), number, layout)
            for number, layout in enumerate(skeletons(shape, space))
        ),
        key=lambda entry: entry[:2],
    )
    best: list[tuple[float, int, Candidate]] = []
    visited = estimated = 0
    for bound, number, layout in bounds:
        if len(best) == count and bound >= -best[0][0]:
            break
        visited += 1
        limit = -best[0][0] if len(best) == count else float("inf")
        candidate, tried = quickest_variant(layout, time, memory, space, capacity, limit)
        estimated += tried
        if candidate is not None:
            heapq.heappush(best, (-candidate.time.step, -number, candidate))
            if len(best) > count:
                heapq.heappop(best)
    exact = [replace(each, time=time.simulate(each.layout)) for _, _, each in best]
    exact.sort(key=lambda each: (each.time.step, complexity(each.layout)))
    return Found(
        best=tuple(exact), skeletons=len(bounds), visited=visited, estimated=len(bounds) + estimated
    )


def quickest_variant(
    layout: Layout,
    time: TimeModel,
    memory: Memory,
    space: Space,
    capacity: Capacity,
    limit: float = float("inf"),
) -> tuple[Candidate | None, int]:
    """Find the fastest variant of a skeleton that fits and takes less than ``limit`` seconds.

    Returns it, or None, and the number of layouts whose time was predicted.
    """
    # Other variants may be a little smaller than these.
    if all(memory.peak(least) > _SLACK * capacity.device for least in smallest(layout, space)):
        return None, 0
    found: tuple[Layout, float] | None = None
    tried = 0
    offloads = OFFLOAD if space.offload and capacity.host else OFFLOAD[:1]
    for base in zero_variants(layout, space):
        kinds = tuple(range(len(recompute_choices(layout))))
        left = {False: kinds, True: kinds}
        for offload in offloads:
            tried += 1
            if time.step_seconds(with_offload(base, replace(offload, activations=False))) >= limit:
                continue
            fitting = []
            for kind, variant, peak in _fitting(base, offload, memory, capacity, left[offload.activations]):
                fitting.append(kind)
                step = time.step_seconds(variant)
                tried += 1
                if step < limit and capacity.admits_host(memory, variant):
                    found, limit = (variant, peak), step
                if not offload.activations:
                    break
            left[offload.activations] = _left(left[offload.activations], fitting, offload)
    if found is None:
        return None, tried
    return Candidate(layout=found[0], time=time.estimate(found[0]), memory=found[1]), tried


def plainer_variant(
    candidate: Candidate, time: TimeModel, memory: Memory, space: Space, capacity: Capacity, limit: float
) -> Candidate:
    """The simplest variant of a candidate's skeleton that fits and takes at most ``limit`` seconds.

    The search keeps the fastest variant of a skeleton alone: it may use the host for little.
    """
    best, least = candidate, complexity(candidate.layout)
    for variant in variants(skeleton_of(candidate.layout), space):
        if complexity(variant) >= least or time.step_seconds(variant) > limit:
            continue
        peak = memory.peak(variant)
        if not capacity.admits(memory, variant, peak):
            continue
        report = time.simulate(variant)
        if report.step <= limit:
            best, least = Candidate(layout=variant, time=report, memory=peak), complexity(variant)
    return best


def trade_offs(
    found: Found, time: TimeModel, memory: Memory, space: Space, capacity: Capacity
) -> list[tuple[float, float, Layout]]:
    """Every variant of what was found that fits: bytes, tokens per second and device, layout."""
    points = []
    for skeleton in dict.fromkeys(skeleton_of(each.layout) for each in found.best):
        for variant in variants(skeleton, space):
            peak = memory.peak(variant)
            if capacity.admits(memory, variant, peak):
                rate = variant.tokens_per_step / variant.devices / time.step_seconds(variant)
                points.append((peak, rate, variant))
    return points


def _fitting(
    base: Layout, offload: Offload, memory: Memory, capacity: Capacity, kinds: tuple[int, ...]
) -> Iterator[tuple[int, Layout, float]]:
    """Kinds of recompute with which a variant fits into a device, least first: number, layout, bytes."""
    choices = recompute_choices(base)
    for number in kinds:
        kind, every = choices[number]
        variant = with_offload(base.replace(recompute=kind, recompute_every=every), offload)
        peak = memory.peak(variant)
        if peak <= capacity.device:
            yield number, variant, peak


def _left(kinds: tuple[int, ...], fitting: list[int], offload: Offload) -> tuple[int, ...]:
    """Kinds that may still win with more offload, which never makes a step of the same kind shorter."""
    if offload.activations:
        return tuple(kind for kind in kinds if kind not in fitting)
    return tuple(kind for kind in kinds if kind < min(fitting, default=len(RECOMPUTE)))


def smallest_peaks(
    shape: ModelShape, memory: Memory, space: Space
) -> Iterator[tuple[float, Layout]]:
    """The least memory of every skeleton with a micro batch of 1, as (bytes, layout)."""
    for layout in skeletons(shape, space):
        if layout.micro_batch_size == 1 and layout.schedule == "1f1b":
            for least in smallest(layout, space):
                yield memory.peak(least), least


def complexity(layout: Layout) -> tuple[int, ...]:
    """Orders layouts of equal speed: fewer axes and uses of the host, less recompute, a plainer schedule."""
    axes = sum(degree > 1 for degree in (layout.pp, layout.tp, layout.cp, layout.ep, layout.dp_replicate))
    offload = bool(layout.optimizer_offload) + layout.activation_offload + layout.parameter_offload
    return axes + offload, offload, layout.recompute != "none", layout.schedule != "1f1b", layout.zero_stage

