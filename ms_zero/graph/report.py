"""What the compiler inserts, for people and machines: operations in groups, and bytes by mesh axis."""

from __future__ import annotations

from collections.abc import Iterable

from ms_zero.graph.ir import Graph, Operation
from ms_zero.mesh import Mesh

_AXES = (
    ("tp",), ("cp",), ("cp", "tp"), ("dp_shard",), ("dp_shard", "cp"), ("dp_replicate",),
    ("dp_replicate", "dp_shard"), ("dp_replicate", "dp_shard", "cp"),
    ("dp_replicate", "dp_shard", "cp", "tp"), ("pp",),
)  # fmt: skip
_EXPERT_AXES = (("ep",), ("edp",), ("dp_replicate", "edp"))


def axes_of(operation: Operation, mesh: Mesh, rank: int) -> str:
    """The mesh axes that an operation's group spans: "tp", "dp_shard x cp"; "?" for none of ours."""
    if operation.role == "pipeline":
        return "pp"
    expert = _EXPERT_AXES if mesh.ep > 1 else ()
    # Where both mean the same ranks, experts are what tokens are exchanged for.
    for axes in (*expert, *_AXES) if operation.name == "AlltoAll" else (*_AXES, *expert):
        used = tuple(axis for axis in axes if mesh.degree(axis) > 1)
        if used and operation.ranks == mesh.members(rank, used):
            return " x ".join(used)
    return "?"


def axis_bytes(graph: Graph, mesh: Mesh, rank: int) -> dict[str, float]:
    """Bytes that the rank sends in a step by what for.

    "tp" and "cp": activations, those of embedding, head and loss included; "ep": tokens to experts and back;
    "pp": between stages; "dp": weights and gradients; "other": token ids, and single numbers like the loss.
    """
    found = dict.fromkeys(("tp", "cp", "ep", "pp", "dp", "other"), 0.0)
    for operation in graph.operations:
        found[_heading(operation, mesh, rank)] += operation.bytes_sent * operation.times
    return found


def _heading(operation: Operation, mesh: Mesh, rank: int) -> str:
    if operation.role in ("gradient", "weight"):
        return "dp"
    if operation.role == "pipeline":
        return "pp"
    axes = axes_of(operation, mesh, rank)
    is_single = operation.sent is None or not operation.sent.shape
    return axes if operation.role == "layout" and axes in ("tp", "cp", "ep") and not is_single else "other"


def held_bytes(graph: Graph, whole: Iterable[str]) -> dict[str, float]:
    """Bytes of weights, summed gradients and moments that the rank holds between steps.

    ``whole``: names of the parameters of the whole model.
    """
    found, names = {"weights": 0.0, "gradients": 0.0, "moments": 0.0}, set(whole)
    for name, held in graph.parameters.items():
        prefix, _, rest = name.partition(".")
        if name in names:
            found["weights"] += held.bytes
        elif rest in names:
            found["gradients" if prefix == "accu_grads" else "moments"] += held.bytes
    return found


def render(graph: Graph, mesh: Mesh, rank: int) -> list[str]:
    """A table of what communicates, most bytes first, and the sums."""
    rows: dict[tuple[str, ...], list[float]] = {}
    for each in graph.operations:
        what = each.received if each.name in ("AllGather", "Receive") else each.sent
        whom = f"rank {each.peer}" if each.peer is not None else f"{len(each.ranks)}: {_short(each.ranks)}"
        key = (each.name, axes_of(each, mesh, rank), whom, each.role, each.phase, str(what))
        row = rows.setdefault(key, [0, 0.0])
        row[0] += each.times
        row[1] += each.times * each.bytes_sent
    head = ("times", "operation", "axes", "ranks", "for", "phase", "tensor", "sent")
    lines = [head]
    for key, (times, sent) in sorted(rows.items(), key=lambda item: -item[1][1]):
        lines.append((str(int(times)), *key, _size(sent)))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    table = ["  ".join(f"{cell:{width}}" for cell, width in zip(line, widths)).rstrip() for line in lines]
    sums = axis_bytes(graph, mesh, rank)
    total = ", ".join(f"{name} {_size(value)}" for name, value in sums.items() if value)
    return [*table, f"sent by this rank in a step: {total or 'nothing'}"]


def _short(ranks: tuple[int, ...]) -> str:
    if len(ranks) <= 4:
        return ",".join(map(str, ranks))
    return f"{ranks[0]},{ranks[1]},...,{ranks[-1]}"


def _size(value: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            return f"{value:.3g} {unit}"
        value /= 1000
    return ""
