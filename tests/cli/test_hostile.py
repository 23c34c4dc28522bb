"""Hostile input through the command line: status 2 and one clear line each, never a traceback, soon.

The run files and overrides are those of tests/config/test_hostile.py; here it counts what a user sees.
"""

import importlib.util
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ms_zero.cli.main import main

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent
QUICKSTART = str(REPOSITORY / "configs" / "runs" / "quickstart.yaml")
LIMIT_S = 5.0  # of this process' own time, so that a busy machine does not matter


def load_cases():
    spec = importlib.util.spec_from_file_location("hostile_cases", HERE.parent / "config" / "test_hostile.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = load_cases()


@pytest.fixture
def refused(monkeypatch, capsys, tmp_path):
    """Run a command that has to be refused before anything is trained; returns its lines."""
    for name in ("MS_ROLE", "MS_WORKER_NUM", "MS_NODE_ID", "MS_ZERO_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "ms_zero.runner", None)  # importing it would raise
    monkeypatch.chdir(tmp_path)

    def refused(*argv, status=2):
        before = set(tmp_path.iterdir())
        started = time.process_time()
        assert main(argv) == status
        assert time.process_time() - started < LIMIT_S
        assert set(tmp_path.iterdir()) == before
        shown = capsys.readouterr()
        if argv[0] == "lint" and shown.out:
            *findings, hint, verdict = shown.out.splitlines()
            assert hint.startswith("'ms-zero explain MZ")
            assert (": refused for " if status == 2 else ": valid, but this version cannot run it") in verdict
            assert all(line.startswith(("error: ", "unavailable: ", "warning: ")) for line in findings)
            lines = [line.partition(": ")[2] for line in findings if not line.startswith("warning: ")]
        else:
            assert shown.out == ""
            lines = shown.err.splitlines()
            assert all(line.startswith("ms-zero: error: ") for line in lines)
            lines = [line.removeprefix("ms-zero: error: ") for line in lines]
        assert lines and all(line.isprintable() and len(line) < 400 for line in lines)
        return lines

    return refused


@pytest.mark.parametrize("case", CASES.FILES, ids=[case[0] for case in CASES.FILES])
def test_a_bad_run_file_is_refused_by_lint_and_by_train(refused, tmp_path, case):
    _, rule, _, content = case
    (tmp_path / "run.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    trained, linted = refused("train", "run.yaml"), refused("lint", "run.yaml")
    assert any(f"[{rule}]" in line for line in linted)
    assert trained[:40] == linted[:40]  # train shows at most 50 lines


@pytest.mark.parametrize("case", CASES.OVERRIDES, ids=[case[2][:20] for case in CASES.OVERRIDES])
def test_a_bad_override_is_refused_by_every_command(refused, case):
    rule, _, override = case
    if override.startswith("-"):
        override = f" {override}"  # argparse takes it for an option, which test_bad_arguments covers
    shown = [
        refused("lint", QUICKSTART, override),
        refused("train", QUICKSTART, override),
        refused("config", "show", QUICKSTART, override),
        refused("launch", QUICKSTART, "--workers", "2", override),
    ]
    assert len(shown[0]) == 1 and f"[{rule}]" in shown[0][0]
    assert shown == shown[:1] * 4


MESHES = [
    (["parallel.dp_shard=2"], "start 2 workers"),
    (["parallel.dp_shard=0"], "expected at least 1"),
    (["parallel.dp_shard=-1"], "expected at least 1"),
    (["parallel.dp_replicate=3"], "does not divide the number of workers, 4"),
    (["parallel.dp_replicate=99999999999"], "out of range"),
    (["parallel.dp_replicate=2147483647", "parallel.dp_shard=2147483647"], "number of workers is 4"),
    (["engine=graph", "parallel.zero_stage=0", "parallel.tp=2"], "parallel.tp"),
    (["parallel.cp=3"], "does not divide the number of workers, 4"),
    (["parallel.pp=3"], "does not divide the number of workers, 4"),
    (["parallel.tp=3"], "does not divide the number of workers, 4"),
    (["parallel.cp=1e9"], "not an integer"),
    (["parallel.zero_stage=4"], "out of range"),
    (["train.global_batch_size=7"], "not a multiple"),
    (["train.global_batch_size=1"], "not a multiple"),
    (["train.micro_batch_size=3"], "is not micro_batch_size x accumulation_steps x dp"),
    (["train.global_batch_size=auto"], "two of global_batch_size"),
    (["train.accumulation_steps=0"], "expected at least 1"),
    (["model.num_heads=7"], "does not divide hidden_size"),
    (["model.hidden_size=99999999999"], "out of range"),
    (["model.num_layers=1e9"], "not an integer"),
    (["model.vocab_size=200"], "200 rows cannot hold"),
    (["data.seq_len=100000"], "do not fit model.max_seq_len"),
    (["data.source=files"], "name at least one file"),
    (["data.files=[a.txt]"], "has no effect because data.source is stdlib"),
    (["hardware.device=h100"], "not in the device catalogue"),
    (["hardware.device=ascend-910b1"], "is a Ascend device, but hardware.target is CPU"),
    (["hardware.target=TPU"], "not allowed"),
]


@pytest.mark.parametrize(("overrides", "message"), MESHES, ids=[" ".join(case[0]) for case in MESHES])
def test_impossible_combinations_are_refused_before_a_start(refused, overrides, message):
    status = 3 if "engine=graph" in overrides else 2  # right, but not to be run
    shown = [
        refused("lint", QUICKSTART, "--workers", "4", *overrides, status=status),
        refused("launch", QUICKSTART, "--workers", "4", *overrides),
    ]
    assert any(message in line for line in shown[0]), shown[0]
    assert shown[0] == shown[1]


ARGUMENTS = [
    (["lint"], "required: RUN.yaml"),
    (["lint", ""], "cannot read this file"),
    (["lint", "."], "cannot read this file"),
    (["lint", "/dev/zero"], "cannot read this file"),
    (["lint", "no\0where"], "no\\x00where"),
    (["lint", "\udcff\x1b[31m"], "\\udcff\\x1b[31m"),
    (["lint", "x" * 300], "cannot read this file"),
    (["lint", "runs/quikstart"], "did you mean quickstart"),
    (["lint", "runs/../../etc/passwd"], "no preset"),
    (["lint", QUICKSTART, QUICKSTART], "expected section.key=value"),
    (["lint", QUICKSTART, "--train.steps=3"], "unrecognized arguments: --train.steps=3"),
    (["lint", QUICKSTART, "--no\nsuch\x1b[2J"], "--no\\nsuch\\x1b[2J"),
    (["lint", QUICKSTART, "--workers"], "expected one argument"),
    (["lint", QUICKSTART, "--workers", "0"], "number of workers: 0"),
    (["lint", QUICKSTART, "--workers=-3"], "number of workers: -3"),
    (["lint", QUICKSTART, "--workers", "2.5"], "invalid int value"),
    (["lint", QUICKSTART, "--workers", "9" * 5000], "invalid int value"),
    (["lint", QUICKSTART, "--workers", "9" * 30], "not a multiple"),
    (["config"], "required: action, RUN.yaml"),
    (["config", "show"], "required: RUN.yaml"),
    (["config", "shwo", QUICKSTART], "invalid choice: 'shwo'"),
    (["config", "show", QUICKSTART, "--workers", "-1"], "number of workers: -1"),
    (["config", "show", "nowhere.yaml"], "cannot read this file"),
    (["explain", "MZ999"], "nothing to explain about 'MZ999'"),
    (["explain", ""], "nothing to explain about ''"),
    (["explain", "train.stpes"], "did you mean train.steps"),
    (["explain", "\x1b[31m"], "'\\x1b[31m'"),
    (["explain", "a", "b"], "unrecognized arguments: b"),
    (["doctor", "--timeout", "0"], "--timeout 0"),
    (["doctor", "--timeout", "soon"], "invalid int value"),
    (["doctor", "--target", "TPU"], "invalid choice: 'TPU'"),
    (["doctor", "--json"], "expected one argument"),
    (["doctor", QUICKSTART], "unrecognized arguments"),
    (["launch", QUICKSTART, "--workers", "-2"], "at least 1 worker"),
    (["launch", QUICKSTART, "--workers", "2", "--nodes", "0"], "at least 1 node"),
    (["launch", QUICKSTART, "--workers", "3", "--nodes", "2"], "divisible"),
    (["launch", QUICKSTART, "--workers", "2", "--nodes", "2"], "needs --node-rank"),
    (["launch", QUICKSTART, "--workers", "2", "--node-rank", "5"], "out of range"),
    (["launch", QUICKSTART, "--workers", "2", "--port", "80"], "out of range"),
    (["launch", QUICKSTART, "--workers", "2", "--master", "no host"], "does not resolve"),
    (["launch", QUICKSTART, "--workers", "2", "--master", "no.such.host.invalid"], "resolve"),
    (["launch", QUICKSTART, "--workers", "2", "--master", "x" * 100], "resolve"),
    (["launch", QUICKSTART, "--workers", "2", "train.output_dir=/proc/out"], "cannot write to /proc/out"),
    (["launch", QUICKSTART, "--workers", "2", "train.output_dir=/dev/null/a"], "cannot write to /dev/null/a"),
    (["no\nsuch"], "invalid choice: 'no\\"),
    (["train", QUICKSTART, "--workers", "2"], "unrecognized arguments: --workers"),
]


@pytest.mark.parametrize(
    ("argv", "message"), ARGUMENTS, ids=[" ".join(argv)[-40:] or "none" for argv, _ in ARGUMENTS]
)
def test_bad_arguments(refused, argv, message):
    (line,) = refused(*argv)
    assert message in line


def run(*arguments, **options):
    """A real process with at most LIMIT_S seconds of processor time; returns status, stdout, stderr."""
    limit = lambda: resource.setrlimit(resource.RLIMIT_CPU, (int(LIMIT_S), int(LIMIT_S) + 1))  # noqa: E731
    done = subprocess.run(
        [sys.executable, "-m", "ms_zero", *arguments],
        preexec_fn=limit,
        capture_output=True,
        timeout=60,
        **{"cwd": REPOSITORY, **options},
    )
    return done.returncode, done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "nowhere.yaml"],
        ["lint", "nowhere.yaml"],
        ["launch", QUICKSTART, "--workers", "2", "train.steps=-1"],
        ["explain", "MZ999"],
        ["config", "show", QUICKSTART, "a"],
        [b"train", b"\xff\xfe.yaml"],
    ],
)
def test_a_real_process_ends_soon_with_status_2(arguments):
    status, out, errors = run(*arguments)
    assert status == 2
    assert len((out + errors).splitlines()) == (3 if arguments[0] == "lint" else 1)
    assert "Traceback" not in out + errors


def test_output_that_the_terminal_cannot_show_is_escaped(tmp_path):
    path = tmp_path / "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n.yaml"
    path.write_text(Path(QUICKSTART).read_text())
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    status, out, errors = run("lint", str(path), env=environment)
    assert (status, errors) == (0, "") and "gr\\xfcn.yaml: valid" in out
    status, out, errors = run("config", "show", str(path), env=environment)
    assert (status, errors) == (0, "") and "gr\\xfcn.yaml" in out


@pytest.mark.parametrize(
    ("command", "redirection", "status", "message"),
    [
        ("explain", ">&-", 0, ""),
        ("explain", ">&- 2>&-", 0, ""),
        ("explain", "> /dev/full", 2, "cannot write the output: No space left"),
        ("doctor --no-collective", "> /dev/full", 1, "cannot write the output: No space left"),
        ("doctor --no-collective", ">&-", 1, ""),
        ("doctor --no-collective", "| true", 0, ""),
    ],
)
def test_a_closed_or_full_output_is_no_crash(tmp_path, command, redirection, status, message):
    (tmp_path / "mindspore").mkdir()
    (tmp_path / "mindspore" / "__init__.py").write_text("raise ImportError('none')")  # quick to refuse
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)}
    shell = ["bash", "-c", f'"$0" -m ms_zero {command} {redirection}', sys.executable]
    done = subprocess.run(shell, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    assert done.returncode == status
    assert message in done.stderr and "Traceback" not in done.stderr and "Exception" not in done.stderr


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.files=[missing.txt]", "missing.txt does not exist"),
        ("data.files=['.']", "is a folder"),
        ("data.files=[binary.txt]", "not UTF-8"),
        ("data.files=['*.none']", "matches no file"),
    ],
)
def test_unusable_data_ends_a_training_process_soon_with_status_2(tmp_path, override, message):
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "GLOG_v": "3"}
    arguments = ["train", QUICKSTART, "train.output_dir=out", "data.source=files", override]
    status, out, errors = run(*arguments, cwd=tmp_path, env=environment)
    (line,) = [line for line in errors.splitlines() if not line.startswith("[WARNING]")]
    assert (status, out) == (2, "") and message in line
