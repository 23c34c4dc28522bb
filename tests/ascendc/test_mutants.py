"""A check that cannot fail is worthless: a mutant of every kind has to be noticed.

``scripts/check_ascendc.py`` tries all of them.
"""

import pytest
from emulated import Library, build_variants
from mutation import EQUIVALENT, RULES, TARGETS, all_mutants, find_failure, judge, one_of_each_rule, proof_of


def test_unchanged_kernels_pass_what_mutants_have_to_fail(checker):
    for target in TARGETS:
        for variant in target.variants:
            assert find_failure(checker, variant, variant.name) is None, variant.name


def test_a_mutant_of_every_rule_is_caught(workshop, tiling):
    chosen = one_of_each_rule()
    assert {mutant.rule for _, mutant in chosen} == set(RULES)
    verdicts = judge(chosen, workshop, tiling)
    assert [verdict.mutant.site for verdict in verdicts if verdict.reason is None] == []
    # Most of them run and are noticed; hardly any is refused by the compiler.
    assert sum(verdict.reason != "compiler" for verdict in verdicts) >= len(RULES) - 2


def test_every_site_is_reached():
    mutants = [mutant for _, mutant in all_mutants()]
    assert len(mutants) >= 400
    for rule, at_least in {
        "barrier dropped": 18,
        "not queued": 5,
        "not freed": 4,
        "smaller buffer": 20,
        "rounding": 6,
    }.items():
        assert sum(mutant.rule == rule for mutant in mutants) >= at_least, rule


def test_equivalent_mutants_are_few_and_exist():
    proven = [mutant for _, mutant in all_mutants() if proof_of(mutant)]
    assert len(proven) == len(EQUIVALENT)


@pytest.mark.parametrize("number", range(len(TARGETS)))
def test_sources_are_compiled_as_they_are(workshop, number):
    target = TARGETS[number]
    Library(build_variants(workshop, f"plain_{number}", target.variants[:1]))
