"""What MindSpore's front end makes of a training cell on one rank of a cluster, found out without a cluster.

A case names a function that builds a cell and its inputs. A process of its own takes the place of the rank,
compiles the cell with MindSpore's front end for Ascend, and reports the operations of the graph. What is
checked that way is what the compiler inserts: collectives, their groups, order and sizes, and the shapes of
parameters.
Kernels, memory, numbers and speed need a device.

MindSpore is imported once, in a template process that forks a process for each case. This module does not
import it.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ms_zero.errors import UserError
from ms_zero.graph.ir import Graph, parse
from ms_zero.template import NoReport, ask

_REPORT_GRACE_S = 20.0
_OWN = "ms_zero.graph.own:build_inspected"
_ENVIRONMENT = {
    "GLOG_v": "2",  # warnings: tests look for deprecations
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "passive",
}


class FrontEndUnavailable(UserError):
    """This MindSpore cannot be made to compile without devices; the message says why."""


class FrontEndError(RuntimeError):
    """The build or the compilation of a case failed.

    Attributes:
        reason: what the front end or the builder said, in one line; the message holds the traceback.
    """

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


@dataclass(frozen=True)
class Case:
    """One rank of one training step.

    Attributes:
        builder: "package.module:function" or "path/to/file.py:function"; called with ``arguments``, after the
            process took the place of the rank. Returns the cell and the tuple of its inputs.
        arguments: of the builder, as JSON can hold them.
        rank: whose graph it is.
        size: ranks in all.
        local_size: devices of a machine.
    """

    builder: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rank: int = 0
    size: int = 8
    local_size: int = 8


def own_case(function: str, arguments: Mapping[str, Any], *, rank: int, size: int) -> Case:
    """The case of a function that returns the result of `ms_zero.graph.parallelise`; see `Case`."""
    return Case(_OWN, {"function": function, "arguments": dict(arguments)}, rank=rank, size=size)


@dataclass(frozen=True)
class Compiled:
    """What came out.

    Attributes:
        graph: operations and parameters.
        messages: what MindSpore wrote to its log and Python warned about, a line each.
        notes: what the builder had to say (a third result of it, as JSON can hold it).
        seconds: that building and compiling took.
    """

    graph: Graph
    messages: tuple[str, ...]
    notes: Any
    seconds: float

    def deprecations(self) -> list[str]:
        """Messages about deprecated MindSpore API."""
        return [line for line in self.messages if "deprecated" in line.lower()]


def compile_case(case: Case, *, timeout_s: float = 120.0, keep: Path | None = None) -> Compiled:
    """Compile one case.

    ``keep``: a file for the text of the graph.

    Raises:
        FrontEndUnavailable: this version of MindSpore is another than the one whose hooks are known.
        UserError: what the builder refuses, with its message.
        FrontEndError: anything else went wrong.
    """
    with tempfile.TemporaryDirectory(prefix="ms-zero-front-end-") as folder:
        job = {
            "builder": case.builder,
            "arguments": dict(case.arguments),
            "rank": case.rank,
            "size": case.size,
            "local_size": case.local_size,
            "folder": folder,
            "cwd": str(Path.cwd()),
            "timeout_s": timeout_s,
            "sys_path": sys.path,
        }
        report = _run(job, timeout_s + _REPORT_GRACE_S)
        text = Path(folder, "graph.ir")
        messages = Path(folder, "messages").read_text(errors="replace").splitlines()
        if "failure" in report:
            _raise(report, messages)
        if keep is not None:
            keep.write_text(text.read_text())
        return Compiled(parse(text.read_text()), tuple(messages), report.get("notes"), report["seconds"])


def _raise(report: Mapping[str, str], messages: list[str]) -> None:
    kind, text = report["kind"], report["failure"]
    if kind == "unavailable":
        raise FrontEndUnavailable(f"graph: {text}")
    if kind == "user":
        raise UserError(text)
    tail = "\n".join(messages[-20:])
    raise FrontEndError(f"{text}\n{tail}", report.get("reason", text))


def _run(job: dict[str, Any], limit_s: float) -> dict[str, Any]:
    try:
        return ask("ms_zero.graph.frontend_process", _ENVIRONMENT, job, limit_s)
    except NoReport as error:
        raise FrontEndError(str(error)) from None
