"""Reads the graph that MindSpore's front end writes: which operations communicate, in which order, what.

The text is that of the ``validate`` pass as MindSpore 2.10.0 writes it, one node in several lines::

    %8(name) = AllReduce(%7) {instance name: grad_mirror...} primitive_attrs: {..., group_rank_ids: (0, 2)}
        : (<Tensor[Float32], (4, 64)>) -> (<Tensor[Float32], (4, 64)>)
        # Fullname with scope: (Gradients/Default/network-...)
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

Phase = Literal["forward", "backward", "recompute", "update"]
Role = Literal["layout", "gradient", "weight", "pipeline", "norm", "input"]

#: Operations that communicate, by the name that they have in the graph.
COMMUNICATION = (
    "AllReduce", "AllGather", "ReduceScatter", "AlltoAll", "AllToAll", "AlltoAllV", "AlltoAllVC", "AllToAllv",
    "Send", "Receive", "Broadcast", "NeighborExchange", "NeighborExchangeV2", "CollectiveScatter",
    "CollectiveGather", "Barrier", "BatchISendIRecv",
)  # fmt: skip

_BYTES = {
    "Bool": 1, "Int8": 1, "UInt8": 1, "Int16": 2, "UInt16": 2, "Int32": 4, "UInt32": 4,
    "Int64": 8, "UInt64": 8, "Float16": 2, "BFloat16": 2, "Float32": 4, "Float64": 8,
}  # fmt: skip
_SHORT = {"Float16": "fp16", "BFloat16": "bf16", "Float32": "fp32", "Int32": "int32"}

_NODE = re.compile(r"^  %\d+\([^)]*\) = (?:PrimFunc_)?(\w+)\(")
_SUBGRAPH = re.compile(r"^subgraph @(\S+)\(")
_ENTRY = re.compile(r"^# IR entry: @(\S+)", re.MULTILINE)
# A subgraph is called by its name, or by a node whose value is one with some of its inputs.
_CALL = re.compile(r"^  %\d+\([^)]*\) = (?:call @|%\d+\[@(?:Partial\()?@)([^\s(),\[\]]+)")
_TENSOR = re.compile(r"<(?:Ref\[)?Tensor\[(\w+)\]\]?, \(([\d, ]*)\)")
_PARAMETER = re.compile(r"^%para\d+_(\S+): <(Ref\[)?Tensor\[(\w+)\]\]?, \(([\d, ]*)\)")
_SCOPE = re.compile(r"# Fullname with scope: \((.*)\)")


@dataclass(frozen=True)
class TensorType:
    """A shape and MindSpore's name of a dtype ("Float32")."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Of the whole tensor."""
        return prod(self.shape) * _BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{_SHORT.get(self.dtype, self.dtype)} {list(self.shape)}"


@dataclass(frozen=True)
class Operation:
    """One operation that communicates.

    Attributes:
        name: as in COMMUNICATION.
        ranks: of the group; as numbers of the world.
        peer: the other rank of a Send or Receive.
        role: layout: makes what one operator leaves fit the next one (sums, cuts); gradient: of a parameter;
            weight: of a parameter; pipeline: between stages; norm: of all gradients; input: tokens, before
            they are cut into microbatches.
        phase: where in the step.
        microbatch: its number, where the graph says it.
        sent: what goes in.
        received: what comes out.
        scope: path of the operation in the network.
        instance: MindSpore's name of what it is for.
        parameter: whose gradient or weight, where the graph says it.
        fusion: number that operations share which are joined; 0: none.
        times: how often it runs in a step.
        to_one: whether one other rank gets all that is sent.
    """

    name: str
    ranks: tuple[int, ...]
    peer: int | None
    role: Role
    phase: Phase
    microbatch: int | None
    sent: TensorType | None
    received: TensorType | None
    scope: str
    instance: str
    parameter: str | None
    fusion: int
    times: int = 1
    to_one: bool = False

    @property
    def bytes_sent(self) -> float:
        """Bytes that leave the rank, as ring collectives count, in one run."""
        share = (len(self.ranks) - 1) / len(self.ranks) if self.ranks else 0.0
        if self.name == "AllReduce":
            return 2 * share * self.sent.bytes
        if self.name == "AllGather":
            return share * self.received.bytes
        if self.name == "Send" or self.to_one:
            return float(self.sent.bytes)
        if self.name in ("Receive", "Barrier") or self.sent is None:
            return 0.0
        return share * self.sent.bytes

    def describe(self) -> str:
        """One line."""
        what = self.received if self.name in ("AllGather", "Receive") else self.sent
        where = "" if self.microbatch is None else f" microbatch {self.microbatch}"
        whom = list(self.ranks) if self.peer is None else f"rank {self.peer}"
        return f"{self.name} {whom} {what} {self.role} {self.phase}{where}"


@dataclass(frozen=True)
class Graph:
    """What was read.

    Attributes:
        operations: those that communicate, in the order of the text.
        parameters: name -> the type that this rank holds of it.
        counts: how many operations of each kind run in a step.
        recomputed: how many of them are second runs.
    """

    operations: tuple[Operation, ...]
    parameters: Mapping[str, TensorType]
    counts: Mapping[str, int]
    recomputed: Mapping[str, int]

    def select(
        self,
        name: str | None = None,
        *,
        role: Role | None = None,
        phase: Phase | None = None,
        ranks: Iterable[int] | None = None,
        scope: str = "",
    ) -> list[Operation]:
        """Operations for which everything given holds; ``scope``: a part of their path."""
        wanted = None if ranks is None else tuple(ranks)
        return [
            operation
            for operation in self.operations
            if name in (None, operation.name)
            and role in (None, operation.role)
            and phase in (None, operation.phase)
            and wanted in (None, operation.ranks)
            and scope in operation.scope
        ]

    def number(self, *args: str, **kwargs: object) -> int:
        """How often what :meth:`select` finds runs in a step."""
        return sum(operation.times for operation in self.select(*args, **kwargs))

    def summary(self) -> Counter[tuple[str, tuple[int, ...], str, str]]:
        """(name, ranks, role, phase) -> number in a step."""
        found: Counter[tuple[str, tuple[int, ...], str, str]] = Counter()
        for each in self.operations:
            found[each.name, each.ranks, each.role, each.phase] += each.times
        return found


def parse(text: str) -> Graph:
    """Read the text of a graph."""
    nodes = list(_nodes(text))
    runs = _runs(text)
    operations = tuple(
        _operation(node, runs.get(node.subgraph, 0)) for node in nodes if node.name in COMMUNICATION
    )
    counts, recomputed = Counter(), Counter()
    for node in nodes:
        counts[node.name] += runs.get(node.subgraph, 0)
        if _is_recomputed(node.head):
            recomputed[node.name] += runs.get(node.subgraph, 0)
    return Graph(operations, dict(_parameters(text)), counts, recomputed)


@dataclass(frozen=True)
class _Node:
    name: str
    head: str
    types: str
    scope: str
    subgraph: str


def _nodes(text: str) -> Iterator[_Node]:
    subgraph, lines = "", text.splitlines()
    for number, line in enumerate(lines):
        started = _SUBGRAPH.match(line)
        if started:
            subgraph = started.group(1)
        found = _NODE.match(line)
        if found:
            scope = _SCOPE.search("\n".join(lines[number + 1 : number + 4]))
            yield _Node(found.group(1), line, lines[number + 1], scope.group(1) if scope else "", subgraph)


def _runs(text: str) -> dict[str, int]:
    """How often each subgraph runs in a step: those that nodes call, from the entry on."""
    calls: Counter[tuple[str, str]] = Counter()
    subgraph = ""
    for line in text.splitlines():
        started, called = _SUBGRAPH.match(line), _CALL.match(line)
        if started:
            subgraph = started.group(1)
        if called:
            calls[subgraph, called.group(1)] += 1
    entry = _ENTRY.search(text).group(1)
    runs, waiting = Counter({entry: 1}), [entry]
    while waiting:
        caller = waiting.pop()
        for (source, callee), number in calls.items():
            if source == caller:
                runs[callee] += runs[caller] * number
                waiting.append(callee)
    return dict(runs)


def _operation(node: _Node, times: int) -> Operation:
    sent, _, received = node.types.partition(" -> ")
    instance = _attribute(node.head, r"instance name: ([^}]*)\}") or ""
    micro = _attribute(node.head, r"\bmicro: I64\((\d+)\)")
    parameter = _attribute(node.head, r'mirror_user_id: "([^"]*)"')
    fusion = _attribute(node.head, r"\bfusion: I64\((\d+)\)")
    ranks = _ranks(node.head)
    peer = _attribute(node.head, r"\b(?:dest|src)_rank: I64\((\d+)\)")
    return Operation(
        name=node.name,
        ranks=ranks,
        peer=None if peer is None else ranks[int(peer)],
        role=_role(node, instance),
        phase=_phase(node),
        microbatch=None if micro is None else int(micro),
        sent=_tensor(sent),
        received=_tensor(received),
        scope=node.scope,
        instance=instance,
        parameter=parameter.removeprefix("CR_") if parameter else None,
        fusion=int(fusion or 0),
        times=times,
        to_one=node.name == "AlltoAllV" and _numbers_sent(node.head) == 1,
    )


def _numbers_sent(head: str) -> int:
    """To how many ranks an AlltoAllV sends something."""
    counts = re.search(r"AlltoAllV\(%\d+, \(((?:I64\(\d+\)(?:, )?)+)\)", head)
    return 0 if counts is None else len(re.findall(r"I64\([1-9]", counts.group(1)))


def _ranks(head: str) -> tuple[int, ...]:
    # The compiler writes down all ranks for a group that it has not made.
    names = ("ms_zero_ranks", "group_rank_ids", "rank_list")
    found = next(filter(None, (_attribute(head, rf"{name}: \(([\d, ]*)\)") for name in names)), None)
    return tuple(int(rank) for rank in (found or "").split(",") if rank.strip())


#: Backward of a gathered weight, where its instance has the name of a sum between tp ranks.
_OF_WEIGHT = re.compile(r'forward_node_name: "\w*AllGather\w*".*mirror_user_id')


def _role(node: _Node, instance: str) -> Role:
    if node.name in ("Send", "Receive"):
        return "pipeline"
    if "GLOBALNORM" in instance:
        return "norm"
    if "-_MicroBatch/" in node.scope:
        return "input"
    if "mirror" in instance or "grad_accumulation_shard_grad" in instance or _OF_WEIGHT.search(node.head):
        return "gradient"
    if "parallel_optimizer" in instance:
        return "gradient" if node.name in ("ReduceScatter", "AllReduce") else "weight"
    return "layout"


def _phase(node: _Node) -> Phase:
    if _is_recomputed(node.head):
        return "recompute"
    # Of a gradient that a cell defines itself the scope says nothing.
    is_back = node.scope.startswith("Gradients/") or 'ms_zero_phase: "backward"' in node.head
    return "backward" if is_back else "forward"


def _is_recomputed(head: str) -> bool:
    return "duplicated: Bool(1)" in head


def _attribute(head: str, pattern: str) -> str | None:
    found = re.search(pattern, head)
    return found.group(1) if found else None


def _tensor(text: str) -> TensorType | None:
    found = _TENSOR.search(text)
    return TensorType(_shape(found.group(2)), found.group(1)) if found else None


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size.strip())


def _parameters(text: str) -> Iterator[tuple[str, TensorType]]:
    for line in text.splitlines():
        found = _PARAMETER.match(line)
        if found and found.group(2):
            yield found.group(1), TensorType(_shape(found.group(4)), found.group(3))
