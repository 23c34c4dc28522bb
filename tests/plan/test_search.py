"""The search: exact against brute force, its assumptions, and closed forms against events."""

import random

import pytest

from ms_zero.hardware import load_device
from ms_zero.plan.candidates import (
    OFFLOAD,
    Space,
    divisors,
    recompute_choices,
    skeleton_of,
    skeletons,
    smallest,
    variants,
    with_offload,
    zero_variants,
)
from ms_zero.plan.memory import MemoryModel
from ms_zero.plan.models import load_model
from ms_zero.plan.planner import capacity_of
from ms_zero.plan.search import Capacity, search
from ms_zero.plan.time import TimeModel

DEVICE = load_device("ascend-910b")
CAPACITY = capacity_of(DEVICE)


class Case:
    def __init__(self, name, devices, seq_len, batch, **options):
        self.shape = load_model(name)
        self.time, self.memory = TimeModel(self.shape, DEVICE), MemoryModel(self.shape)
        self.space = Space(
            devices=devices, seq_len=seq_len, global_batch_size=batch, devices_per_node=8, **options
        )

    def variants(self, skeleton):
        return variants(skeleton, self.space)

    def search(self, capacity=CAPACITY, count=20):
        return search(self.shape, self.time, self.memory, self.space, capacity, count)


CASES = {
    "gpt3-13b": Case("gpt3-13b", 16, 2048, 32),
    "llama-70b": Case("llama-70b", 32, 4096, 32),
    "mixtral": Case("mixtral-8x7b", 32, 4096, 32, offload=False),
    "long": Case("llama3.1-8b", 16, 32768, 16, offload=False),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_search_finds_what_brute_force_finds(case):
    steps = []
    for skeleton in skeletons(case.shape, case.space):
        fitting = (
            case.time.estimate(layout).step
            for layout in case.variants(skeleton)
            if CAPACITY.admits(case.memory, layout, case.memory.peak(layout))
        )
        steps.append(min(fitting, default=float("inf")))
    found = case.search()
    assert found.best
    assert found.skeletons == len(steps)
    estimated = sorted(case.time.estimate(each.layout).step for each in found.best)
    assert estimated == pytest.approx(sorted(steps)[: len(estimated)])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_closed_forms_and_events_agree_on_what_was_found(case):
    for each in case.search().best:
        assert each.time.simulated
        assert case.time.estimate(each.layout).step == pytest.approx(each.time.step, rel=0.03)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_was_found_is_valid_and_trains_the_batch(case):
    for each in case.search().best:
        assert each.layout.violations(case.shape) == []
        assert each.layout.devices == case.space.devices
        assert each.layout.global_batch_size == case.space.global_batch_size
        assert each.memory == case.memory.peak(each.layout) <= CAPACITY.device


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_pruning_holds_what_it_assumes(case):
    choose = random.Random(3)
    every = list(skeletons(case.shape, case.space))
    for skeleton in choose.sample(every, min(40, len(every))):
        bound = case.time.estimate(skeleton).step
        least = min(map(case.memory.peak, smallest(skeleton, case.space)))
        for layout in case.variants(skeleton):
            assert case.time.estimate(layout).step >= bound - 1e-9
            assert case.memory.peak(layout) >= least / 1.05
        for base in zero_variants(skeleton, case.space):
            for offload in (each for each in OFFLOAD if not each.activations):
                kinds = [
                    with_offload(base.replace(recompute=kind, recompute_every=every), offload)
                    for kind, every in recompute_choices(base)
                ]
                steps = [case.time.estimate(layout).step for layout in kinds]
                assert steps == sorted(steps)


def test_more_memory_is_never_slower():
    case = CASES["llama-70b"]
    best = []
    for size in (40e9, 65e9, 100e9):
        found = case.search(Capacity(device=size, host=CAPACITY.host), count=1)
        best.append(min((case.time.estimate(each.layout).step for each in found.best), default=float("inf")))
    assert best == sorted(best, reverse=True)


def test_host_memory_is_respected():
    case = CASES["llama-70b"]
    for each in case.search(Capacity(device=65e9, host=10e9)).best:
        assert case.memory.report(each.layout).host_peak <= 10e9
    for each in case.search(Capacity(device=65e9)).best:
        assert not each.layout.optimizer_offload


def test_nothing_fits_where_nothing_can():
    found = CASES["llama-70b"].search(Capacity(device=1e9))
    assert found.best == ()
    assert found.visited == found.skeletons


def test_degrees_stay_where_they_may():
    for case in CASES.values():
        for layout in skeletons(case.shape, case.space):
            assert layout.violations(case.shape) == []
            assert layout.tp <= 8
            assert layout.devices == case.space.devices
    assert any(layout.cp > 1 for layout in skeletons(CASES["long"].shape, CASES["long"].space))
    assert any(layout.ep > 1 for layout in skeletons(CASES["mixtral"].shape, CASES["mixtral"].space))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_variants_belong_to_their_skeleton_and_are_valid(case):
    for skeleton in list(skeletons(case.shape, case.space))[::7]:
        layouts = list(case.variants(skeleton))
        assert len(set(map(repr, layouts))) == len(layouts) or case.space.offload
        for layout in layouts:
            assert skeleton_of(layout) == skeleton
            assert layout.devices == case.space.devices
            assert layout.violations(case.shape) == []


def test_divisors():
    assert divisors(12) == (1, 2, 3, 4, 6, 12)
    assert divisors(1) == (1,)
    assert divisors(49) == (1, 7, 49)
