"""How fast and how lean the native CPU kernels are beside PyTorch and beside MindSpore's own operators.

    python scripts/bench_cpu_ops.py [--quick] [--steps N] [--only NAME ...] [--json [PATH]]

Each operator runs forward and backward at the sizes of a GPT of 17.0 million parameters (6 layers, width 384,
vocabulary 8192, batches of 4 x 256 tokens, fp32); ``train`` is its whole training step: ours is
``Trainer.step``, as ``ms-zero train`` runs it, torch's a plain eager loop with the same work.

One process serves each framework. This one asks them in turn, so that all see the same machine; the others
wait for input meanwhile. Idle threads of a framework still occupy cores for a while, so short calls are
repeated: until 30 ms have passed uncounted, then for 30 ms counted. Figures are medians: ``X_over_torch`` and
``X_over_mindspore`` are their time over ours. ``X_cpu_over_torch`` is the same of processor time, which other
programs on the machine disturb less. Without torch its figures are left out. Peak memory is the process's
largest resident size, in all and above what the imports take; ``attention_bytes_per_position`` is what
attention adds to it for sequences of two lengths.
"""

import argparse
import importlib.util
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

BATCH, LENGTH, HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 4, 256, 6, 64, 384, 1536, 8192
LONG = 2048
# (name, shapes of the arguments that get a gradient); what else an operator needs is in its builders.
OPERATORS: dict[str, list[tuple[int, ...]]] = {
    "linear": [(BATCH, LENGTH, HIDDEN), (FFN, HIDDEN), (FFN,)],
    "layer_norm": [(BATCH, LENGTH, HIDDEN), (HIDDEN,), (HIDDEN,)],
    "rms_norm": [(BATCH, LENGTH, HIDDEN), (HIDDEN,)],
    "gelu": [(BATCH, LENGTH, FFN)],
    "swiglu": [(BATCH, LENGTH, FFN), (BATCH, LENGTH, FFN)],
    "rotary": [(BATCH, LENGTH, HEADS, HEAD_DIM)],
    "attention": [(BATCH, LENGTH, HEADS, HEAD_DIM)] * 3,
    "attention_long": [(1, LONG, HEADS, HEAD_DIM)] * 3,
    "cross_entropy": [(BATCH * LENGTH, VOCAB)],
    "embedding": [(VOCAB, HIDDEN)],
}
#: Calls shorter than this are repeated for as long.
SETTLE_S = 0.03
MEMORY_LENGTHS = (4096, 16384)


def arrays(name: str) -> list[np.ndarray]:
    """The arguments of an operator."""
    rng = np.random.default_rng(1)
    return [rng.standard_normal(shape, dtype=np.float32) for shape in OPERATORS[name]]


def tables() -> list[np.ndarray]:
    """Cosines and sines of rotary positions, [T, D]."""
    angles = np.arange(LENGTH)[:, None] / 10000 ** (np.arange(HEAD_DIM) % (HEAD_DIM // 2) * 2 / HEAD_DIM)
    return [np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)]


def labels() -> np.ndarray:
    """int32 [N]."""
    return np.random.default_rng(2).integers(0, VOCAB, BATCH * LENGTH).astype(np.int32)


def our_call(name: str, target: str) -> Callable[[], None]:
    """Forward and backward of our kernel: native for "CPU", MindSpore's operators for "CPU-portable"."""
    from mindspore import Tensor, ops

    from ms_zero import _compat, kernels

    cells = {
        "linear": lambda: kernels.Linear(target),
        "layer_norm": lambda: kernels.LayerNorm(1e-5, target),
        "rms_norm": lambda: kernels.RMSNorm(1e-5, target),
        "gelu": lambda: kernels.GELU(target),
        "swiglu": lambda: kernels.SwiGLU(target),
        "rotary": lambda: kernels.RotaryEmbedding(target),
        "attention": lambda: kernels.CausalAttention(HEAD_DIM**-0.5, target),
        "attention_long": lambda: kernels.CausalAttention(HEAD_DIM**-0.5, target),
        "cross_entropy": lambda: kernels.CrossEntropySum(target=target),
        "embedding": lambda: kernels.Embedding(target),
    }
    cell, leaves = cells[name](), [Tensor(array) for array in arrays(name)]
    indices = {"cross_entropy": lambda: [labels()], "embedding": lambda: [labels()]}
    constants = {"rotary": tables, **indices}.get(name, list)()
    arguments = [*leaves, *map(Tensor, constants)]
    for leaf in leaves:
        leaf.requires_grad_(True)
    grad = ops.ones_like(cell(*arguments))

    def call() -> None:
        with _compat.tape():
            out = cell(*arguments)
        _compat.backward(out, grad)
        _compat.clear_grads(leaves)

    return call


def torch_call(name: str) -> Callable[[], None]:
    """The same in torch."""
    import torch

    functions = torch_functions()
    leaves = [torch.from_numpy(array).requires_grad_() for array in arrays(name)]
    grad = torch.ones_like(functions[name](*leaves))

    def call() -> None:
        functions[name](*leaves).backward(grad)
        for leaf in leaves:
            leaf.grad = None

    return call


def torch_functions() -> dict[str, Callable]:
    """The operators as a user of torch writes them."""
    import torch
    from torch.nn import functional

    (cos, sin), targets = map(torch.from_numpy, tables()), torch.from_numpy(labels()).long()

    def attention(*qkv: torch.Tensor) -> torch.Tensor:
        heads_first = (x.transpose(1, 2) for x in qkv)
        return functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)

    def rotary(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]

    return {
        "linear": functional.linear,
        "layer_norm": lambda x, weight, bias: functional.layer_norm(x, (HIDDEN,), weight, bias),
        "rms_norm": lambda x, weight: functional.rms_norm(x, (HIDDEN,), weight, 1e-5),
        "gelu": lambda x: functional.gelu(x, approximate="tanh"),
        "swiglu": lambda gate, up: functional.silu(gate) * up,
        "rotary": rotary,
        "attention": attention,
        "attention_long": attention,
        "cross_entropy": lambda logits: functional.cross_entropy(logits, targets, reduction="sum"),
        "embedding": lambda table: functional.embedding(targets, table),
    }


def training_step(framework: str, quick: bool) -> Callable[[], object]:
    """The whole step of `bench_overhead.py`."""
    import bench_overhead

    shape = bench_overhead.QUICK_SHAPE if quick else bench_overhead.SHAPE
    return {"ours": bench_overhead.our_step, "torch": bench_overhead.torch_step}[framework](shape)


def attention_growth(length: int) -> int:
    """Bytes that attention over `length` positions (one head of 16) adds to the peak of the process."""
    import mindspore as ms
    from mindspore import Tensor

    from ms_zero import kernels

    attention = kernels.CausalAttention(0.25, "CPU")
    q, k, v = (Tensor(np.ones((1, length, 1, 16), np.float32)) for _ in range(3))
    before = peak_bytes()
    ms.value_and_grad(lambda *args: attention(*args).sum(), (0, 1, 2))(q, k, v)
    return peak_bytes() - before


def peak_bytes() -> int:
    """Largest resident size of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def serve(framework: str, quick: bool) -> None:
    """Answer requests on standard input: the name of a call -> its wall and processor time, in seconds."""
    if framework == "torch":
        import torch  # noqa: F401
    else:
        from ms_zero import _compat, kernels  # noqa: F401

        _compat.launch_blocking()
    imported, calls = peak_bytes(), {}
    for line in sys.stdin:
        name = line.strip()
        if name == "memory":
            answer: object = {"peak": peak_bytes(), "growth": peak_bytes() - imported}
        elif name.startswith("attention_growth "):
            answer = attention_growth(int(name.split()[1]))
        else:
            if name not in calls:
                calls[name] = build_call(framework, name, quick)
            answer = timed(calls[name])
        print(json.dumps(answer), flush=True)


def build_call(framework: str, name: str, quick: bool) -> Callable[[], object]:
    """A call, run twice so that everything is built."""
    if name == "train":
        call = training_step(framework, quick)
    elif framework == "torch":
        call = torch_call(name)
    else:
        call = our_call(name, "CPU" if framework == "ours" else "CPU-portable")
    call(), call()
    return call


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds of a call: of the first if it is long, else the mean of many."""
    number = 1
    while True:
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(number):
            call()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        if wall >= SETTLE_S or number > 1:
            return wall / number, cpu / number
        number = settle(call, SETTLE_S)


def settle(call: Callable[[], object], seconds: float) -> int:
    """Repeat a call for a time; returns how often it ran, at least twice."""
    number, end = 0, time.perf_counter() + seconds
    while number < 2 or time.perf_counter() < end:
        call()
        number += 1
    return number


class Server:
    """A process that runs calls of one framework."""

    def __init__(self, framework: str, quick: bool) -> None:
        command = [sys.executable, __file__, "--serve", framework] + ["--quick"] * quick
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        self.process.wait()

    def ask(self, request: str) -> object:
        """The answer to a request."""
        self.process.stdin.write(f"{request}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line[0] in "{[0123456789":  # frameworks print, too
                return json.loads(line)
        raise SystemExit(f"the process for {self.process.args[3]} ended with status {self.process.wait()}")


def measure_call(name: str, servers: dict[str, Server], steps: int) -> dict[str, float]:
    """Ratios for one call."""
    times: dict[str, list] = {framework: [] for framework in servers}
    for number in range(steps):
        order = list(servers) if number % 2 else list(servers)[::-1]
        for framework in order:
            times[framework].append(servers[framework].ask(name))
    wall, cpu = ({f: statistics.median(t[i] for t in found) for f, found in times.items()} for i in (0, 1))
    found = {f"{name}_ms": wall["ours"] * 1e3}
    for framework in servers:
        if framework != "ours":
            found[f"{name}_over_{framework}"] = wall[framework] / wall["ours"]
            found[f"{name}_cpu_over_{framework}"] = cpu[framework] / max(cpu["ours"], 1e-9)
    return found


def measure_training(quick: bool, steps: int, has_torch: bool) -> dict[str, float]:
    """Training steps of ours and of torch in turn, and the peak memory of both, in processes of their own."""
    frameworks = ["ours", "torch"] if has_torch else ["ours"]
    with ExitStack() as stack:
        servers = {framework: stack.enter_context(Server(framework, quick)) for framework in frameworks}
        found = measure_call("train", servers, steps)
        for framework, server in servers.items():
            memory = server.ask("memory")
            found[f"train_{framework}_peak_bytes"] = memory["peak"]
            found[f"train_{framework}_growth_bytes"] = memory["growth"]
    found["train_tokens_per_second"] = BATCH * LENGTH / found["train_ms"] * 1e3
    return found


def measure(quick: bool, steps: int, names: list[str]) -> dict[str, float]:
    """All figures."""
    has_torch = importlib.util.find_spec("torch") is not None
    found: dict[str, float] = {}
    frameworks = ["ours", "mindspore"] + ["torch"] * has_torch
    with ExitStack() as stack:
        servers = {framework: stack.enter_context(Server(framework, quick)) for framework in frameworks}
        for name in names:
            if name in OPERATORS:
                found.update(measure_call(name, servers, steps))
    if "train" in names:
        found.update(measure_training(quick, steps, has_torch))
    if "memory" in names:
        for length in MEMORY_LENGTHS:
            with Server("ours", quick) as server:
                growth = server.ask(f"attention_growth {length}")
                found[f"attention_bytes_per_position_{length}"] = growth / length
    return found


def main() -> int:
    """Measure and print; returns the exit status."""
    from _figures import add_json_option, write_figures

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few steps and a small model: does it run")
    parser.add_argument("--steps", type=int, default=0, help="measured calls of each (default 24, quick: 2)")
    every = [*OPERATORS, "train", "memory"]
    parser.add_argument("--only", nargs="+", choices=every, default=every, help="what to measure")
    add_json_option(parser)
    parser.add_argument("--serve", choices=("ours", "mindspore", "torch"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    if args.serve:
        serve(args.serve, args.quick)
        return 0
    found = measure(args.quick, args.steps or (2 if args.quick else 24), args.only)
    for name, value in found.items():
        print(f"{name:40} {value:.4g}")
    write_figures({"metrics": found}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
