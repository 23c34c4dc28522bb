"""``ms-zero translate``: the configs of other tools as run files, and a run file as a DeepSpeed config."""

import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ms_zero.config import check_config, dump, load_config
from ms_zero.config.translate import (
    FATES,
    TOOLS,
    Note,
    Translation,
    render_run_file,
    to_deepspeed,
    translate_file,
)
from ms_zero.errors import UserError, one_line

_WORDS = {
    "translated": "translated",
    "default": "written because defaults differ",
    "same": "the same here without a key",
    "unavailable": "not in this version",
    "untranslatable": "not translatable",
    "ignored": "not read by the tool itself",
    "unknown": "unknown",
}


@dataclass(frozen=True)
class Order:
    """What the command line asks for.

    Args:
        kind: A key of `TOOLS`, or `to-deepspeed`.
        file: What is translated.
        output: Where the result goes; None: to stdout.
        workers: Number of workers, or None.
        includes: Presets or files that the run file includes.
        skip_unknown: Whether keys that the tool does not know are left out instead of refused.
        overrides: `key=value` items for the run file that becomes a DeepSpeed config.

    """

    kind: str
    file: str
    output: str | None
    workers: int | None
    includes: Sequence[str]
    skip_unknown: bool
    overrides: Sequence[str]


def translate(order: Order) -> int:
    """Translate one file; returns 0. Nothing is written when something is refused (UserError)."""
    if order.workers is not None and order.workers < 1:
        raise UserError(f"--workers {order.workers}: at least 1 worker is needed")
    back = order.kind == "to-deepspeed"
    if not back and order.overrides:
        raise UserError(
            f"{one_line(order.overrides[0])}: overrides belong to to-deepspeed; edit the result instead"
        )
    if back and (order.includes or order.skip_unknown):
        raise UserError("--include and --skip-unknown belong to translations into a run file")
    if back:
        text, translation = _to_deepspeed(order)
    else:
        translation = translate_file(order.kind, order.file, order.workers)
        _refuse_unknown(translation, order.skip_unknown)
        title = f"{Path(order.file).name} ({TOOLS[order.kind].title})"
        text = render_run_file(translation, title, order.includes)
    if order.output is None:
        sys.stdout.write(text)
        _report(translation, sys.stderr)
        return 0
    _write(Path(order.output), text, Path(order.file))
    _report(translation, sys.stdout)
    print(f"written to {one_line(order.output)}")
    if not back:
        _check(order.output, order.workers)
    return 0


def _to_deepspeed(order: Order) -> tuple[str, Translation]:
    loaded = load_config(order.file, order.overrides, order.workers, to_run=False)
    translation = to_deepspeed(dump(loaded.config))
    return json.dumps(translation.values, indent=2) + "\n", translation


def _refuse_unknown(translation: Translation, skip: bool) -> None:
    unknown = [note for note in translation.notes if note.fate == "unknown"]
    if unknown and not skip:
        lines = [
            f"{note.where}: {note.source}: {note.reason} (--skip-unknown leaves it out)" for note in unknown
        ]
        raise UserError("\n".join(map(one_line, lines)))


def _report(translation: Translation, stream: object) -> None:
    """List every key by what became of it, the fewest words last."""
    for fate in reversed(FATES):
        for note in translation.notes:
            if note.fate == fate:
                print(f"{fate + ':':15s} {note}", file=stream)
    counts = [f"{translation.count(fate)} {_WORDS[fate]}" for fate in FATES if translation.count(fate)]
    print(f"{len(_keys(translation.notes))} keys: {', '.join(counts)}", file=stream)


def _keys(notes: Sequence[Note]) -> set[str]:
    return {note.source for note in notes if note.fate != "default"}


def _check(output: str, workers: int | None) -> None:
    """Tell what the new run file still lacks."""
    checked = check_config(output, (), workers)
    for finding in checked.findings:
        print(f"{finding.severity}: {finding}")
    errors = sum(finding.severity == "error" for finding in checked.findings)
    if errors:
        print(f"complete the file, then check it with 'ms-zero lint {one_line(output)}'")


def _write(path: Path, text: str, source: Path) -> None:
    """Write a new file at once: it is there whole, or not at all."""
    if path.exists() or path.is_symlink():
        raise UserError(
            f"{one_line(str(path))}: there is such a file already; name a new one with -o, or remove it"
        )
    folder = path.parent
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=folder)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"{one_line(str(path))}: cannot write there: {reason}") from None
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(0o666 & ~_umask())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink()
        raise UserError(f"{one_line(str(path))}: cannot write: {error.strerror}") from None


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
