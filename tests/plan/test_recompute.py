import pytest

from ms_zero.errors import UserError
from ms_zero.plan.recompute import (
    RECOMPUTE_KINDS,
    RecomputePlan,
    held_bytes,
    peak_bytes,
    plan_recompute,
    transient_bytes,
)

BYTES = {"none": 1000, "selective": 400, "full": 50}


def chosen(budget, layers=4, in_flight=1):
    return plan_recompute(
        "budget", layers, budget_bytes=budget, bytes_of=BYTES.__getitem__, in_flight=in_flight
    )


@pytest.mark.parametrize(
    ("kind", "layers", "every", "segments"),
    [
        ("none", 4, None, ()),
        ("full", 3, None, ((0,), (1,), (2,))),
        ("every_k", 5, 2, ((0,), (2,), (4,))),
        ("every_k", 3, 1, ((0,), (1,), (2,))),
        ("sqrt", 9, None, ((0, 1, 2), (3, 4, 5), (6, 7, 8))),
        ("sqrt", 10, None, ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9))),
        ("sqrt", 1, None, ((0,),)),
        ("full", 0, None, ()),
        ("sqrt", 0, None, ()),
    ],
)
def test_segments(kind, layers, every, segments):
    plan = plan_recompute(kind, layers, every=every)
    assert plan == RecomputePlan(kind=kind, segments=segments)


def test_kinds_of_the_blocks():
    assert plan_recompute("every_k", 4, every=3).kinds(4) == ("full", "none", "none", "full")
    assert plan_recompute("selective", 2).kinds(2) == ("selective", "selective")


@pytest.mark.parametrize(
    ("kind", "every", "held", "transient"),
    [
        ("none", None, 9000, 0),
        ("selective", None, 3600, 600),
        ("full", None, 450, 1000),
        ("every_k", 4, 3 * 50 + 6000, 1000),
        ("sqrt", None, 150, 3000),
    ],
)
def test_bytes_of_nine_blocks(kind, every, held, transient):
    plan = plan_recompute(kind, 9, every=every)
    assert held_bytes(plan, 9, BYTES.__getitem__) == held
    assert transient_bytes(plan, 9, BYTES.__getitem__) == transient
    assert peak_bytes(plan, 9, BYTES.__getitem__, in_flight=3) == 3 * held + transient


@pytest.mark.parametrize(
    ("budget", "kinds"),
    [
        (4000, ("none",) * 4),
        (3999, ("selective", "selective", "none", "none")),  # one: 3400 and 600 of the core in work
        (2200, ("selective",) * 4),
        (2199, ("full", "full", "selective", "selective")),  # one: 1250 and 1000 of the block in work
        (1200, ("full",) * 4),
    ],
)
def test_a_budget_takes_the_least_that_fits(budget, kinds):
    plan = chosen(budget)
    assert peak_bytes(plan, 4, BYTES.__getitem__) <= budget
    assert plan.kinds(4) == kinds


def test_every_cheaper_plan_of_a_budget_does_not_fit():
    """More budget never means more recompute."""
    cost = {"none": 0, "selective": 1, "full": 10}
    costs = [sum(cost[kind] for kind in chosen(budget).kinds(4)) for budget in range(1200, 4001, 25)]
    assert costs == sorted(costs, reverse=True) and costs[0] == 40 and costs[-1] == 0


def test_microbatches_in_flight_share_a_budget():
    assert chosen(8000, in_flight=2).kinds(4) == ("none",) * 4
    assert chosen(4000, in_flight=2).kinds(4) == ("selective",) * 4


def test_a_plan_says_what_it_picked():
    assert plan_recompute("sqrt", 9).describe(9) == "recompute sqrt: 9 of 9 blocks in full in 3 segments"
    assert chosen(2200).describe(4) == "recompute budget: 0 of 4 blocks in full, the attention of 4"


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("half", {}, f"unknown kind 'half': expected one of {', '.join(RECOMPUTE_KINDS)}"),
        ("every_k", {}, "every = None with kind every_k: give it for every_k and only there"),
        ("full", {"every": 2}, "every = 2 with kind full: give it for every_k and only there"),
        ("every_k", {"every": 0}, "every = 0: expected at least 1"),
        ("full", {"budget_bytes": 1}, "budget = 1 bytes, kind full: give it for budget alone"),
        ("budget", {}, "budget = None bytes, kind budget: give it for budget alone"),
        (
            "budget",
            {"budget_bytes": 1199, "bytes_of": BYTES.__getitem__},
            "a budget of 1.199e-06 GB is below the least possible, 1.2e-06 GB for 4 blocks and 1 "
            "microbatches in flight: raise it or lower micro_batch_size",
        ),
    ],
)
def test_refusals(kind, options, message):
    with pytest.raises(UserError) as error:
        plan_recompute(kind, 4, **options)
    assert str(error.value) == f"recompute: {message}"
