"""Unusable data is refused before mindspore is imported and before a worker starts."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
CODE = """\
import sys
from ms_zero.cli.main import main
status = main(sys.argv[1:])
assert "mindspore" not in sys.modules
sys.exit(status)
"""


@pytest.mark.parametrize("command", [["train"], ["launch", "--workers", "2"]])
def test_unusable_data_is_refused_at_once(tmp_path, command):
    overrides = ["data.source=files", f'data.files=["{tmp_path}/*.txt"]', f"train.output_dir={tmp_path}/out"]
    shown = subprocess.run(
        [sys.executable, "-c", CODE, *command, "runs/quickstart", *overrides],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 2
    assert shown.stderr.count("\n") == 1 and "matches no file" in shown.stderr
    assert not list((tmp_path / "out").glob("logs/worker_*.log"))
