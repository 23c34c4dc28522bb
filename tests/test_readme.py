"""The READMEs: every command in them runs, and the two languages agree."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
READMES = ("README.md", "README.zh-CN.md")
# What makes a training command short enough for a test; the output goes to a temporary folder.
SHORT = ("train.steps=2", "train.eval_interval=0", "train.log_interval=1")
# Commands that only print: they run as they are.
ONLY_PRINT = ("lint", "config", "explain", "doctor", "plan", "estimate", "schedule")


def text(name):
    return (ROOT / name).read_text(encoding="utf-8")


def blocks(name, language):
    return re.findall(rf"^```{language}\n(.*?)^```$", text(name), re.MULTILINE | re.DOTALL)


def commands(name):
    return [line for block in blocks(name, "bash") for line in block.splitlines()]


def run(command, tmp_path):
    binaries = [str(ROOT / ".venv/bin"), str(Path(sys.executable).parent)]
    path = os.pathsep.join([*binaries, os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    return subprocess.run(
        command, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, executable="/bin/bash"
    )


def test_both_languages_show_the_same_commands_output_and_structure():
    english, chinese = READMES
    assert commands(english) == commands(chinese)
    assert blocks(english, "text") == blocks(chinese, "text")
    for pattern in (r"^#+ ", r"^\|", r"^- ", r"\d+e-\d+|\d+\.\d+"):
        counts = [len(re.findall(pattern, text(name), re.MULTILINE)) for name in READMES]
        assert counts[0] == counts[1], pattern


def test_links_and_named_paths_exist():
    for name in READMES:
        links = re.findall(r"\]\(([^)#:]+)\)", text(name))
        files = re.findall(r"`((?:scripts|configs|tests|ms_zero)/[^`* ]*)`", text(name))
        assert links
        assert [path for path in links + files if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("command", commands("README.md"))
def test_the_command_runs(command, tmp_path):
    kind = shlex.split(command)[:2]
    if kind[0] == "source":
        shown = run(f"test -f {shlex.quote(kind[1])} || bash scripts/test.sh --version; {command}", tmp_path)
    elif kind == ["bash", "scripts/test.sh"]:
        shown = run(f"{command} tests/test_mesh.py", tmp_path)
        assert "passed" in shown.stdout
    elif kind == ["python", "scripts/bench_overhead.py"]:
        shown = run(f"{command} --quick --steps 2", tmp_path)
        assert "overhead_ratio" in shown.stdout
    elif kind[0] == "ms-zero" and kind[1] in ONLY_PRINT:
        shown = run(command, tmp_path)
        assert shown.stdout
    elif kind[0] == "python":
        certificate = tmp_path / "certificate.json"
        shown = run(f"{command} --json {certificate}", tmp_path)
        metrics = json.loads(certificate.read_text())["metrics"]
        assert metrics["failures"] == 0, shown.stdout
        assert metrics["cases"] >= 20
        assert metrics["max_rel_loss"] <= 1e-5
        assert metrics["max_rel_grad_norm"] <= 1e-5
    else:
        assert kind in (["bash", "scripts/quickstart.sh"], ["ms-zero", "train"], ["ms-zero", "launch"])
        shown = run(f"{command} {' '.join(SHORT)} train.output_dir={tmp_path}/run", tmp_path)
        assert "2/2" in shown.stdout
        assert (tmp_path / "run/checkpoints/step-00000002/manifest.json").exists()
    assert shown.returncode == 0, shown.stdout + shown.stderr
