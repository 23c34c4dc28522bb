"""The benchmark of the parallel axes runs and reports what it promises; its times are not judged here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TRAFFIC = {f"traffic_{axis}_over_theory" for axis in ("tp", "sp", "cp", "ulysses", "ep", "pp")}
BUBBLES = {f"bubble_measured_over_formula_{name}" for name in ("gpipe", "1f1b", "interleaved", "zb_h1")}
MEASURED = {f"{name}_over_1f1b_measured" for name in ("interleaved", "zb_h1")}
SIMULATED = {f"{name}_over_1f1b_simulated" for name in ("interleaved", "zb_h1")}
GROWTH = {"attention_peak_bytes_growth_exponent"}


@pytest.fixture(scope="module")
def metrics(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    command = [sys.executable, "scripts/bench_parallel.py", "--quick", "--json", str(path)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return json.loads(path.read_text())["metrics"]


def test_the_quick_benchmark_reports_all_figures(metrics):
    assert metrics.keys() == TRAFFIC | BUBBLES | MEASURED | SIMULATED | GROWTH
    # Waits are never shorter than the formula says: nobody computes before its input is there.
    assert all(metrics[name] > 0.95 for name in BUBBLES)
    assert all(metrics[name] > 0 for name in MEASURED)


def test_bytes_sent_are_those_of_the_theory(metrics):
    for name in TRAFFIC:
        # How many tokens leave a rank for their experts is up to the routers.
        assert metrics[name] == pytest.approx(1, abs=0.2 if "_ep_" in name else 0.02), name


def test_interleaving_and_zero_bubble_save_what_the_formulas_say(metrics):
    assert metrics["interleaved_over_1f1b_simulated"] == pytest.approx((8 + 3 / 2) / (8 + 3))
    assert metrics["zb_h1_over_1f1b_simulated"] == pytest.approx((8 + 3 / 3) / (8 + 3))


def test_attention_takes_memory_linear_in_the_sequence(metrics):
    assert metrics["attention_peak_bytes_growth_exponent"] == pytest.approx(1, abs=0.25)
