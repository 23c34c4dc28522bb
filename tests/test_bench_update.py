"""The benchmark of the update runs and reports what it promises; its figures are not judged here."""

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc for the loop it is compared with")
def test_the_quick_benchmark_reports_all_figures(tmp_path):
    command = [sys.executable, "scripts/bench_update.py", "--quick", "--threads", "1"]
    shown = subprocess.run(
        [*command, "--json", str(tmp_path / "figures.json")], cwd=ROOT, capture_output=True, text=True
    )
    assert shown.returncode == 0, shown.stderr
    found = json.loads((tmp_path / "figures.json").read_text())
    metrics = found["metrics"]
    expected = {"cpu_over_stream", "cpu_over_mindspore", "cpu_over_nn_adam", "call_overhead_us"}
    optional = {"cpu_over_torch_fused": "torch", "cpu_over_deepspeed": "deepspeed"}
    assert metrics.keys() == expected | optional.keys()
    for name, package in optional.items():
        if importlib.util.find_spec(package) is None:
            assert metrics[name] is None
    assert all(metrics[name] > 0 for name in expected)
    assert [(case["parameters"], case["dtype"]) for case in found["cases"]] == [
        (n, dtype) for n in (10_000, 100_000) for dtype in ("fp32", "bf16")
    ]
