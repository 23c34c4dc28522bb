"""The benchmark runs and reports what it promises; its figures are not judged here."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_quick_benchmark_reports_all_figures(tmp_path):
    command = [sys.executable, "scripts/bench_overhead.py", "--quick", "--steps", "2"]
    shown = subprocess.run(
        [*command, "--json", str(tmp_path / "figures.json")], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    metrics = found["metrics"]
    expected = {"overhead_ratio", "tokens_per_second", "peak_rss_bytes"}
    if importlib.util.find_spec("torch"):
        expected |= {"torch_ratio", "torch_tokens_per_second"}
    assert metrics.keys() == expected
    assert all(value > 0 for name, value in metrics.items() if name != "overhead_ratio")
    assert -1 < metrics["overhead_ratio"] < 10
    assert len(found["cases"]) == 2
