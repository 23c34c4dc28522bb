"""Covering arrays: every pair that may occur does, and no row breaks a rule."""

from itertools import combinations, product

from ms_zero.testing.covering import allowed_pairs, covering_rows, pairs_of

AXES = {"a": (0, 1, 2), "b": ("x", "y", "z"), "c": (False, True), "d": (1, 2, 3, 4)}


def everything(row):
    return True


def no_x_without_zero(row):
    return not (row.get("b") == "x" and row.get("a", 0) != 0)


def only_through_a_third(row):
    """a = 2 needs c, and c needs d = 4: so a = 2 forbids d below 4 without naming it."""
    if row.get("a") == 2 and not row.get("c", True):
        return False
    return not (row.get("c", False) and row.get("d", 4) != 4)


def complete(rule):
    rows = (dict(zip(AXES, values, strict=True)) for values in product(*AXES.values()))
    return [row for row in rows if rule(row)]


def test_all_pairs_are_covered_by_few_rows():
    rows = covering_rows(AXES, everything)
    covered = set().union(*map(pairs_of, rows))
    wanted = {
        frozenset(((first, left), (second, right)))
        for first, second in combinations(AXES, 2)
        for left, right in product(AXES[first], AXES[second])
    }
    assert covered == wanted
    assert 12 <= len(rows) <= 18  # 3 x 4 is the least, 72 the product
    assert all(list(row) == list(AXES) for row in rows)


def test_rules_hold_and_what_they_leave_is_covered():
    for rule in (no_x_without_zero, only_through_a_third):
        rows = covering_rows(AXES, rule)
        assert all(map(rule, rows))
        possible = set().union(*map(pairs_of, complete(rule)))
        assert set(allowed_pairs(AXES, rule)) == possible
        assert set().union(*map(pairs_of, rows)) == possible


def test_the_rows_are_the_same_each_time():
    assert covering_rows(AXES, no_x_without_zero) == covering_rows(AXES, no_x_without_zero)
