"""One Cell for both modes: a custom function where Python runs, MindSpore's operators in a compiled graph.

Custom functions exist only in PyNative. Under GRAPH_MODE and inside ``ms.jit`` the operators stand in.
"""

from collections.abc import Callable

import mindspore as ms
from mindspore import Tensor, nn, ops


class RunsInPython(ops.PrimitiveWithInfer):
    """True where Python executes it; a compile-time False in a graph, so that the other branch is pruned."""

    def __init__(self) -> None:
        super().__init__("RunsInPython")

    def __call__(self) -> bool:
        """True: only Python calls it."""
        return True

    def __infer__(self) -> dict[str, object]:
        return {"shape": (), "dtype": ms.bool_, "value": False}


class EagerOrGraph(nn.Cell):
    """Calls `eager` in PyNative and `graph` in a compiled graph; both take the same tensors."""

    def __init__(self, eager: Callable[..., Tensor], graph: nn.Cell) -> None:
        super().__init__()
        self.runs_in_python = RunsInPython()
        self.eager = eager
        self.graph = graph

    def construct(self, *args: Tensor) -> Tensor:
        """Call the form for the mode."""
        if self.runs_in_python():
            return self.eager(*args)
        return self.graph(*args)
