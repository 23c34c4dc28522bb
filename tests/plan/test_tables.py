"""Every published figure that the planner must reproduce; they stand in scripts/validate_planner.py."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "validate_planner.py"


def load_script():
    spec = importlib.util.spec_from_file_location("validate_planner", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT_MODULE = load_script()


@pytest.mark.parametrize("table", SCRIPT_MODULE.TABLES, ids=lambda table: table.__name__)
def test_published_figures_are_reproduced(table):
    checks = list(table())
    assert checks
    assert [check for check in checks if not check.passed] == []


def test_a_wrong_figure_fails():
    check = SCRIPT_MODULE.Check("table", "name", 1.06, 1.0, 0.05)
    assert not check.passed
    assert SCRIPT_MODULE.Check("table", "name", 1.05, 1.0, 0.05).passed


def test_a_missed_figure_is_named():
    good = {
        "tables_checked": 9,
        "tables_failed": 0,
        "ascend_rows_within_25pct": 4,
        "memory_model_max_rel_error": None,
        "search_1024_s": 0.1,
        "search_100k_s": 1.0,
        "estimate_s": 0.1,
        "configs_translated": 11,
    }
    assert SCRIPT_MODULE.missed(good) == []
    bad = {**good, "tables_failed": 1, "ascend_rows_within_25pct": 3, "memory_model_max_rel_error": 0.06}
    assert SCRIPT_MODULE.missed(bad) == [
        "tables_failed",
        "ascend_rows_within_25pct",
        "memory_model_max_rel_error",
    ]
