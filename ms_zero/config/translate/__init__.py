"""Translations between run files and the configs of other tools; what cannot go over is listed.

Facts about the tools are in one module a tool: tables of keys (`*_keys.py`) and what depends on several keys.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ms_zero.config.translate.deepspeed import translate_deepspeed
from ms_zero.config.translate.deepspeed_back import to_deepspeed
from ms_zero.config.translate.files import read_arguments, read_mapping
from ms_zero.config.translate.fsdp import translate_fsdp
from ms_zero.config.translate.megatron import translate_megatron
from ms_zero.config.translate.mindformers import translate_mindformers
from ms_zero.config.translate.render import render_run_file
from ms_zero.config.translate.result import FATES, Fate, Note, Source, Translation

__all__ = [
    "FATES",
    "TOOLS",
    "Fate",
    "Note",
    "Tool",
    "Translation",
    "render_run_file",
    "to_deepspeed",
    "translate_file",
]


@dataclass(frozen=True)
class Tool:
    """A tool whose files can be translated.

    Args:
        title: Its name.
        file: What is read, for help texts.
        read: Reads the file: (path, number of workers or None).
        translate: Translates what was read.

    """

    title: str
    file: str
    read: Callable[[str | Path, int | None], Source]
    translate: Callable[[Source], Translation]


TOOLS: Final[Mapping[str, Tool]] = {
    "deepspeed": Tool("DeepSpeed", "ds_config.json", read_mapping, translate_deepspeed),
    "fsdp": Tool(
        "PyTorch FSDP", "options, accelerate's or Hugging Face's config", read_mapping, translate_fsdp
    ),
    "mindformers": Tool("MindFormers", "graph or PyNative YAML", read_mapping, translate_mindformers),
    "megatron": Tool("Megatron-LM", "script or file of arguments", read_arguments, translate_megatron),
}
"""Tools by the name that the command line uses."""


def translate_file(tool: str, path: str | Path, workers: int | None = None) -> Translation:
    """Translate a file of another tool into values of a run file.

    Args:
        tool: A key of `TOOLS`.
        path: The file.
        workers: Number of workers that the run is meant for; hybrid sharding needs it where the file tells
            only one of its two degrees.

    Returns:
        Values that the schema of this version takes, and what became of each key, with its place.

    Raises:
        UserError: The file cannot be read, or the tool itself would refuse it; one line, with the place.

    """
    source = TOOLS[tool].read(path, workers)
    translation = TOOLS[tool].translate(source)
    notes = tuple(
        replace(note, where=source.places.get(note.source, source.label)) for note in translation.notes
    )
    return replace(translation, notes=notes)
