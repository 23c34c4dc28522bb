"""Which layouts the search looks at: all degrees, micro batches and schedules, less what cannot win.

A skeleton fixes the degrees, the micro batch and the schedule. Its variants differ in what is sharded,
recomputed and offloaded. Left out, as another layout is at least as fast and as small: tensor parallelism
across nodes; micro batches that do not divide the batch; gpipe (1f1b holds less in the same time); stage 0
beside data parallelism (stage 1 sends as much and keeps less); selective recompute where attention is fused
(it has nothing left to drop).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from ms_zero.plan.layout import MIXED, Layout, Precision
from ms_zero.plan.shapes import ModelShape

# Fewer tokens than this on a context-parallel rank leave nothing to hide its ring behind.
_LEAST_TOKENS_OF_CP_RANK = 4096
_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
_MOST_VIRTUAL_STAGES = 8


@dataclass(frozen=True, kw_only=True)
class Space:
    """Bounds of a search.

    Args:
        devices: all devices.
        seq_len: tokens of a sample.
        global_batch_size: samples of an optimizer step.
        devices_per_node: devices that share the fast links; tensor parallelism stays inside.
        precision: bytes per element.
        schedules: pipeline schedules to consider.
        offload: whether host memory may be used.

    """

    devices: int
    seq_len: int
    global_batch_size: int
    devices_per_node: int
    precision: Precision = MIXED
    # Not zb-h1: the engine runs it and saves the time that the formula says with layers that sleep, but on no
    # device has that been seen with real ones yet.
    schedules: tuple[str, ...] = ("1f1b", "interleaved")
    offload: bool = True


@dataclass(frozen=True, kw_only=True)
class Offload:
    """What lives in host memory."""

    optimizer: float = 0.0
    parameters: bool = False
    activations: bool = False


RECOMPUTE = (("none", 1), ("every_k", 4), ("every_k", 2), ("full", 1))
"""Kinds of recompute and group sizes, from quickest to smallest."""

OFFLOAD = (
    Offload(),
    Offload(optimizer=0.5),
    Offload(optimizer=1.0),
    Offload(activations=True),
    Offload(optimizer=1.0, activations=True),
    Offload(optimizer=1.0, activations=True, parameters=True),
)
"""Uses of host memory, what keeps the activations on the device first; the last needs least."""


def skeletons(shape: ModelShape, space: Space) -> Iterator[Layout]:
    """Every combination of degrees, micro batch and schedule, in its quickest variant."""
    for tp in _tensor_degrees(shape, space):
        for pp in divisors(space.devices // tp):
            if pp > shape.num_layers:
                break
            for cp in _context_degrees(space, space.devices // tp // pp):
                dp = space.devices // tp // pp // cp
                if space.global_batch_size % dp:
                    continue
                for ep in _expert_degrees(shape, dp * cp):
                    yield from _batches(shape, space, tp, pp, cp, ep, dp)


def zero_variants(layout: Layout, space: Space) -> Iterator[Layout]:
    """What data-parallel ranks shard: stages 1 to 3, and stage 3 within a node, replicated between nodes."""
    yield layout
    if layout.dp * layout.cp == 1:
        return
    yield layout.replace(zero_stage=2)
    yield layout.replace(zero_stage=3)
    near = space.devices_per_node // (layout.tp * layout.cp)
    if 1 < near < layout.dp and layout.dp % near == 0 and (near * layout.cp) % layout.ep == 0:
        yield layout.replace(zero_stage=3, dp_shard=near, dp_replicate=layout.dp // near)


def recompute_choices(layout: Layout) -> tuple[tuple[str, int], ...]:
    """Of RECOMPUTE what the engine does under a schedule.

    A pipeline recomputes all blocks of a stage or none.
    """
    return RECOMPUTE if layout.pp == 1 else (RECOMPUTE[0], RECOMPUTE[-1])


def variants(layout: Layout, space: Space) -> Iterator[Layout]:
    """Everything that a skeleton may shard, recompute and offload."""
    for base in zero_variants(layout, space):
        for offload in OFFLOAD if space.offload else OFFLOAD[:1]:
            for kind, every in recompute_choices(layout):
                yield with_offload(base.replace(recompute=kind, recompute_every=every), offload)


def skeleton_of(layout: Layout) -> Layout:
    """The skeleton that a layout is a variant of."""
    return layout.replace(
        zero_stage=min(1, layout.zero_stage),
        dp_shard=layout.dp,
        dp_replicate=1,
        recompute="none",
        recompute_every=1,
        optimizer_offload=0.0,
        activation_offload=False,
        parameter_offload=False,
    )


def smallest(layout: Layout, space: Space) -> tuple[Layout, ...]:
    """Variants of a skeleton of which one needs about the least device memory.

    With few ranks to shard over, what stage 3 gathers may cost more than it saves; with activations on the
    host, recompute may save nothing more and still need room to rebuild a layer.
    """
    kind, every = recompute_choices(layout)[-1]
    found: list[Layout] = []
    for stage in (3, 1) if layout.dp * layout.cp > 1 else (0,):
        plain = layout.replace(zero_stage=stage)
        full = plain.replace(recompute=kind, recompute_every=every)
        found += [with_offload(each, OFFLOAD[-1]) for each in (full, plain)] if space.offload else [full]
    return tuple(found)


def with_offload(layout: Layout, offload: Offload) -> Layout:
    """Apply a use of host memory; weights move there only where they are sharded."""
    return layout.replace(
        optimizer_offload=offload.optimizer,
        activation_offload=offload.activations,
        parameter_offload=offload.parameters and layout.zero_stage == 3,
    )


@lru_cache(maxsize=1024)
def divisors(number: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    small = [each for each in range(1, int(number**0.5) + 1) if number % each == 0]
    return tuple(sorted({*small, *(number // each for each in small)}))


def _tensor_degrees(shape: ModelShape, space: Space) -> Iterator[int]:
    for tp in divisors(space.devices):
        alone = Layout(seq_len=space.seq_len, tp=tp, sequence_parallel=tp > 1)
        if space.devices_per_node % tp == 0 and not alone.violations(shape):
            yield tp


def _context_degrees(space: Space, left: int) -> Iterator[int]:
    yield 1
    for cp in divisors(left)[1:]:
        if space.seq_len // cp < _LEAST_TOKENS_OF_CP_RANK:
            return
        if space.seq_len % (2 * cp) == 0:
            yield cp


def _expert_degrees(shape: ModelShape, fold: int) -> tuple[int, ...]:
    if not shape.is_moe:
        return (1,)
    return tuple(ep for ep in divisors(shape.num_experts) if fold % ep == 0)


def _batches(
    shape: ModelShape, space: Space, tp: int, pp: int, cp: int, ep: int, dp: int
) -> Iterator[Layout]:
    share = space.global_batch_size // dp
    for micro in _MICRO_BATCHES:
        if share % micro:
            continue
        microbatches = share // micro
        for schedule, virtual in _schedules(shape, space, pp, microbatches):
            yield Layout(
                seq_len=space.seq_len,
                tp=tp,
                pp=pp,
                cp=cp,
                ep=ep,
                dp_shard=dp,
                zero_stage=1 if dp * cp > 1 else 0,
                micro_batch_size=micro,
                microbatches=microbatches,
                schedule=schedule,
                virtual_stages=virtual,
                sequence_parallel=tp > 1 and space.seq_len // cp % tp == 0,
                precision=space.precision,
            )


def _schedules(
    shape: ModelShape, space: Space, pp: int, microbatches: int
) -> Iterator[tuple[str, int]]:
    if pp == 1:
        yield "1f1b", 1
        return
    for schedule in space.schedules:
        if schedule != "interleaved":
            yield schedule, 1
        elif microbatches % pp == 0:
            for virtual in range(2, min(_MOST_VIRTUAL_STAGES, shape.num_layers // pp) + 1):
                # Uneven chunks undo what interleaving gains.
                if shape.num_layers % (pp * virtual) == 0 or virtual == 2:
                    yield schedule, virtual
