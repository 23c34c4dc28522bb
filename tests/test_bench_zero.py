"""The benchmark of ZeRO runs and reports what it promises; its times are not judged here."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAGES = range(4)
RATIOS = {"offload_cpu_over_none", "offload_nvme_over_none"} | {f"stage{n}_over_stage0" for n in (1, 2, 3)}
SHARES = {f"overhead_{kind}stage{stage}" for kind in ("", "cpu_") for stage in STAGES}
TRAFFIC = {f"traffic_stage{stage}_over_theory" for stage in STAGES}
GROWTH = {"live_tensor_growth"} | {f"rss_bytes_per_step{loop}" for loop in ("", "_plain", "_over_plain")}
#: Bytes per parameter on N ranks, by the suffix of the figure.
FORMULAS = {
    "": lambda n: (16, 4 + 12 / n, 2 + 14 / n, 16 / n),
    "_fp32_gradients": lambda n: (18, 6 + 12 / n, 2 + 16 / n, 18 / n),
    "_fp32": lambda n: (16, 8 + 8 / n, 4 + 12 / n, 16 / n),
}
HELD = {
    f"bytes_per_param_stage{stage}_world{world}{suffix}": formula(world)[stage]
    for suffix, formula in FORMULAS.items()
    for world in (1, 2)
    for stage in STAGES
}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "figures.json"
    command = [sys.executable, "scripts/bench_zero.py", "--quick", "--json", str(path)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    return json.loads(path.read_text())


def test_the_quick_benchmark_reports_all_figures(found):
    expected = RATIOS | SHARES | TRAFFIC | GROWTH | HELD.keys()
    if importlib.util.find_spec("torch"):
        expected |= {"fsdp2_over_ddp"}
    metrics = found["metrics"]
    assert metrics.keys() == expected
    assert all(metrics[name] > 0 for name in RATIOS)
    assert all(metrics[name] < 1 for name in SHARES)


def test_bytes_sent_and_held_are_those_of_the_theory(found):
    for name in TRAFFIC:
        assert found["metrics"][name] == pytest.approx(1, abs=0.01)
    for name, theory in HELD.items():
        assert found["metrics"][name] == pytest.approx(theory, rel=0.02), name


def test_no_case_gathers_live_tensors(found):
    assert found["metrics"]["live_tensor_growth"] <= 0, found["cases"]
