"""docs/planner.md: its table is what the models say, its commands run."""

import re
from pathlib import Path

import pytest

from ms_zero.cli.main import main
from ms_zero.plan.layout import MIXED
from ms_zero.plan.published import ASCEND_ROWS, predict
from ms_zero.plan.update import update_bytes, update_seconds, without_master

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = ("planner.md", "planner.zh-CN.md")


def blocks(language, page=PAGES[0]):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_the_error_table_is_what_the_models_say(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    number = r"([\d.]+)"
    pattern = rf"^\| (\S+) \| {number} \| {number} \| ([+-][\d.]+)% \| {number} \| {number} \|$"
    rows = re.findall(pattern, text, re.MULTILINE)
    assert [row[0] for row in rows] == [row.name for row in ASCEND_ROWS]
    for (_, measured, speed, error, cap, memory), row in zip(rows, ASCEND_ROWS, strict=True):
        found = predict(row)
        assert float(measured) == row.tokens_per_second_per_device
        assert float(speed) == pytest.approx(found.tokens_per_second_per_device, abs=0.51)
        assert float(error) == pytest.approx(100 * found.error, abs=0.051)
        assert float(cap) == pytest.approx(row.cap / 2**30)
        assert float(memory) == pytest.approx(found.memory / 2**30, abs=0.051)


@pytest.mark.parametrize("page", PAGES)
def test_the_table_of_the_update_is_what_is_counted(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| (\d+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE)
    fused, unfused = update_bytes(MIXED), update_bytes(MIXED, fused=False)
    counts = (without_master(MIXED), unfused.total, fused.update, fused.total)
    assert [int(row[0]) for row in rows] == list(counts)
    for (_, size, seconds), count in zip(rows, counts, strict=True):
        assert float(size) == pytest.approx(175e9 * count / 1e12, abs=0.0051)
        assert float(seconds) == pytest.approx(update_seconds(175e9, count, 1.6e12), abs=0.0051)


@pytest.mark.parametrize("command", [line for block in blocks("bash") for line in block.splitlines()])
def test_the_command_runs(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    program, *arguments = command.split()
    assert program == "ms-zero"
    assert main(arguments) == 0
    assert capsys.readouterr().out


def test_the_timeline_is_what_the_command_prints(capsys):
    (command,) = (block.strip() for block in blocks("bash") if "schedule" in block)
    (timeline,) = blocks("text")
    main(command.split()[1:])
    assert timeline in capsys.readouterr().out
