"""Compiles the project's AscendC operators in graph mode for Ascend, without a device: the front end only.

Run as a program in a process of its own: ``front_end.py FOLDER``. It tells MindSpore that the target is
Ascend, behind the check for a device, stops before the back end, and prints the operators of the compiled
graph, one JSON object a line. Private interfaces of MindSpore 2.10.0, for this test alone.
"""

import ctypes
import itertools
import json
import os
import re
import sys
from pathlib import Path

# The generated interface of an operator with a low-precision copy, as CANN writes it.
HEADER = """aclnnStatus aclnnFusedAdamWGetWorkspaceSize(
    aclTensor *paramRef,
    aclTensor *expAvgRef,
    aclTensor *expAvgSqRef,
    const aclTensor *grad,
    const aclTensor *scalars,
    aclTensor *lowPrecisionRef,
    const aclTensor *out,
    uint64_t *workspaceSize,
    aclOpExecutor **executor);
"""


def prepare(folder: Path) -> None:
    """Environment and files of an installed package."""
    package = folder / "vendors" / "ms_zero"
    include = package / "op_api" / "include"
    include.mkdir(parents=True)
    (include / "aclnn_fused_adam_w.h").write_text(HEADER, encoding="utf-8")
    os.environ |= {
        "MS_DEV_PRECOMPILE_ONLY": "1",
        "MS_DEV_SAVE_GRAPHS": "2",
        "MS_DEV_SAVE_GRAPHS_PATH": str(folder / "ir"),
        "ASCEND_OPP_PATH": str(folder / "opp"),
        "ASCEND_CUSTOM_OPP_PATH": str(package),
    }


def target_ascend() -> None:
    """Make Ascend the device target, though there is no device."""
    import mindspore as ms
    from mindspore import context

    library = ctypes.CDLL(str(Path(ms.__file__).parent / "lib" / "libmindspore_core.so"))
    setter = ctypes.c_void_p.in_dll(library, "_ZN9mindspore9MsContext6seter_E")
    saved, setter.value = setter.value, None
    context._context()._context_handle.set_param(context.ms_ctx_param.device_target, "Ascend")
    setter.value = saved
    context.set_context(mode=context.GRAPH_MODE)


def compile_step(folder: Path) -> str:
    """Text of the graph of a training step's update: statistics, then both forms of FusedAdamW."""
    import numpy as np
    from mindspore import Parameter, Tensor, nn
    from mindspore.graph.api import _cell_graph_executor
    from mindspore.ops.operations import custom_ops

    from ms_zero.kernels import ascend_custom

    custom_ops._compile_aot = lambda _: str(folder / "callback.so")  # would need the headers of CANN

    def parameter(name: str, dtype: type) -> Parameter:
        return Parameter(Tensor(np.zeros(8, dtype)), name=name)

    class Step(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.p, self.m, self.v = (parameter(name, np.float32) for name in "pmv")
            self.low = parameter("low", np.float16)
            self.stats = ascend_custom.SumOfSquares()
            self.update = ascend_custom.FusedAdamW(low_precision=True)
            self.update_master = ascend_custom.FusedAdamW(low_precision=False)

        def construct(self, grad: Tensor, scalars: Tensor) -> Tensor:
            self.update(self.p, self.m, self.v, grad, scalars, self.low)
            self.update_master(self.p, self.m, self.v, grad, scalars)
            return self.stats(grad)

    inputs = Tensor(np.zeros(8, np.float16)), Tensor(np.zeros(16, np.float32))
    _cell_graph_executor.compile(Step(), *inputs, phase="train")
    return max((folder / "ir").rglob("*_validate_*.ir")).read_text(encoding="utf-8")


def operators(text: str) -> list[dict[str, object]]:
    """Name, operands, side effect and types of each custom operator."""
    lines, found = text.splitlines(), []
    for line, types in itertools.pairwise(lines):
        match = re.search(r"= Custom\((.*?)\) \{instance", line)
        if match is None:
            continue
        name = re.search(r'func_name: "(\w+)"', line)
        found.append(
            {
                "name": name.group(1) if name else None,
                "operands": [operand.strip() for operand in match.group(1).split(",")],
                "side_effect": "side_effect_mem: Bool(1)" in line,
                "types": types.strip(),
            }
        )
    return found


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
    target_ascend()
    for operator in operators(compile_step(Path(sys.argv[1]))):
        print(json.dumps(operator))
