"""What the launcher shows: the followed log without framework noise, and a progress line on terminals."""

import os
import re
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

_PROGRESS = re.compile(r"^ *\d+(/\d+)?  .* smp .* tok ")  # as ms_zero.monitor.format_line writes it
# "[WARNING] DEVICE(1234,7f..,python):2025-01-01-00:00:00.000 [file.cc:1] Function] text", as MindSpore logs.
_NOISE = re.compile(r"^\[(DEBUG|INFO|WARNING)\] [A-Z_]+ ?\(\d+")
_PYTHON_WARNING = re.compile(r"^\S+\.py:\d+: \w*Warning: ")


def is_noise(line: str) -> bool:
    """Whether a log line is the framework's chatter below the level of errors."""
    return bool(_NOISE.match(line) or _PYTHON_WARNING.match(line))


def is_verdict(line: str) -> bool:
    """Whether a log line is a user's error, which the launcher says itself."""
    return line.startswith("ms-zero: error: ")


def is_progress(line: str) -> bool:
    """Whether a log line reports a training step."""
    return bool(_PROGRESS.match(line))


class LogFollower:
    """Reads the complete lines that have been appended to a file that may not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def new_lines(self) -> list[str]:
        """Lines completed since the last call, without their line ends."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]

    def remainder(self) -> list[str]:
        """The new lines and a last one that has no line end."""
        lines = self.new_lines()
        rest, self._rest = self._rest, b""
        return lines + ([rest.decode("utf-8", "replace")] if rest else [])


class Console:
    """Plain lines, or on a terminal plain lines above one progress line that is rewritten in place.

    On a terminal a step line replaces the one before it; every ``keep_s`` seconds one is left standing.
    A reader that goes away (``| head``) or a full disk silences the console; the job goes on.
    """

    def __init__(self, stream: TextIO, *, keep_s: float = 10.0) -> None:
        self._stream = stream
        self._terminal = stream.isatty() and os.environ.get("TERM") != "dumb"
        self._keep_s = keep_s
        self._kept_at = time.monotonic()
        self._live = ""
        self._closed = False

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self._write(self._erase() + text + "\n")

    def progress(self, text: str) -> None:
        """Show a line that the next one replaces; off a terminal it is an ordinary line."""
        now = time.monotonic()
        if not self._terminal:
            self.line(text)
        elif now - self._kept_at >= self._keep_s:
            self._kept_at = now
            self.line(text)
        else:
            self.status(text)

    def status(self, text: str) -> None:
        """Show a passing remark on a terminal, nothing elsewhere."""
        text = text[: shutil.get_terminal_size().columns - 1]
        if self._terminal and text != self._live:
            erase, self._live = self._erase(), text
            self._write(erase + text)

    def relay(self, lines: Iterable[str]) -> None:
        """Show lines of a worker's log."""
        for line in lines:
            if is_noise(line) or is_verdict(line):
                continue
            if is_progress(line):
                self.progress(line)
            else:
                self.line(line)

    def finish(self) -> None:
        """Leave the last progress line standing and end it."""
        if self._live:
            self._live = ""
            self._write("\n")

    def _erase(self) -> str:
        live, self._live = self._live, ""
        return "\r\x1b[K" if live else ""

    def _write(self, text: str) -> None:
        if self._closed:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            self._closed = True


def tail(path: Path, count: int) -> list[str]:
    """The last ``count`` lines of a log that are not noise; empty when there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 256 * 1024))
            text = file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return []
    lines = [line for line in text.splitlines() if line.strip() and not is_noise(line)]
    return lines[-count:]
