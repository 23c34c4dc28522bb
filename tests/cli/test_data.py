"""``ms-zero data``: what a user sees, and a run on data made with it."""

import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import ms_zero
from ms_zero.cli.data import Progress
from ms_zero.cli.main import main
from ms_zero.data.indexed import IndexedTokens, IndexedWriter

BEYOND = "beyond the vocabulary of 257"
RUN = """\
include: [models/gpt-tiny]
model: {{num_layers: 1, hidden_size: 16, num_heads: 2}}
data: {{seq_len: 16, source: megatron, files: [{prefix}]}}
train: {{steps: 3, global_batch_size: 16, accumulation_steps: 1, output_dir: out}}
optim: {{warmup_steps: 1}}
"""


ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(ms_zero.__file__).parents[1]), "GLOG_v": "3"}


def python(*argv, cwd):
    command = [sys.executable, *argv]
    return subprocess.run(
        command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=240
    )


def write_pair(prefix, documents):
    with IndexedWriter(prefix, np.uint16) as writer:
        for document in documents:
            writer.add(np.array(document, np.uint16), np.array([len(document)]))


@pytest.fixture
def cli(tmp_path, monkeypatch, capsys):
    """Run a command in a folder with some text; returns status, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": f"document {number} " * 5, "body": "other"}) for number in range(30)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("plain text")

    def cli(*argv):
        status = main([str(item) for item in argv])
        return status, *capsys.readouterr()

    return cli


def test_tokenize_says_what_it_wrote(cli):
    status, out, err = cli("data", "tokenize", "a.jsonl", "b.txt", "--output", "out", "--tokenizer", "byte")
    tokens = IndexedTokens("out").tokens.size
    assert (status, err) == (0, "")
    assert out == f"out.bin: 31 documents, {tokens:,} tokens of uint16, vocabulary 257, end of text 256\n"


def test_tokenize_takes_another_field(cli):
    assert cli("data", *BYTE, "--field", "body")[0] == 0
    assert bytes(IndexedTokens("o").document(0)[:-1].tolist()) == b"other"


TOKENIZE = ["tokenize", "a.jsonl", "--output", "o"]
BYTE = [*TOKENIZE, "--tokenizer", "byte"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "arguments are required: ACTION"),
        (["tokenise"], "invalid choice: 'tokenise'"),
        (["tokenize"], "arguments are required: INPUT, --output, --tokenizer"),
        (TOKENIZE, "required: --tokenizer"),
        (["tokenize", "none", "--output", "o", "--tokenizer", "byte"], "none does not exist"),
        ([*TOKENIZE, "--tokenizer", "bpe"], "bpe does not exist or is no file"),
        ([*TOKENIZE, "--tokenizer", "a.jsonl"], "a.jsonl is no JSON"),
        ([*BYTE, "--output", "x/o"], "cannot write x/o.bin"),
        ([*BYTE, "--output", ""], "--output '' has no file name"),
        ([*BYTE, "--output", "."], "--output '.' has no file name"),
        ([*BYTE, "--output", ".."], "--output '..' has no file name"),
        ([*BYTE, "--output", "n" * 300], "n.bin: File name too long"),
        ([*BYTE, "--workers", "0"], "--workers 0: expected at least 1"),
        ([*BYTE, "--eot-token", "x"], "--eot-token has no effect"),
        ([*BYTE, "--field", "x"], "a.jsonl:1: no field 'x'; the object has \"text\", \"body\""),
        (["lint"], "arguments are required"),
        (["lint", "none.yaml"], "cannot read this file"),
        (["lint", "runs/none"], "no such file, and no preset"),
        (["lint", "none.yaml", "--vocab-size", "3"], "--vocab-size is for named files"),
        (["lint", "b.txt", "--vocab-size", "0"], "--vocab-size 0: expected at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(cli, tmp_path, argv, message):
    before = sorted(tmp_path.iterdir())
    status, out, err = cli("data", *argv)
    assert status == 2 and out == ""
    assert err.startswith("ms-zero: error: ") and err.count("\n") == 1 and message in err
    assert sorted(tmp_path.iterdir()) == before


def test_help_is_quick_and_complete(tmp_path):
    code = (
        "import sys; from ms_zero.cli.main import main\n"
        "try: main(['data', 'tokenize', '--help'])\n"
        "except SystemExit: sys.exit(bool({'numpy', 'mindspore', 'yaml'} & set(sys.modules)))"
    )
    result = python("-c", code, cwd=tmp_path)
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("--output", "--tokenizer", "--workers", "--eot-token"))


def test_lint_of_files(cli, tmp_path):
    write_pair("good", [[1, 2]])
    write_pair("bad", [[1, 300], []])
    assert cli("data", "lint", "a.jsonl", "b.txt", "good") == (
        0,
        "a.jsonl and 2 more: usable: errors: 0, warnings: 0\n",
        "",
    )
    status, out, _ = cli("data", "lint", "bad.idx", "--vocab-size", "257")
    assert status == 2
    assert out.splitlines() == [
        f"error: {tmp_path}/bad.bin: 1 ids are {BEYOND}, the first is 300 in document 0, id 1",
        f"warning: {tmp_path}/bad.bin: 1 empty documents, the first is 1",
        "bad.idx: refused: errors: 1, warnings: 1",
    ]
    assert cli("data", "lint", "bad.bin")[0] == 0


def test_lint_of_a_run(cli, tmp_path):
    write_pair("data", [[1, 2, 256], [3, 400, 256]])
    (tmp_path / "run.yaml").write_text(RUN.format(prefix="data"))
    status, out, _ = cli("data", "lint", "run.yaml")
    assert status == 2 and f"1 ids are {BEYOND}, the first is 400 in document 1, id 1" in out
    assert cli("data", "lint", "run.yaml", "model.vocab_size=401")[0] == 0
    status, out, _ = cli("data", "lint", "run.yaml", "data.source=files", "data.files=[b.txt]")
    assert status == 2 and "one document (b.txt) cannot be split" in out
    parts = "data.parts=[{source: stdlib, weight: 1e-9}, {source: stdlib, weight: 1}]"
    (tmp_path / "mix.yaml").write_text(RUN.format(prefix="x").replace("megatron, files: [x]", "mixture"))
    status, _, err = cli("data", "lint", "mix.yaml", parts)
    assert status == 2 and "data.parts[0].weight: 1e-09 is less than 1/65536" in err


def test_a_run_trains_on_tokenized_data_and_refuses_bad_ids(cli, tmp_path):
    assert cli("data", "tokenize", "a.jsonl", "--output", "good", "--tokenizer", "byte")[0] == 0
    (tmp_path / "run.yaml").write_text(RUN.format(prefix="good"))
    write_pair("bad", [[300] * 400, [300] * 40])

    def train(*overrides):
        return python("-m", "ms_zero", "train", "run.yaml", *overrides, cwd=tmp_path)

    good = train()
    assert good.returncode == 0, good.stderr
    assert "1 token file under" in good.stdout and "checkpoint: step 3" in good.stdout
    bad = train("data.files=[bad]", "train.output_dir=other", "data.tokenizer=none", "model.vocab_size=257")
    assert bad.returncode == 2
    (line,) = [line for line in bad.stderr.splitlines() if line.startswith("ms-zero: error: ")]
    assert "token id 300 is beyond model.vocab_size 257: sample" in line and "bad.bin, document 0" in line
    assert "Traceback" not in bad.stderr


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_rewrites_one_line_on_a_terminal():
    stream = Terminal()
    progress = Progress(stream)
    progress._interval = 0.0
    progress.show(500_000, 1_000_000, 123_456)
    progress.show(1_000_000, 1_000_000, 250_000)
    progress.close()
    text = stream.getvalue()
    assert text.count("\n") == 1 and text.endswith("\n") and text.count("\r") == 2
    assert "[==========          ]  50.0%  0.5 of 1.0 MB, 123,456 tokens" in text and "s left" in text
    assert "[====================] 100.0%" in text


def test_progress_is_rare_elsewhere():
    stream = io.StringIO()
    progress = Progress(stream)
    for done in range(1000):
        progress.show(done, 1000, done)
    progress.close()
    assert stream.getvalue() == ""


HANGING = """\
import sys, time
from ms_zero.cli.main import main
from ms_zero.data import prepare
prepare.encode_unit = lambda unit, tokenizer: time.sleep(600)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_stopping_leaves_nothing_behind(cli, tmp_path, number, status):
    before = sorted(tmp_path.iterdir())
    command = [sys.executable, "-c", HANGING, "data", *BYTE, "--workers", "1"]
    process = subprocess.Popen(command, cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE)
    while not list(tmp_path.glob(".o.bin.*.part")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status and b"Traceback" not in err
    assert sorted(tmp_path.iterdir()) == before


FULL = """\
import resource, sys
from ms_zero.cli.main import main
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("inputs", [["a.jsonl"], ["tiny.jsonl"]])
def test_a_full_disk_is_told_in_one_line_and_leaves_nothing_behind(cli, tmp_path, inputs):
    (tmp_path / "tiny.jsonl").write_text('{"text": "0123456789"}\n' * 4)
    before = sorted(tmp_path.iterdir())
    command = ["tokenize", *inputs, "--output", "o", "--tokenizer", "byte"]
    result = python("-c", FULL, "data", *command, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr == "ms-zero: error: cannot write o.bin and .idx: File too large\n"
    assert sorted(tmp_path.iterdir()) == before


def test_the_page_about_data_works(cli, tmp_path):
    page = (Path(ms_zero.__file__).parents[1] / "docs" / "data.md").read_text()
    (commands,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    (tmp_path / "a.jsonl").rename(tmp_path / "corpus.jsonl")
    for command in commands.splitlines():
        name, *argv = shlex.split(command)
        assert name == "ms-zero" and cli(*argv)[0] == 0
    runs = re.findall(r"^```yaml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert len(runs) == 2
    for number, text in enumerate(runs):
        (tmp_path / f"run{number}.yaml").write_text(text)
        status, out, _ = cli("data", "lint", f"run{number}.yaml")
        assert (status, out) == (0, f"run{number}.yaml: usable: errors: 0, warnings: 0\n")
