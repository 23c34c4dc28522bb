"""The command line as a user meets it: one line per error, exit status 2, never a traceback."""

import subprocess
import sys
from pathlib import Path

import pytest

from ms_zero import __version__
from ms_zero.cli.main import main

REPOSITORY = Path(__file__).resolve().parent.parent.parent


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "train " in shown and "launch " in shown and "COMMAND" in shown


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"ms-zero {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "no command given: use one of train, launch"),
        (["tarin"], "invalid choice: 'tarin'"),
        (["train"], "required: RUN.yaml; see 'ms-zero train --help'"),
        (["train", "run.yaml", "--steps", "3"], "unrecognized arguments: --steps"),
        (["train", "no/such/run.yaml"], "no/such/run.yaml"),
        (["launch", "run.yaml"], "required: --workers"),
        (["launch", "run.yaml", "--workers", "two"], "invalid int value: 'two'"),
        (["launch", "run.yaml", "--workers", "0"], "--workers 0: at least 1 worker is needed"),
        (["launch", "run.yaml", "--workers", "2", "--cluster-timeout", "0"], "--cluster-timeout 0"),
        (["launch", "no/such/run.yaml", "--workers", "2"], "no/such/run.yaml"),
    ],
)
def test_wrong_arguments_are_one_line_and_status_2(argv, message, capsys):
    assert main(argv) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith("ms-zero: error: ") and message in line


def test_overrides_may_stand_before_and_after_options(monkeypatch):
    from ms_zero.cli import launch as launch_module

    seen = {}
    monkeypatch.setattr(launch_module, "launch", lambda **arguments: seen.update(arguments) or 7)
    assert main(["launch", "a.yaml", "x=1", "--workers", "4", "y=-2", "--port", "9000", "z=[a, b]"]) == 7
    assert seen["run"] == "a.yaml" and seen["overrides"] == ["x=1", "y=-2", "z=[a, b]"]
    assert (seen["workers"], seen["port"], seen["nodes"], seen["master"]) == (4, 9000, 1, None)


def test_every_violation_of_a_config_is_a_line_and_nothing_is_started(tmp_path, capsys):
    output = tmp_path / "out"
    run = str(REPOSITORY / "configs" / "runs" / "quickstart.yaml")
    overrides = [f"train.output_dir={output}", "train.stesp=1", "optim.lr=fast"]
    assert main(["launch", run, "--workers", "2", *overrides]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and all(line.startswith("ms-zero: error: ") for line in lines)
    assert not output.exists()


def test_more_workers_than_the_mesh_are_refused_before_the_start(tmp_path, capsys):
    run = str(REPOSITORY / "configs" / "runs" / "quickstart.yaml")
    overrides = [f"train.output_dir={tmp_path / 'out'}", "parallel.dp_shard=2"]
    assert main(["launch", run, "--workers", "4", *overrides]) == 2
    assert "4" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_interrupt_is_quiet(monkeypatch, capsys):
    from ms_zero.cli import train as train_module

    def interrupted(run, overrides):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_module, "train", interrupted)
    assert main(["train", "run.yaml"]) == 130
    assert capsys.readouterr().err == "ms-zero: interrupted\n"


def test_module_can_be_run_and_a_reader_that_goes_away_is_no_crash():
    command = ["bash", "-c", '"$0" -m ms_zero --help | true', sys.executable]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
