"""Writes a translation as a run file that says where each value is from and what could not go over."""

from collections.abc import Mapping, Sequence
from typing import Any

from ms_zero.config.render import yaml_value
from ms_zero.config.translate.result import Note, Translation
from ms_zero.errors import one_line

_COLUMN = 40
_LEFT_OUT = ("untranslatable", "unavailable", "ignored", "unknown")


def render_run_file(translation: Translation, title: str, includes: Sequence[str] = ()) -> str:
    """Return the text of a run file: values with their source keys, then, as comments, what was left.

    Args:
        translation: Whose target is a run file.
        title: First line, such as `ds_config.json (DeepSpeed)`.
        includes: Presets or files to include below the values.

    """
    lines = [f"# Translated from {one_line(title)}."]
    if includes:
        lines += [f"include: {yaml_value(list(includes))}"]
    elif not translation.values:
        lines += ["train: {}"]  # a file of comments alone would be refused as empty
    origins = {note.target: note for note in translation.notes if note.fate in ("translated", "default")}
    for section, values in translation.values.items():
        lines += ["", f"{section}:", *_section(section, values, origins)]
    left = [note for note in translation.notes if note.fate in _LEFT_OUT]
    if left:
        lines += ["", "# Not translated:", *(f"# {note.fate:14s}  {note}" for note in left)]
    return "\n".join(lines) + "\n"


def _section(section: str, values: Mapping[str, Any], origins: Mapping[str, Note]) -> list[str]:
    lines = []
    for name, value in values.items():
        note = origins[f"{section}.{name}"]
        comment = f"{note.source}, {note.reason}" if note.fate == "default" else note.source
        lines.append(f"{f'  {name}: {yaml_value(value)}':<{_COLUMN}}  # {one_line(comment)}")
    return lines
