"""The benchmark of the CPU kernels runs and reports what it promises; its figures are not judged here."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_quick_benchmark_reports_all_figures(tmp_path):
    command = [sys.executable, "scripts/bench_cpu_ops.py", "--quick", "--json", tmp_path / "figures.json"]
    names = ["gelu", "cross_entropy", "train"]
    shown = subprocess.run([*command, "--only", *names], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    metrics = json.loads((tmp_path / "figures.json").read_text())["metrics"]
    frameworks = ["torch"] if importlib.util.find_spec("torch") else []
    expected = {f"{name}_ms" for name in names} | {"train_tokens_per_second"}
    for name in names:
        others = frameworks if name == "train" else [*frameworks, "mindspore"]
        expected |= {f"{name}_{kind}over_{other}" for other in others for kind in ("", "cpu_")}
    for framework in ["ours", *frameworks]:
        expected |= {f"train_{framework}_peak_bytes", f"train_{framework}_growth_bytes"}
    assert metrics.keys() == expected
    assert all(value > 0 for value in metrics.values())
