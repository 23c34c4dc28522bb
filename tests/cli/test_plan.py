"""``ms-zero plan``, ``estimate`` and ``schedule`` as a user meets them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ms_zero.cli.main import main
from ms_zero.cli.plan import token_count
from ms_zero.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PLAN = ("plan", "--model", "llama2-7b", "--cluster", "ascend-910b", "--devices", "16", "--seq", "4096")
SCHEDULE = ("schedule", "--pp", "4", "--microbatches", "8")


def run(capsys, *argv):
    status = main([*argv])
    shown = capsys.readouterr()
    return status, shown.out, shown.err


def refused(capsys, *argv):
    status, out, err = run(capsys, *argv)
    assert status == 2
    assert out == ""
    assert err.startswith("ms-zero: error: ")
    assert err.count("\n") == 1
    return err


def test_a_plan_is_printed_and_written(capsys, tmp_path):
    paths = {name: str(tmp_path / name) for name in ("run.yaml", "r.html", "p.json")}
    status, out, err = run(
        capsys, *PLAN, "--tokens", "2T", "--top", "3", "--no-offload", "--global-batch", "256",
        "--write", paths["run.yaml"], "--html", paths["r.html"], "--json", paths["p.json"],
    )  # fmt: skip
    assert (status, err) == (0, "")
    assert "recommended: " in out and "rule of thumb: 1-7B" in out and "2 T tokens take" in out
    answer = json.loads((tmp_path / "p.json").read_text())
    assert f"recommended: {answer['recommended']}" in out
    assert answer["best"][0]["step_seconds"] == pytest.approx(sum(answer["best"][0]["causes"].values()))
    assert "<svg" in (tmp_path / "r.html").read_text()
    assert f"wrote {paths['run.yaml']}" in out
    linted, found, _ = run(capsys, "lint", paths["run.yaml"], "--workers", "16")
    assert linted == 0 or "this version cannot run it as it is" in out, found


def test_the_impossible_ends_with_status_2_and_says_what_helps(capsys):
    argv = ("plan", "--model", "gpt3-175b", "--cluster", "ascend-910b", "--devices", "8", "--seq", "2048")
    status, out, _ = run(capsys, *argv)
    assert status == 2
    assert "nothing fits" in out and "enough: " in out


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--tokens", "many"), "--tokens many"),
        (("--devices", "0"), "--devices 0"),
        (("--seq", "9999999"), "positions"),
        (("--cluster", "cpu"), "no peak rate"),
        (("--model", "lama2-7b"), "did you mean llama2-7b"),
        (("--precision", "fp4"), "--precision fp4"),
        (("--top", "0"), "--top 0"),
        (("--model", ""), "no preset"),
        (("--calibrate", "no/such.jsonl"), "no/such.jsonl"),
        (("--write", "no/such/run.yaml"), "cannot write the run file"),
        (("--html", "no/such/r.html"), "cannot write the page"),
    ],
)
def test_wrong_plans_are_refused_in_one_line(capsys, changes, message):
    status, _, err = run(capsys, *PLAN, *changes)
    assert status == 2
    assert message in err
    assert err.count("\n") == 1


def test_token_counts():
    counts = {"2T": 2e12, "300B": 3e11, "1.5e12": 1.5e12, " 10m ": 1e7, "7": 7}
    assert {text: token_count(text) for text in counts} == counts
    for text in ("", "T", "-1B", "1e30", "nan", "inf"):
        with pytest.raises(UserError, match="expected a number such as 2T"):
            token_count(text)


def test_an_estimate_of_a_run_file(capsys):
    status, out, err = run(capsys, "estimate", "runs/quickstart", "--workers", "2")
    assert (status, err) == (0, "")
    assert "2 workers: dp_shard 2" in out and "memory: " in out
    assert "no time is predicted: cluster cpu" in out


def test_an_estimate_on_a_cluster_has_a_time(capsys):
    overrides = ("precision.policy=bf16", "hardware.target=Ascend", "hardware.device=ascend-910b")
    argv = ("estimate", "runs/quickstart", "--workers", "2", *overrides)
    status, out, _ = run(capsys, *argv, "--diagnose", "memory")
    assert status == 0
    assert "a step takes" in out and "tokens/s/device" in out
    assert "remedies for memory" in out


def test_an_estimate_says_when_a_run_does_not_fit(capsys, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(
        "include: [models/llama2-70b]\n"
        "data: {seq_len: 4096}\n"
        "train: {steps: 10, global_batch_size: 8, micro_batch_size: 1, output_dir: x}\n"
        "precision: {policy: bf16}\n"
        "hardware: {target: Ascend, device: ascend-910b}\n"
    )
    status, out, _ = run(capsys, "estimate", str(path), "--workers", "8")
    assert status == 2
    assert "out of memory by" in out and "in stage 0" in out


def test_wrong_estimates_are_refused(capsys):
    assert "train.stpes" in refused(capsys, "estimate", "runs/quickstart", "train.stpes=3")
    assert "no/such.jsonl" in refused(capsys, "estimate", "runs/quickstart", "--calibrate", "no/such.jsonl")
    assert "expected one of memory" in refused(capsys, "estimate", "runs/quickstart", "--diagnose", "x")


def test_a_schedule_is_drawn_with_its_bubble(capsys):
    status, out, err = run(capsys, *SCHEDULE, "--schedule", "interleaved", "--virtual", "2")
    assert (status, err) == (0, "")
    assert "rank 0 0F0 0F1 0F2 0F3 4F0" in out
    assert "4.500 bubble" in out and "the formula says 4.500" in out
    assert "rank 0 holds at most 11" in out


def test_a_schedule_goes_through_files(capsys, tmp_path):
    csv, trace = str(tmp_path / "s.csv"), str(tmp_path / "t.json")
    _, first, _ = run(capsys, *SCHEDULE, "--schedule", "zb-h1", "--write", csv, "--trace", trace)
    _, second, _ = run(capsys, "schedule", "--csv", csv)
    assert first.splitlines()[1:8] == second.splitlines()[1:8]
    assert json.loads(Path(trace).read_text())["traceEvents"]


def test_times_of_phases_and_messages_count(capsys):
    _, quick, _ = run(capsys, *SCHEDULE, "--times", "1", "1", "0")
    _, slow, _ = run(capsys, *SCHEDULE, "--transfer", "1/2")
    assert "time 22, of which 16 computing" in quick
    assert "the formula says" not in slow


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--schedule", "interleaved", "--virtual", "2", "--microbatches", "6"), "not a multiple of 4"),
        (("--schedule", "dualpipe"), "expected one of gpipe"),
        (("--pp", "0"), "0 stages"),
        (("--times", "1", "x", "1"), "'x' is not a time"),
        (("--transfer", "-1"), "at least 0"),
        (("--times", "0", "0", "0"), "at least one above 0"),
        (("--pp", "999", "--microbatches", "9999"), "too many to draw"),
        (("--csv", "no/such.csv"), "cannot be read as a schedule"),
    ],
)
def test_wrong_schedules_are_refused(capsys, argv, message):
    assert message in refused(capsys, *SCHEDULE, *argv)


@pytest.mark.parametrize(
    "argv",
    [
        PLAN,
        ("estimate", "runs/quickstart"),
        SCHEDULE,
        ("plan", "--help"),
        ("estimate", "--help"),
        ("schedule", "--help"),
    ],
    ids=lambda argv: " ".join(argv[:2]),
)
def test_planning_loads_neither_mindspore_nor_numpy(argv):
    code = (
        "import sys\nfrom ms_zero.cli.main import main\n"
        f"try: main({list(argv)})\nexcept SystemExit: pass\n"
        "print('LOADED', sorted({'mindspore', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout.endswith("LOADED []\n"), done.stderr
