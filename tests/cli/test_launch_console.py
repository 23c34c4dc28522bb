"""What the launcher shows on terminals and elsewhere."""

import io

from ms_zero.cli.launch_console import Console, LogFollower, is_noise, is_progress, tail
from ms_zero.monitor import StepRecord, format_line


class Terminal(io.StringIO):
    def isatty(self):
        return True


def step_line(step):
    record = StepRecord(
        step=step,
        consumed_samples=32 * step,
        consumed_tokens=4096 * step,
        loss=2.5,
        lr=1e-3,
        grad_norm=1.25,
        tokens_per_second_per_device=1000.0,
        tflops_per_device=0.01,
        mfu=None,
        memory_bytes=2**30,
        eta_seconds=12.0,
    )
    return format_line(record)


def test_step_lines_of_the_monitor_are_progress_and_other_lines_are_not():
    assert is_progress(step_line(3)) and is_progress(step_line(123456))
    assert not is_progress("validation loss 2.5 at step 3") and not is_progress("3 files")


def test_framework_chatter_is_noise_but_errors_are_not():
    where = "(1234,7f00,python):2025-01-01-00:00:00.000.000 [file.cc:10] Init] text"
    assert is_noise(f"[WARNING] DISTRIBUTED{where}") and is_noise(f"[INFO] ME{where}")
    assert is_noise("[WARNING] ME(12:140,MainProcess):2025-01-01 [x.py:1] text")
    assert is_noise("/site-packages/mindspore/x.py:12: UserWarning: old")
    assert not is_noise(f"[ERROR] DISTRIBUTED{where}")
    assert not is_noise("warning: optim.warmup_steps is longer than the run")


def test_off_a_terminal_every_line_is_plain():
    stream = io.StringIO()
    console = Console(stream)
    console.status("starting")
    console.relay(["hello", step_line(1), step_line(2)])
    console.finish()
    assert stream.getvalue() == f"hello\n{step_line(1)}\n{step_line(2)}\n"


def test_on_a_terminal_steps_replace_each_other_and_lines_stay(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    console = Console(stream, keep_s=1e9)
    console.relay([step_line(1), step_line(2), "checkpoint saved", step_line(3)])
    console.finish()
    one, two, three = (step_line(step)[:39] for step in (1, 2, 3))
    erase = "\r\x1b[K"
    assert stream.getvalue() == f"{one}{erase}{two}{erase}checkpoint saved\n{three}\n"


def test_on_a_terminal_a_step_line_stays_from_time_to_time(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    Console(stream, keep_s=0.0).relay([step_line(1)])
    assert stream.getvalue() == f"{step_line(1)}\n"


def test_an_error_of_the_user_is_left_to_the_launcher():
    stream = io.StringIO()
    Console(stream).relay(["ms-zero: error: no such corpus", "ms-zero: stopping"])
    assert stream.getvalue() == "ms-zero: stopping\n"


def test_reader_that_goes_away_silences_the_console():
    class Broken(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    console = Console(Broken())
    console.line("one")
    console.line("two")
    console.finish()


def test_follower_gives_complete_lines_once(tmp_path):
    path = tmp_path / "log"
    follower = LogFollower(path)
    assert follower.new_lines() == []
    with path.open("wb") as log:
        log.write("één\ntw".encode())
        log.flush()
        assert follower.new_lines() == ["één"]
        log.write(b"o\n\xff\nend")
        log.flush()
        assert follower.new_lines() == ["two", "�"]
        assert follower.remainder() == ["end"]
        assert follower.remainder() == []


def test_tail_skips_noise_and_survives_a_missing_file(tmp_path):
    path = tmp_path / "log"
    assert tail(path, 3) == []
    path.write_text("a\n\n[WARNING] ME(1,2): x\nb\nc\nd\n")
    assert tail(path, 3) == ["b", "c", "d"]
    assert tail(path, 9) == ["a", "b", "c", "d"]
