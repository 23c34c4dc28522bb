"""The option --json that the scripts share."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STDOUT = Path("-")


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--json [PATH]``; its value goes to :func:`write_figures`."""
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=_STDOUT,
        metavar="PATH",
        help="write the figures as JSON to this file; without a path: print them on the last line",
    )


def write_figures(figures: Mapping[str, Any], path: Path | None) -> None:
    """To a file, to the last line of the output, or, without the option, nowhere."""
    if path == _STDOUT:
        print(json.dumps(figures))
    elif path:
        path.write_text(json.dumps(figures, indent=1) + "\n")
