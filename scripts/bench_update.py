"""How fast the fused optimizer update is on this CPU, beside the memory and beside other libraries.

    python scripts/bench_update.py [--quick] [--threads N] [--rounds N] [--json [PATH]]

All contestants run in one process, one step each in turn, and the median of each counts. Sizes are 1M, 10M
and 100M parameters. They all update the same arrays, because the kind of memory pages that an allocation
happens to get decides more than the code; only MindSpore's optimizers keep what they allocate themselves.

- ours: the C++ kernel. ``fp32``: fp32 gradient, 28 bytes a parameter. ``bf16``: bf16 gradient, and the bf16
  parameter written as well, 28 bytes;
- stream: a plain C loop of exactly the same traffic (4 reads and 3 writes, for bf16 one write more) with
  hardly any arithmetic, built here with ``-O3 -march=native -fopenmp``;
- torch: ``torch.optim.AdamW(fused=True)``; for bf16 with the two casts around it that it needs;
- deepspeed: ``DeepSpeedCPUAdam`` (fp32 only: its bf16 form keeps no fp32 master weights);
- nn.AdamWeightDecay, nn.Adam: MindSpore's own optimizers (fp32 only; nn.Adam decays differently).

Figures (fp32, the largest size): ``cpu_over_stream``, ``cpu_over_torch_fused``, ``cpu_over_deepspeed``,
``cpu_over_mindspore`` (nn.AdamWeightDecay) and ``cpu_over_nn_adam`` are ratios of throughput; null: that
library is not installed or does not work. ``call_overhead_us`` is a whole call of ``kernels.adamw_update`` on
tensors of one element.
"""

import argparse
import ctypes
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np

SIZES, QUICK_SIZES = (1_000_000, 10_000_000, 100_000_000), (10_000, 100_000)
HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
BYTES = 28  # a parameter, in both cases: 16 read and 12 written, or 14 and 14

Step = Callable[[], object]

STREAM = """
#include <stdint.h>
#include <string.h>
void stream_fp32(float *restrict a, float *restrict b, float *restrict c, const float *restrict d, long n) {
#pragma omp parallel for schedule(static)
  for (long i = 0; i < n; ++i) {
    a[i] = 0.5f * (a[i] + d[i]);
    b[i] = 0.5f * (b[i] + d[i]);
    c[i] = 0.5f * c[i] + 0.25f;
  }
}
void stream_bf16(float *restrict a, float *restrict b, float *restrict c, const uint16_t *restrict d,
                 uint16_t *restrict e, long n) {
#pragma omp parallel for schedule(static)
  for (long i = 0; i < n; ++i) {
    a[i] = 0.5f * (a[i] + (float)d[i]);
    b[i] = 0.5f * (b[i] + (float)d[i]);
    c[i] = 0.5f * c[i] + 0.25f;
    e[i] = (uint16_t)(int32_t)a[i];
  }
}
"""


def compiled_stream(folder: str) -> ctypes.CDLL:
    """The plain loops, compiled for this processor."""
    source = Path(folder) / "stream.c"
    source.write_text(STREAM, encoding="utf-8")
    library = source.with_suffix(".so")
    flags = ["-O3", "-march=native", "-fopenmp", "-fPIC", "-shared"]
    subprocess.run(["gcc", *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def arrays(n: int) -> list[np.ndarray]:
    """Parameter, mean and mean square of a run that has begun."""
    rng = np.random.default_rng(1)
    param, exp_avg = (rng.standard_normal(n, np.float32) for _ in range(2))
    return [param, exp_avg, np.square(rng.standard_normal(n, np.float32))]


def gradient(n: int) -> np.ndarray:
    """One gradient, which all contestants share."""
    return np.random.default_rng(2).standard_normal(n, np.float32)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    """The upper halves of fp32 values."""
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def address(array: np.ndarray) -> ctypes.c_void_p:
    """Where an array lies."""
    return ctypes.c_void_p(array.ctypes.data)


def stream_step(
    library: ctypes.CDLL, state: list[np.ndarray], grad: np.ndarray, low: np.ndarray | None, dtype: str
) -> Step:
    """The plain loop; the mean square stays positive."""
    n, held = grad.size, [*state, grad] + [low] * (low is not None)
    function = getattr(library, f"stream_{dtype}")
    return lambda: function(*map(address, held), ctypes.c_long(n))


def our_step(state: list[np.ndarray], grad: np.ndarray, low: np.ndarray | None) -> Step:
    """The C++ kernel."""
    from ms_zero.kernels import adamw_update_host

    return partial(adamw_update_host, *state, grad, **HYPER, step=10, low_precision=low)


def torch_optimizer_arguments() -> dict[str, object]:
    """HYPER in torch's words."""
    return {
        "lr": HYPER["lr"],
        "betas": (HYPER["beta1"], HYPER["beta2"]),
        "eps": HYPER["eps"],
        "weight_decay": HYPER["weight_decay"],
    }


def torch_step(state: list[np.ndarray], grad: np.ndarray, low: np.ndarray | None) -> Step:
    """torch's fused AdamW; for bf16 with a cast of the gradient before and of the parameter after."""
    import torch

    values, exp_avg, exp_avg_sq = map(torch.from_numpy, state)
    param = torch.nn.Parameter(values)
    optimizer = torch.optim.AdamW([param], **torch_optimizer_arguments(), fused=True)
    step = torch.tensor(10.0)
    optimizer.state[param] = {"step": step, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    if low is None:
        param.grad = torch.from_numpy(grad)
        return optimizer.step
    param.grad = torch.from_numpy(np.zeros(grad.size, np.float32))
    halves = (torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16) for bits in (grad, low))
    half_grad, half_param = halves

    def with_casts() -> None:
        param.grad.copy_(half_grad)
        optimizer.step()
        with torch.no_grad():
            half_param.copy_(param)

    return with_casts


def deepspeed_step(state: list[np.ndarray], grad: np.ndarray) -> Step:
    """DeepSpeed's CPU Adam, which compiles itself at first use."""
    import torch
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    values, exp_avg, exp_avg_sq = map(torch.from_numpy, state)
    param = torch.nn.Parameter(values)
    param.grad = torch.from_numpy(grad)
    optimizer = DeepSpeedCPUAdam([param], **torch_optimizer_arguments(), adamw_mode=True)
    optimizer.state[param] = {"step": 10, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    return optimizer.step


def mindspore_step(name: str, n: int, grad: np.ndarray) -> Step:
    """An optimizer of mindspore.nn."""
    import mindspore as ms
    from mindspore import nn

    param = ms.Parameter(ms.Tensor(arrays(n)[0]), name="weight")
    common = {"beta1": HYPER["beta1"], "beta2": HYPER["beta2"], "eps": HYPER["eps"]}
    optimizer = getattr(nn, name)([param], HYPER["lr"], **common, weight_decay=HYPER["weight_decay"])
    held = (ms.Tensor(grad),)

    def step() -> None:
        optimizer(held)
        param.asnumpy()  # shares the storage; waits, since these operators are queued in any case

    return step


def contestants(library: ctypes.CDLL, n: int, dtype: str) -> dict[str, Step]:
    """Everyone who can take part in one case."""
    grad = gradient(n) if dtype == "fp32" else bf16_bits(gradient(n))
    state, low = arrays(n), None if dtype == "fp32" else np.zeros(n, np.uint16)
    made = {"ours": our_step(state, grad, low), "stream": stream_step(library, state, grad, low, dtype)}
    if importlib.util.find_spec("torch"):
        made["torch"] = torch_step(state, grad, low)
    if dtype == "fp32":
        if importlib.util.find_spec("deepspeed"):
            try:
                made["deepspeed"] = deepspeed_step(state, grad)
            except Exception as error:  # it compiles itself, which can fail in many ways
                print(f"deepspeed is left out: {type(error).__name__}: {str(error).splitlines()[:1]}")
        for name in ("AdamWeightDecay", "Adam"):
            made[f"nn.{name}"] = mindspore_step(name, n, grad)
    return made


def seconds(step: Step, repeat: int) -> float:
    """Wall time of one step."""
    start = time.perf_counter()
    for _ in range(repeat):
        step()
    return (time.perf_counter() - start) / repeat


def measure_case(library: ctypes.CDLL, n: int, dtype: str, rounds: int) -> dict[str, object]:
    """Median GB/s of everyone, one after the other in every round; the order turns."""
    steps = contestants(library, n, dtype)
    repeat = max(1, 4_000_000 // n)
    for step in steps.values():
        seconds(step, 2)
    names, times = list(steps), {name: [] for name in steps}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(seconds(steps[name], repeat))
    medians = {name: statistics.median(taken) for name, taken in times.items()}
    rates = {name: BYTES * n / median / 1e9 for name, median in medians.items()}
    return {"parameters": n, "dtype": dtype, "gb_per_second": rates, "milliseconds": _milli(medians)}


def _milli(times: Mapping[str, float]) -> dict[str, float]:
    return {name: 1e3 * value for name, value in times.items()}


def call_overhead_us() -> float:
    """Median microseconds of a call of the public function on one element."""
    from mindspore import Tensor

    from ms_zero import kernels

    tensors = [Tensor(np.ones(1, np.float32)) for _ in range(4)]
    call = partial(kernels.adamw_update, *tensors, **HYPER, step=10, target="CPU")
    seconds(call, 100)
    return 1e6 * statistics.median(seconds(call, 20) for _ in range(50))


def prepare(threads: int) -> None:
    """Start again with the number of threads and with threads that sleep while others work."""
    wanted = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "DS_ACCELERATOR": "cpu"}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {"GLOG_v": "3", **os.environ, **wanted})
    if str(Path(__file__).resolve().parent.parent) not in sys.path:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from ms_zero import _compat

    _compat.launch_blocking()


def figures(cases: list[dict], overhead: float) -> dict[str, float | None]:
    """What is compared between versions: the largest fp32 case."""
    rates = [case for case in cases if case["dtype"] == "fp32"][-1]["gb_per_second"]
    others = {
        "cpu_over_stream": "stream",
        "cpu_over_torch_fused": "torch",
        "cpu_over_deepspeed": "deepspeed",
        "cpu_over_mindspore": "nn.AdamWeightDecay",
        "cpu_over_nn_adam": "nn.Adam",
    }
    ratios = {key: rates["ours"] / rates[name] if name in rates else None for key, name in others.items()}
    return {**ratios, "call_overhead_us": overhead}


def main() -> int:
    """Measure and print; returns the exit status."""
    from _figures import add_json_option, write_figures

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it runs")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=0, help="steps of each (default 15, quick: 3)")
    add_json_option(parser)
    args = parser.parse_args()
    prepare(args.threads)
    rounds = args.rounds or (3 if args.quick else 15)
    cases = []
    with tempfile.TemporaryDirectory() as folder:
        library = compiled_stream(folder)
        for n in QUICK_SIZES if args.quick else SIZES:
            for dtype in ("fp32", "bf16"):
                cases.append(measure_case(library, n, dtype, rounds))
                rates = [f"{name} {rate:.1f}" for name, rate in cases[-1]["gb_per_second"].items()]
                print(f"{n:>11,} {dtype}", *rates, "GB/s", flush=True)
    metrics = figures(cases, call_overhead_us())
    for name, value in metrics.items():
        print(f"{name:22} {'n/a' if value is None else format(value, '.3g')}")
    machine = {"threads": args.threads, "load": os.getloadavg()[0]}
    write_figures({"metrics": metrics, "cases": cases, **machine}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
