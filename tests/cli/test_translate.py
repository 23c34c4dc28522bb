import json
import stat

import pytest

from ms_zero.cli.main import main
from ms_zero.config import load_config

CONFIG = {
    "train_batch_size": 32,
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 2, "stage3_max_live_parameters": 1e9},
    "wall_clock_breakdown": True,
}
OPTIONS = ["--include", "runs/quickstart", "--workers", "2"]


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ds.json").write_text(json.dumps(CONFIG))
    return tmp_path


def lines(capsys):
    shown = capsys.readouterr()
    return shown.out.splitlines(), shown.err.splitlines()


def test_a_config_becomes_a_run_file_that_can_be_run(config, capsys):
    assert main(["translate", "deepspeed", "ds.json", "-o", "run.yaml", *OPTIONS]) == 0
    out, err = lines(capsys)
    assert err == []
    assert (
        "untranslatable: wall_clock_breakdown: reports go to metrics.jsonl and the console, see monitor"
        in out
    )
    assert any(line.startswith("ignored:") and "only read at stage 3" in line for line in out)
    assert "5 keys: 3 translated, 1 not translatable, 1 not read by the tool itself" in out
    (config / "other").write_text("")
    modes = {stat.S_IMODE((config / name).stat().st_mode) for name in ("run.yaml", "other")}
    assert len(modes) == 1  # not the private mode of a temporary file


def test_the_result_is_checked_and_what_lacks_is_told(config, capsys):
    assert main(["translate", "deepspeed", "ds.json", "-o", "run.yaml"]) == 0
    out, _ = lines(capsys)
    assert any("model.family: missing" in line and line.startswith("error: run.yaml") for line in out)
    assert out[-1] == "complete the file, then check it with 'ms-zero lint run.yaml'"


def test_without_an_output_the_file_is_printed_and_the_report_goes_to_stderr(config, capsys):
    assert main(["translate", "deepspeed", "ds.json", *OPTIONS]) == 0
    out, err = lines(capsys)
    (config / "run.yaml").write_text("\n".join(out) + "\n")
    train = load_config("run.yaml", ["train.accumulation_steps=auto"], 2).config.train
    assert (train.global_batch_size, train.micro_batch_size, train.accumulation_steps) == (32, 8, 2)
    assert err[-1].startswith("5 keys: ")
    assert sorted(path.name for path in config.iterdir()) == ["ds.json", "run.yaml"]


def test_there_and_back(config, capsys):
    assert main(["translate", "to-deepspeed", "runs/quickstart", "-o", "back.json", "train.steps=7"]) == 0
    back = json.loads((config / "back.json").read_text())
    assert back["scheduler"]["params"]["total_num_steps"] == 7
    assert main(["translate", "deepspeed", "back.json", "-o", "again.yaml"]) == 0
    assert "train_batch_size" in (config / "again.yaml").read_text()


def test_a_layout_that_cannot_be_run_yet_is_translated_back(config, capsys):
    overrides = ["parallel.pp=2", "parallel.dp_shard=2"]
    assert main(["translate", "to-deepspeed", "runs/quickstart", "--workers", "4", *overrides]) == 0
    _, err = lines(capsys)
    assert any("PipelineModule" in line for line in err)


REFUSED = [
    (["deepspeed", "none.json"], "none.json: cannot read this file"),
    (
        ["deepspeed", "typo.json"],
        "typo.json:1: train_batch_sise: not a key of DeepSpeed; did you mean train_batch_size?",
    ),
    (["deepspeed", "ds.json", "train.steps=3"], "overrides belong to to-deepspeed"),
    (["to-deepspeed", "runs/quickstart", "--skip-unknown"], "belong to translations into a run file"),
    (["to-deepspeed", "runs/quickstrat"], "did you mean"),
    (["deepspeed", "ds.json", "--workers", "0"], "at least 1 worker"),
    (["deepspeed", "ds.json", "-o", "ds.json"], "there is such a file already"),
    (["deepspeed", "ds.json", "-o", "nowhere/run.yaml"], "nowhere/run.yaml: cannot write there"),
    (["deepspeed", "ds.json", "-o", "x\0y"], "cannot write there"),
    (["horovod", "ds.json"], "invalid choice: 'horovod'"),
    (["deepspeed"], "required: FILE"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_what_is_refused_is_refused_in_one_line_and_nothing_is_written(config, capsys, arguments, message):
    (config / "typo.json").write_text('{"train_batch_sise": 8}')
    before = {path: path.read_bytes() for path in config.iterdir()}
    assert main(["translate", *arguments]) == 2
    out, err = lines(capsys)
    assert out == [] and len(err) == 1
    assert err[0].startswith("ms-zero: error: ") and message in err[0] and err[0].isprintable()
    assert {path: path.read_bytes() for path in config.iterdir()} == before


def test_an_unknown_key_can_be_left_out(config, capsys):
    (config / "typo.json").write_text('{"train_batch_sise": 8}')
    assert main(["translate", "deepspeed", "typo.json", "--skip-unknown"]) == 0
    out, err = lines(capsys)
    assert any("# unknown" in line for line in out) and any(line.startswith("unknown:") for line in err)


def test_a_full_disk_leaves_nothing_behind(config, capsys, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ms_zero.cli.translate.os.fsync", full)
    assert main(["translate", "deepspeed", "ds.json", "-o", "run.yaml"]) == 2
    _, err = lines(capsys)
    assert err == ["ms-zero: error: run.yaml: cannot write: No space left on device"]
    assert [path.name for path in config.iterdir()] == ["ds.json"]
