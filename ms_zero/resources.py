"""Finds the presets that ship with the package: one finder for wheels, editable installs and source trees."""

import re
from collections.abc import Iterable
from pathlib import Path

from ms_zero.errors import UserError

KINDS = ("models", "clusters", "runs")

_PACKAGE = Path(__file__).resolve().parent
_MAX_KNOWN = 12  # names in a message that suggests nothing better
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def config_dir() -> Path:
    """Return the folder that holds `models/`, `clusters/` and `runs/`.

    A source tree (also an editable install) uses `<repository>/configs`, so that an edit is seen at once; an
    installed wheel uses `ms_zero/_resources/configs`. Raises UserError when neither is there.
    """
    repository = _PACKAGE.parent
    if (repository / "pyproject.toml").is_file() and (repository / "configs").is_dir():
        return repository / "configs"
    packaged = _PACKAGE / "_resources" / "configs"
    if packaged.is_dir():
        return packaged
    raise UserError(f"the presets are missing: expected {packaged}; install ms_zero again")


def list_presets(kind: str) -> tuple[str, ...]:
    """Return the names of all presets of one kind (`models`, `clusters` or `runs`), sorted."""
    assert kind in KINDS, kind
    return tuple(sorted(path.stem for path in (config_dir() / kind).glob("*.yaml")))


def find_preset(kind: str, name: str) -> Path:
    """Return the file of preset `name`; raises UserError with the nearest names when there is none."""
    assert kind in KINDS, kind
    path = config_dir() / kind / f"{name}.yaml"
    if _NAME.fullmatch(name) and path.is_file():
        return path
    raise UserError(f"no preset {f'{kind}/{name[:100]}'!r}{did_you_mean(name, list_presets(kind))}")


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """Return the end of an error message: the nearest candidates, or the first ones when none is near."""
    candidates = tuple(candidates)
    near = nearest(name, candidates)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    if not candidates:
        return ""
    more = f" and {len(candidates) - _MAX_KNOWN} more" if len(candidates) > _MAX_KNOWN else ""
    return f"; known: {', '.join(candidates[:_MAX_KNOWN])}{more}"


def nearest(name: str, candidates: Iterable[str], count: int = 2) -> list[str]:
    """Return up to `count` candidates that resemble `name`, best first."""
    import difflib  # only needed once something is wrong; keeps a good load quick

    # Matching is quadratic in length, so a hostile name is cut before it is compared.
    return difflib.get_close_matches(name[:64], list(candidates), n=count, cutoff=0.6)
