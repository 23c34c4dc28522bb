"""The log of a rank: the console line, the JSON lines, and files that earlier runs left."""

import io
import json
import math
from dataclasses import replace

import pytest

from ms_zero.errors import UserError
from ms_zero.monitor import Monitor, StepRecord, format_line, host_rss_bytes

RECORD = StepRecord(
    step=20,
    total_steps=200,
    consumed_samples=640,
    consumed_tokens=81920,
    loss=3.24123,
    lr=3e-4,
    grad_norm=1.2345,
    tokens_per_second_per_device=12345.6,
    tflops_per_device=0.0712,
    mfu=None,
    memory_bytes=512 << 20,
    eta_seconds=83.0,
)
HUGE = StepRecord(
    step=99998,
    total_steps=99999,
    consumed_samples=987_654_321,
    consumed_tokens=15_200_000_000_000,
    loss=11.23456,
    lr=1.25e-5,
    grad_norm=123456.7,
    tokens_per_second_per_device=4160.2,
    tflops_per_device=312.4,
    mfu=0.4512,
    memory_bytes=61 << 30,
    eta_seconds=27 * 86400.0,
)
UNKNOWN = replace(
    RECORD,
    total_steps=None,
    loss=math.nan,
    grad_norm=math.inf,
    tokens_per_second_per_device=None,
    tflops_per_device=None,
    memory_bytes=None,
    eta_seconds=None,
)


def test_the_line_shows_everything():
    assert format_line(RECORD) == (
        " 20/200    640 smp 81.9k tok  loss 3.2412 lr 3.0e-04 norm  1.23  "
        "12.3k tok/s 0.071 TF/s MFU n/a  512MiB  eta 1m23s"
    )
    assert "MFU 45%" in format_line(HUGE)


def test_lines_fit_and_columns_stay_in_place():
    lines = [format_line(record) for record in (RECORD, HUGE, UNKNOWN)]
    assert all(80 <= len(line) <= 120 for line in lines), [len(line) for line in lines]
    later = format_line(replace(RECORD, step=150, consumed_tokens=999_999, loss=2.5, grad_norm=0.5))
    assert [later.index(word) for word in ("smp", "loss", "norm", "MFU", "eta")] == [
        lines[0].index(word) for word in ("smp", "loss", "norm", "MFU", "eta")
    ]


def test_what_is_not_known_or_not_finite_is_said():
    line = format_line(UNKNOWN)
    assert line.startswith("20  ")
    for text in ("loss    nan", "norm   inf", "n/a tok/s", "n/a TF/s", "MFU n/a", "eta n/a"):
        assert text in line


def strict_lines(path):
    def refuse(name):
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_every_line_is_strict_json_and_complete(tmp_path):
    path = tmp_path / "new" / "rank-0.jsonl"
    with Monitor(jsonl_path=path, clock=lambda: 12.5) as monitor:
        monitor.log(RECORD)
        monitor.log(UNKNOWN)
        monitor.event("eval", step=20, loss=math.inf, nested={"a": [math.nan, (1, -math.inf)]})
        assert len(strict_lines(path)) == 3  # flushed before it is closed
    step, unknown, event = strict_lines(path)
    assert step == {"event": "step", "time": 12.5, **vars(RECORD)}
    assert (unknown["loss"], unknown["grad_norm"], unknown["mfu"]) == ("nan", "inf", None)
    assert math.isnan(float(unknown["loss"]))
    assert event == {
        "event": "eval",
        "time": 12.5,
        "step": 20,
        "loss": "inf",
        "nested": {"a": ["nan", [1, "-inf"]]},
    }


def test_the_console_gets_lines_for_people():
    console = io.StringIO()
    monitor = Monitor(console)
    monitor.log(RECORD)
    monitor.event("eval", step=20, loss=2.7182818, text="a b")
    monitor.close()
    assert console.getvalue() == format_line(RECORD) + "\neval: step 20  loss 2.7183  text a b\n"


def test_notes_are_for_machines_only(tmp_path):
    console = io.StringIO()
    with Monitor(console, tmp_path / "log.jsonl") as monitor:
        monitor.note("run", config="model: x", world_size=2)
    assert console.getvalue() == ""
    written = json.loads((tmp_path / "log.jsonl").read_text())
    assert {"event": "run", "config": "model: x", "world_size": 2}.items() <= written.items()


def test_a_reader_that_goes_away_silences_the_console_only(tmp_path):
    class Broken(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    path = tmp_path / "metrics.jsonl"
    with Monitor(Broken(), path) as monitor:
        monitor.message("one")
        monitor.message("two")
    assert [json.loads(line)["text"] for line in path.read_text().splitlines()] == ["one", "two"]


def test_a_monitor_without_outputs_is_quiet(capsys):
    with Monitor() as monitor:
        monitor.log(RECORD)
        monitor.event("stop")
    assert capsys.readouterr() == ("", "")


def test_a_resumed_run_continues_the_file_after_half_a_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "step"}\n{"event": "st')
    with Monitor(jsonl_path=path) as monitor:
        monitor.event("resume", step=7)
    first, half, resumed = path.read_text().splitlines()
    assert (first, half) == ('{"event": "step"}', '{"event": "st')
    assert json.loads(resumed)["step"] == 7
    with Monitor(jsonl_path=path) as monitor:
        monitor.event("again")
    assert len(path.read_text().splitlines()) == 4


def test_values_that_json_cannot_hold_are_an_error(tmp_path):
    with Monitor(jsonl_path=tmp_path / "log.jsonl") as monitor, pytest.raises(TypeError):
        monitor.event("eval", value=object())


def test_a_file_that_cannot_be_opened_or_written_gives_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"log\.jsonl: log cannot be opened: (Not a directory|File exists)$"):
        Monitor(jsonl_path=tmp_path / "file" / "log.jsonl")


def test_a_full_disk_gives_one_line():
    monitor = Monitor(jsonl_path="/dev/full")
    with pytest.raises(UserError, match=r"^/dev/full: log cannot be written: No space left on device$"):
        monitor.event("eval", step=1)


def test_resident_memory_follows_an_allocation():
    before = host_rss_bytes()
    block = bytearray(64 << 20)
    block[:: 4096] = b"x" * len(block[:: 4096])
    assert host_rss_bytes() - before > 48 << 20
