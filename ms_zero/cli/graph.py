"""``ms-zero graph inspect``: the communication that MindSpore's compiler inserts for a run."""

import json
import os
from pathlib import Path

from ms_zero.config import load_config
from ms_zero.config.reader import scalar
from ms_zero.errors import UserError, one_line
from ms_zero.graph.frontend import Case, FrontEndError, compile_case, own_case
from ms_zero.graph.report import axis_bytes, render
from ms_zero.mesh import AXES, Mesh


def inspect(
    run: str,
    overrides: list[str],
    *,
    rank: int,
    workers: int | None,
    keep: str | None,
    json_path: str | None,
) -> int:
    """Print what rank `rank` communicates in a step; returns the exit status."""
    for option, path in (("--keep", keep), ("--json", json_path)):
        if path is not None:
            _check_writable(option, Path(path))  # compiling takes minutes
    if ":" in Path(run).name:
        case = _case_of_function(run, overrides, rank, workers)
    else:
        case = _case_of_run(run, overrides, rank, workers)
    try:
        compiled = compile_case(case, timeout_s=3600, keep=None if keep is None else Path(keep))
    except FrontEndError as error:
        raise UserError(
            f"{run}: MindSpore's compiler refuses the step of rank {rank}: {one_line(error.reason)}; "
            "change the degrees or the model so that they fit"
        ) from None
    mesh = Mesh(**compiled.notes["mesh"])
    print(f"{run}: rank {rank} of {mesh.describe()}, compiled for Ascend by MindSpore's front end only")
    print("\n".join(render(compiled.graph, mesh, rank)))
    if json_path is not None:
        report = {
            "rank": rank,
            "sent_bytes": axis_bytes(compiled.graph, mesh, rank),
            "operations": [vars(each) | _tensors(each) for each in compiled.graph.operations],
        }
        Path(json_path).write_text(json.dumps(report, indent=1, default=str) + "\n")
    return 0


def _check_writable(option: str, path: Path) -> None:
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
        raise UserError(f"{option} {path}: cannot write this file: name one in a folder that exists")


def _case_of_run(run: str, overrides: list[str], rank: int, workers: int | None) -> Case:
    parallel = load_config(run, overrides, workers, to_run=False).config.parallel
    mesh = Mesh(**{axis: getattr(parallel, axis) for axis in (*AXES, "ep")})
    if not 0 <= rank < mesh.world_size:
        raise UserError(f"--rank {rank}: expected 0 to {mesh.world_size - 1} ({mesh.describe()})")
    arguments = {"run": run, "overrides": list(overrides), "workers": mesh.world_size}
    return Case("ms_zero.graph.inspected:build_run", arguments, rank=rank, size=mesh.world_size)


def _case_of_function(function: str, overrides: list[str], rank: int, workers: int | None) -> Case:
    """Of FILE.py:FUNCTION or MODULE:FUNCTION; overrides are its arguments."""
    if workers is None:
        raise UserError(f"--workers: expected the number of ranks of the mesh that {function} builds")
    if not 0 <= rank < workers:
        raise UserError(f"--rank {rank}: expected 0 to {workers - 1}")
    arguments = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        if not equals or not name.isidentifier():
            raise UserError(f"{override}: expected name=value, an argument of {function}")
        arguments[name] = scalar(value)
    return own_case(function, arguments, rank=rank, size=workers)


def _tensors(operation: object) -> dict[str, object]:
    return {name: str(getattr(operation, name)) for name in ("sent", "received")}
