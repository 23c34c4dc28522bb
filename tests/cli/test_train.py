"""The worker's side of `ms-zero train`, with a runner that does as told; no mindspore."""

import sys
import types

import pytest

import ms_zero
from ms_zero.cli import train as train_module
from ms_zero.cli.launch_state import read_outcome, read_registration
from ms_zero.cli.main import main
from ms_zero.errors import UserError


@pytest.fixture
def runner(monkeypatch, tmp_path):
    """Replaces ms_zero.runner and ms_zero.comm; `runner.run` is for the test to set."""
    fake_runner, fake_comm = types.ModuleType("ms_zero.runner"), types.ModuleType("ms_zero.comm")
    fake_comm.local = lambda target: "local"
    fake_comm.connect = lambda target: f"connected to {target}"
    for name, module in (("runner", fake_runner), ("comm", fake_comm)):
        monkeypatch.setitem(sys.modules, f"ms_zero.{name}", module)
        monkeypatch.setattr(ms_zero, name, module, raising=False)
    for name in ("MS_ROLE", "MS_WORKER_NUM", "MS_NODE_ID", "MS_ZERO_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(train_module, "signal_at_parent_death", lambda number: None)
    monkeypatch.chdir(tmp_path)
    return fake_runner


@pytest.fixture
def worker(runner, monkeypatch, tmp_path):
    """Makes this process worker 1 of 2; gives the directory of its launcher."""
    for name, value in (("MS_ROLE", "MS_WORKER"), ("MS_WORKER_NUM", "2"), ("MS_NODE_ID", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MS_ZERO_STATE_DIR", str(tmp_path))
    return tmp_path


def run_file():
    from ms_zero.resources import config_dir

    return str(config_dir() / "runs" / "quickstart.yaml")


def test_alone_it_trains_without_a_cluster(runner):
    seen = []
    runner.run = lambda loaded, comm: seen.append((loaded, comm)) or 0
    assert main(["train", run_file(), "train.steps=7"]) == 0
    ((loaded, comm),) = seen
    assert (loaded.config.train.steps, loaded.world_size, comm) == (7, 1, "local")


def test_worker_joins_the_cluster_and_reports_its_end(runner, worker):
    def run(loaded, comm):
        assert (loaded.world_size, comm) == (2, "connected to CPU")
        assert read_registration(worker, 1).phase == "connected"
        return 0

    runner.run = run
    assert main(["train", run_file()]) == 0
    assert read_outcome(worker, 1).status == "ok"


def test_error_of_the_user_is_reported_without_a_traceback(runner, worker, capsys):
    def run(loaded, comm):
        raise UserError("no such corpus")

    runner.run = run
    assert main(["train", run_file()]) == 2
    outcome = read_outcome(worker, 1)
    assert (outcome.status, outcome.message) == ("user_error", "no such corpus")
    assert capsys.readouterr().err == "ms-zero: error: no such corpus\n"


def test_wrong_config_in_a_worker_is_reported_too(worker):
    assert main(["train", run_file(), "train.stesp=3"]) == 2
    assert read_outcome(worker, 1).status == "user_error"


@pytest.mark.parametrize("error", [RuntimeError("bad\nluck"), SystemExit(3), KeyboardInterrupt()])
def test_any_other_end_is_reported_with_a_traceback_in_the_log(runner, worker, capsys, error):
    def run(loaded, comm):
        raise error

    runner.run = run
    assert main(["train", run_file()]) == 1
    outcome = read_outcome(worker, 1)
    assert outcome.status == "error" and outcome.message.startswith(type(error).__name__)
    assert "\n" not in outcome.message
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "Unable to allocate 16.0 TiB"])
def test_lack_of_memory_is_an_error_of_the_user(runner, worker, capsys, text):
    def run(loaded, comm):
        raise MemoryError(text)

    runner.run = run
    assert main(["train", run_file()]) == 2
    assert read_outcome(worker, 1).status == "user_error"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ms-zero: error: out of memory: ") and text in line


def test_an_output_dir_that_is_a_file_is_refused_before_mindspore_is_imported(runner, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["train", run_file(), f"train.output_dir={tmp_path}/file"]) == 2
    assert "train.output_dir: cannot write to" in capsys.readouterr().err


def test_alone_an_unexpected_error_keeps_its_traceback(runner):
    def run(loaded, comm):
        raise RuntimeError("bug")

    runner.run = run
    with pytest.raises(RuntimeError, match="bug"):
        main(["train", run_file()])
