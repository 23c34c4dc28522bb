"""Functions by the name of the file or module that they are in."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ms_zero.errors import UserError


def load_function(name: str) -> Callable[..., Any]:
    """The function that "package.module:function" or "path/to/file.py:function" names.

    Raises:
        UserError: there is no such file, module or function.
    """
    place, _, function = name.rpartition(":")
    module = _load_file(place) if place.endswith(".py") else importlib.import_module(place)
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"graph: {name}: {place} has no function {function}")
    return found


def _load_file(place: str) -> types.ModuleType:
    if not Path(place).is_file():
        raise UserError(f"graph: {place}: no such file")
    spec = importlib.util.spec_from_file_location("ms_zero_front_end_builder", place)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # MindSpore's parser looks for the source of a cell's module
    spec.loader.exec_module(module)
    return module
