"""``ms-zero data``: make token files of text, and check data before a run does."""

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ms_zero.errors import UserError, one_line

_RUN_SUFFIXES = (".yaml", ".yml")


def add_actions(parser: argparse.ArgumentParser) -> None:
    """Add the actions and their arguments to the parser of ``ms-zero data``."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add_tokenize = actions.add_parser(
        "tokenize",
        help="encode text to a .bin/.idx pair",
        description="Encode text files to PREFIX.bin and PREFIX.idx, for data.source=megatron. *.jsonl and "
        "*.ndjson hold a document on each line, any other file is one document.",
    ).add_argument
    add_tokenize("inputs", nargs="+", metavar="INPUT", help="text files and globs")
    add_tokenize("--output", required=True, metavar="PREFIX", help="where to write, without .bin and .idx")
    add_tokenize("--tokenizer", required=True, metavar="byte|FILE", help="byte, or a tokenizer.json")
    add_tokenize("--eot-token", metavar="TOKEN", help="token of FILE that ends a document")
    add_tokenize("--field", default="text", metavar="NAME", help="field of JSON lines (default text)")
    add_tokenize("--workers", type=int, metavar="N", help="processes (default: one for each core)")
    add_tokenize("--overwrite", action="store_true", help="replace an existing pair")
    add_lint = actions.add_parser(
        "lint",
        help="read all data and list what is wrong",
        description="Read all data of a run file, or the named files, and list what is wrong; status 2 if a "
        "run would be refused or fail. *.bin and *.idx are token files, *.jsonl and *.ndjson JSON lines.",
    ).add_argument
    add_lint("targets", nargs="+", metavar="RUN.yaml|PATH", help="a run file and overrides, or files, globs")
    add_lint("--vocab-size", type=int, metavar="N", help="ids of named token files must be below N")


def run_action(arguments: argparse.Namespace) -> int:
    """Run the chosen action; returns the exit status."""
    if arguments.action == "tokenize":
        return tokenize(
            arguments.inputs,
            arguments.output,
            tokenizer=arguments.tokenizer,
            eot_token=arguments.eot_token,
            field=arguments.field,
            workers=arguments.workers,
            overwrite=arguments.overwrite,
        )
    return lint(arguments.targets, arguments.vocab_size)


def tokenize(
    inputs: Sequence[str],
    output: str,
    *,
    tokenizer: str,
    eot_token: str | None,
    field: str,
    workers: int | None,
    overwrite: bool,
) -> int:
    """Encode files to a pair; progress goes to stderr, one line about the result to stdout."""
    from ms_zero.data import get_tokenizer
    from ms_zero.data.prepare import tokenize_files

    if workers is not None and workers < 1:
        raise UserError(f"--workers {workers}: expected at least 1")
    if tokenizer == "byte" and eot_token is not None:
        raise UserError("--eot-token has no effect on the byte tokenizer: remove it")
    encoder = get_tokenizer("byte") if tokenizer == "byte" else get_tokenizer("file", tokenizer, eot_token)
    progress = Progress(sys.stderr)
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # after cleaning up
    try:
        written = tokenize_files(
            inputs,
            output,
            encoder,
            workers=workers or len(os.sched_getaffinity(0)),
            field=field,
            overwrite=overwrite,
            on_progress=progress.show,
        )
    finally:
        signal.signal(signal.SIGTERM, before)
        progress.close()
    empty = f"; left out {written.empty:,} empty" if written.empty else ""
    print(
        f"{one_line(output)}.bin: {written.documents:,} documents, {written.tokens:,} tokens of "
        f"{written.dtype}, vocabulary {encoder.vocab_size:,}, end of text {encoder.eot_id}{empty}"
    )
    return 0


def lint(targets: Sequence[str], vocab_size: int | None) -> int:
    """Print every finding and a line of verdict; 2 when a run would be refused or fail."""
    is_run = _is_run(targets[0])
    if vocab_size is not None and vocab_size < 1:
        raise UserError(f"--vocab-size {vocab_size}: expected at least 1")
    if is_run and vocab_size is not None:
        raise UserError("--vocab-size is for named files: a run file has model.vocab_size")
    findings = _lint_run(targets[0], targets[1:]) if is_run else _lint_files(targets, vocab_size)
    counts = {"error": 0, "warning": 0}
    for severity, message in findings:
        counts[severity] += 1
        print(f"{severity}: {one_line(message)}")
    verdict = "refused" if counts["error"] else "usable"
    name = one_line(targets[0]) + (f" and {len(targets) - 1} more" if len(targets) > 1 and not is_run else "")
    print(f"{name}: {verdict}: errors: {counts['error']}, warnings: {counts['warning']}")
    return 2 if counts["error"] else 0


def _is_run(target: str) -> bool:
    """Whether a target is a run file or the name of a preset, and not data."""
    path = Path(target)
    preset = target.startswith("runs/") and not (path.exists() or path.with_name(f"{path.name}.idx").exists())
    return path.suffix in _RUN_SUFFIXES or (preset and not path.suffix)


def _lint_run(run: str, overrides: Sequence[str]) -> list[tuple[str, str]]:
    from ms_zero.config import load_config
    from ms_zero.data.lint import lint_source
    from ms_zero.data.run import load_data, sources_of, tokenizer_of

    config = load_config(run, overrides, None, to_run=False).config
    found = [
        (finding.severity, finding.message)
        for source in sources_of(config.data)
        for finding in lint_source(
            source, tokenizer=tokenizer_of(config.data), vocab_size=config.model.vocab_size
        )
    ]
    if not any(severity == "error" for severity, _ in found):
        try:
            load_data(config)  # what only shows when all is put together, such as a part without documents
        except UserError as error:
            found.append(("error", str(error)))
    return found


def _lint_files(paths: Sequence[str], vocab_size: int | None) -> list[tuple[str, str]]:
    from ms_zero.data import Source
    from ms_zero.data.lint import lint_source
    from ms_zero.data.prepare import is_jsonl

    found = []
    for name in paths:
        path = Path(name)
        pair = path.suffix in (".bin", ".idx") or (not path.exists() and Path(f"{name}.idx").exists())
        kind = "megatron" if pair else "jsonl" if is_jsonl(path) else "files"
        for finding in lint_source(Source(kind, [name]), tokenizer=None, vocab_size=vocab_size):
            found.append((finding.severity, finding.message))
    return found


class Progress:
    """Tells how far encoding is: in one line that is rewritten on a terminal, else in a line now and then."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._terminal = stream, stream.isatty()
        self._interval = 0.2 if self._terminal else 10.0
        self._start = self._last = time.monotonic()
        self._width = 0

    def show(self, done: int, total: int, tokens: int) -> None:
        """Report bytes of input done and in all, and ids so far."""
        now = time.monotonic()
        if now - self._last < self._interval and not (self._terminal and done == total):
            return
        self._last, elapsed = now, max(now - self._start, 1e-9)
        rate = done / elapsed
        share = done / total if total else 1.0
        left = f", {(total - done) / rate:.0f} s left" if 0 < done < total else ""
        size = f"{done / 1e6:,.1f} of {total / 1e6:,.1f} MB"
        text = f"{share:6.1%}  {size}, {tokens:,} tokens, {rate / 1e6:.1f} MB/s{left}"
        if self._terminal:
            bar = "=" * int(20 * share)
            self._write(f"\r[{bar:<20}] {text:<{self._width}}")
            self._width = len(text)
        else:
            self._write(f"{text.strip()}\n")

    def close(self) -> None:
        """End the line."""
        if self._terminal and self._width:
            self._write("\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
