"""Writes step records and events to the console and to a JSON-lines file."""

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from ms_zero.errors import UserError
from ms_zero.monitor.record import StepRecord, format_line


class Monitor:
    """One rank's log.

    Each line of the file is one JSON object with ``event`` ("step" for records), ``time`` (seconds since the
    epoch) and the fields. JSON has no NaN or infinity: they are written as the strings "nan", "inf" and
    "-inf". Lines are flushed at once; an existing file is continued, also one that ends in half a line.
    """

    def __init__(
        self,
        console: TextIO | None = None,
        jsonl_path: str | Path | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the log.

        Args:
            console: where lines for people go, or None.
            jsonl_path: the file of this rank, or None; its folder is made if needed.
            clock: gives the time of an event.

        Raises:
            UserError: if the file cannot be opened.
        """
        self._console, self._clock = console, clock
        self._path = None if jsonl_path is None else Path(jsonl_path)
        self._file = None if self._path is None else self._open(self._path)

    def log(self, record: StepRecord) -> None:
        """Write the record of a step."""
        self._print(format_line(record))
        self._write("step", asdict(record))

    def event(self, kind: str, **fields: Any) -> None:
        """Write anything else that happened: ``event("checkpoint", step=10, path=str(path))``.

        Args:
            kind: what happened; "step" is taken by :meth:`log`.
            fields: JSON values.
        """
        assert kind != "step", "steps are logged as records"
        self._print(f"{kind}: " + "  ".join(f"{name} {_short(value)}" for name, value in fields.items()))
        self._write(kind, fields)

    def note(self, kind: str, **fields: Any) -> None:
        """Write an event for machines only."""
        assert kind != "step", "steps are logged as records"
        self._write(kind, fields)

    def message(self, text: str) -> None:
        """Write a line for people; machines see it as the field ``text`` of an event "message"."""
        self._print(text)
        self._write("message", {"text": text})

    def close(self) -> None:
        """Close the file; the console stays open."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _print(self, line: str) -> None:
        """Show a line; a reader that went away, or a full disk behind it, must not end a training."""
        if self._console is None:
            return
        try:
            self._console.write(line + "\n")
            self._console.flush()
        except OSError:
            self._console = None

    def _write(self, kind: str, fields: dict[str, Any]) -> None:
        if self._file is None:
            return
        line = {"event": kind, "time": self._clock(), **fields}
        try:
            self._file.write(json.dumps(_finite(line), allow_nan=False) + "\n")
        except OSError as error:
            with suppress(OSError):  # closing tries once more to write what is buffered
                self._file.close()
            self._file = None
            raise UserError(f"{self._path}: log cannot be written: {error.strerror}") from error

    @staticmethod
    def _open(path: Path) -> TextIO:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("a", encoding="utf-8", buffering=1)
            if file.tell() and _last_byte(path) != b"\n":  # a run died in the middle of a line
                file.write("\n")
        except OSError as error:
            raise UserError(f"{path}: log cannot be opened: {error.strerror}") from error
        return file


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


def _finite(value: Any) -> Any:
    """The value with NaN and infinity as strings."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
