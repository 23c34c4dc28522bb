"""The parts of scripts/check_ascendc.py, on few cases: figures that can be printed, failures that count."""

import dataclasses
import importlib.util
import json
import sys

import all_finite
import pytest
from emulated import ROOT
from mutation import Verdict, all_mutants, proof_of


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("check_ascendc", ROOT / "scripts" / "check_ascendc.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_ascendc"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def outcomes(script, checker):
    return script.run_numbers(checker, (1, 300), (1, 8))


def verdicts(*reasons):
    """Verdicts on mutants that are not proven equivalent."""
    mutants = [mutant for _, mutant in all_mutants() if proof_of(mutant) is None]
    return [Verdict(mutant, reason) for mutant, reason in zip(mutants, reasons)]


def test_figures_are_json_and_hold(script, checker, outcomes, workshop):
    figures = script.summarise(
        checker, outcomes, verdicts("found", "compiler"), script.run_self_test(workshop)
    )
    printed = json.loads(json.dumps(dataclasses.asdict(figures)))
    assert printed["bytes_per_param_fp16_grad"] == 28
    assert printed["bytes_per_param_fp32_grad"] == 30
    assert printed["ub_bytes"] <= 188_160
    assert printed["max_ulp"] == 0
    assert (printed["mutants"], printed["mutants_caught"], printed["mutants_not_compiling"]) == (1, 1, 1)
    assert printed["numeric_cases"] == len(outcomes) > 100
    assert figures.holds


def test_a_survivor_or_a_failure_does_not_hold(script, checker, outcomes):
    clean = all_finite.SelfTest(10, 0, frozenset())
    assert not script.summarise(checker, outcomes, verdicts("found", None), clean).holds
    assert not script.summarise(checker, outcomes, [], dataclasses.replace(clean, wrong=1)).holds
    name, outcome = outcomes[0]
    failed = [(name, dataclasses.replace(outcome, errors=("wrong",))), *outcomes[1:]]
    assert not script.summarise(checker, failed, [], clean).holds


def test_the_report_names_what_failed(script, checker, outcomes, capsys):
    proven = next(mutant for _, mutant in all_mutants() if proof_of(mutant))
    reported = [*verdicts(None), Verdict(proven, None)]
    figures = script.summarise(checker, outcomes, reported, all_finite.SelfTest(0, 0, frozenset()))
    assert (figures.mutants, figures.mutants_caught, figures.mutants_equivalent) == (1, 0, 1)
    script.print_report(figures, outcomes, reported)
    text = capsys.readouterr().out
    assert "SURVIVED fused_adam_w.h" in text
    assert "equivalent (" in text
