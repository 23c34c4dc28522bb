"""What the parallel axes send, how long pipelines idle, and how attention's memory grows.

    python scripts/bench_parallel.py [--quick] [--json [PATH]]

- ``traffic_AXIS_over_theory``: bytes that a rank sends over the groups of that axis in one training step of
  the real trainer, as its communicator counts them, over those of ``ms_zero.plan.traffic`` for the run. tp:
  two ranks; what the ends of the model send is part of the theory, the loss (three numbers a token) and the
  norm of the gradient are not. sp: the same with sequence parallelism. cp: a ring of two; ulysses: the other
  way, two ranks. ep: the mean of two ranks, because how many tokens leave one depends on what its routers
  choose; the theory assumes an even choice. pp: the middle one of three ranks.
- ``bubble_measured_over_formula_NAME``: idle time over computing time of four workers that run a schedule of
  8 microbatches, over the formula (p - 1)/m, interleaved (p - 1)/(v m) with v = 2, zb-h1 (p - 1)/(3 m). Their
  layers do nothing but sleep, as long for the forward as for the gradients of the inputs and for those of the
  weights, so that two cores are enough for four workers. Computing is what the busiest worker measures within
  its layers; idle is the rest from the first start to the last end: waits, transfers, and the runtime itself.
- ``interleaved_over_1f1b_measured``, ``zb_h1_over_1f1b_measured``: time of such a step over that of 1f1b;
  ``..._simulated``: the same by the planner's event simulation, without transfers.
- ``attention_peak_bytes_growth_exponent``: slope of log(peak memory) over log(length) of one causal
  attention, forward and backward: 1 where memory is linear in the sequence, 2 where scores are stored. Peak
  memory is the growth of the resident set's high-water mark of a process of its own.

Times are the best of the rounds: on a busy machine the others tell about its other programs. ``cases`` has
the figures that the metrics are made of.
"""

import argparse
import ctypes
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

RANKS, MICROBATCHES, VIRTUAL = 4, 8, 2
#: name -> (virtual stages, idle time over computing time)
SCHEDULES = {
    "gpipe": (1, (RANKS - 1) / MICROBATCHES),
    "1f1b": (1, (RANKS - 1) / MICROBATCHES),
    "interleaved": (VIRTUAL, (RANKS - 1) / (VIRTUAL * MICROBATCHES)),
    "zb-h1": (1, (RANKS - 1) / (3 * MICROBATCHES)),
}
_DENSE = ("runs/quickstart", "model.num_layers=6", "model.tie_embeddings=false")
_EXPERTS = ("runs/mixtral-tiny",)
#: name -> axis, workers, ranks that are looked at, base and overrides
TRAFFIC = {
    "tp": ("tp", 2, (0,), (*_DENSE, "parallel.tp=2")),
    "sp": ("tp", 2, (0,), (*_DENSE, "parallel.tp=2", "parallel.sequence_parallel=true")),
    "cp": ("cp", 2, (0,), (*_DENSE, "parallel.cp=2")),
    "ulysses": ("cp", 2, (0,), (*_DENSE, "parallel.cp=2", "parallel.context=ulysses")),
    "ep": ("ep", 2, (0, 1), (*_EXPERTS, "parallel.ep=2")),
    "pp": ("pp", 3, (1,), (*_DENSE, "parallel.pp=3", "train.accumulation_steps=4")),
}
COMMON = (
    "data.seq_len=128",
    "train.global_batch_size=16",
    "train.accumulation_steps=1",
    "train.eval_interval=0",
    "train.output_dir=unused",
    "parallel.zero_stage=0",
)
HEADS, HEAD_DIM = 4, 64


# Traffic


def traffic(comm: Any, overrides: list[str]) -> dict[str, float]:
    """Bytes that this rank sends in a step by axis, and those of the theory. Runs on the workers."""
    from ms_zero.config import load_config
    from ms_zero.plan.run import layout_of
    from ms_zero.plan.shapes import from_config
    from ms_zero.plan.traffic import end_bytes, step_bytes
    from ms_zero.runner import build_trainer, load_data

    base, *others = overrides
    config = load_config(base, [*COMMON, *others], comm.world_size).config
    trainer = build_trainer(config, load_data(config), comm)
    trainer.step()  # shapes become known between stages
    comm.counters.reset()
    trainer.step()
    shape, layout = from_config(config.model), layout_of(config)
    theory = step_bytes(shape, layout, parameters=0.0)
    theory["tp"] += end_bytes(shape, layout) if layout.tp > 1 else 0.0
    return {
        axis: comm.counters.total_bytes(group=axis) / theory[axis] for axis in theory if theory[axis] > 0
    }


def traffic_figures() -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and cases of :func:`traffic`."""
    from ms_zero.testing import run_workers

    metrics, cases = {}, []
    for name, (axis, workers, chosen, overrides) in TRAFFIC.items():
        ranks = run_workers(workers, traffic, list(overrides), timeout_s=300)
        metrics[f"traffic_{name}_over_theory"] = statistics.mean(ranks[rank][axis] for rank in chosen)
        cases.append({"case": f"traffic of {name}", "over_theory_by_rank": ranks})
    return metrics, cases


# Idle time


def sleeping_layer(seconds: float) -> Any:
    """A function of (x, weight) that sleeps in forward, for the gradient of x and for that of the weight."""
    from mindspore import Tensor

    from ms_zero._compat import function_class
    from ms_zero.kernels import put_off_to

    class Sleep(function_class):
        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, waiting: Any) -> Any:
            ctx.waiting, ctx.param = waiting, weight
            time.sleep(seconds)
            return x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, ...]:
            def of_weight() -> Any:
                time.sleep(seconds)
                return Tensor(np.ones(1, np.float32))

            time.sleep(seconds)
            if ctx.waiting is None:
                return grad, of_weight(), None
            ctx.waiting.add(ctx.param, of_weight)
            return grad, None, None

    return lambda x, weight: Sleep.apply(x, weight, put_off_to(weight))


class Sleeper:
    """The work of a rank: layers that sleep. Measures the time within them."""

    def __init__(self, num_stages: int, seconds: float) -> None:
        from mindspore import Parameter, Tensor

        self.busy = 0.0
        self._num_stages = num_stages
        self._layer = sleeping_layer(seconds)
        self._weight = Parameter(np.ones(1, np.float32), name="weight")
        self._first = Tensor(np.ones((1, 8), np.float32))

    def key(self, microbatch: int) -> int:
        """All microbatches have one shape."""
        return 0

    def forward(self, stage: int, microbatch: int, inputs: tuple) -> tuple:
        """Sleep."""
        with self._measured():
            x = self._layer(inputs[0] if inputs else self._first, self._weight)
            return (x.sum(),) if stage == self._num_stages - 1 else (x,)

    def loss_gradient(self, microbatch: int, loss: Any) -> Any:
        """One."""
        from mindspore import ops

        return ops.ones_like(loss)

    def around_backward(self, stage: int, microbatch: int, *, weights: bool, last: bool) -> Any:
        """Measure."""
        return self._measured()

    def weights(self, stage: int, microbatch: int, waiting: Any, *, last: bool) -> None:
        """Sleep for the gradients that were put off."""
        with self._measured():
            for _ in waiting.take():
                pass

    @contextmanager
    def _measured(self) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.busy += time.perf_counter() - start


def idle(comm: Any, seconds: float, rounds: int) -> dict[str, list[list[float]]]:
    """Start, end and computing time of this rank, by schedule and round. Runs on the workers."""
    from ms_zero._compat import launch_blocking
    from ms_zero.pipeline.runtime import Pipeline
    from ms_zero.pipeline.schedule import build

    launch_blocking()
    pipeline = Pipeline(comm, comm.world)
    found: dict[str, list[list[float]]] = {name: [] for name in SCHEDULES}
    for number in range(1 + rounds):  # the first one warms up, without sleep
        for name, (virtual, _) in SCHEDULES.items():
            schedule = build(name, RANKS, MICROBATCHES, virtual)
            work = Sleeper(schedule.num_stages, seconds / virtual if number else 0.0)
            comm.barrier()
            start = time.perf_counter()
            pipeline.run(schedule, work)
            if number:
                found[name].append([start, time.perf_counter(), work.busy])
    return found


def idle_figures(seconds: float, rounds: int) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and cases of :func:`idle`."""
    from ms_zero.pipeline.schedule import build
    from ms_zero.plan.pipeline import ChunkSeconds, simulated
    from ms_zero.testing import run_workers

    ranks = run_workers(RANKS, idle, seconds, rounds, timeout_s=600)
    metrics, cases, times, simulations = {}, [], {}, {}
    for name, (virtual, formula) in SCHEDULES.items():
        spans = [
            (max(end for _, end, _ in each) - min(start for start, _, _ in each), max(b for _, _, b in each))
            for each in zip(*(rank[name] for rank in ranks), strict=True)
        ]
        bubble = min((span - busy) / busy for span, busy in spans)
        times[name] = min(span for span, _ in spans)
        part = seconds / virtual
        chunks = [ChunkSeconds(forward=part, backward=part, weight=part)] * (RANKS * virtual)
        simulations[name] = simulated(build(name, RANKS, MICROBATCHES, virtual), chunks, 0.0).total
        metrics[f"bubble_measured_over_formula_{_label(name)}"] = bubble / formula
        cases.append(
            {
                "case": f"schedule {name}",
                "bubble": bubble,
                "formula": formula,
                "step_s": times[name],
                "simulated_s": simulations[name],
            }
        )
    for name in ("interleaved", "zb-h1"):
        metrics[f"{_label(name)}_over_1f1b_measured"] = times[name] / times["1f1b"]
        metrics[f"{_label(name)}_over_1f1b_simulated"] = simulations[name] / simulations["1f1b"]
    return metrics, cases


def _label(name: str) -> str:
    return name.replace("-", "_")


# Attention


def attention_peak(comm: Any, length: int) -> int:
    """Bytes by which forward and backward of one attention raise the high-water mark. Runs on a worker."""
    from ms_zero._compat import launch_blocking

    launch_blocking()
    run_attention(16)  # loads what has to be loaded
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the mark falls to what is resident now
    before = _status("VmRSS")
    run_attention(length)
    return _status("VmHWM") - before


def run_attention(length: int) -> None:
    """Forward and backward of one causal attention of a sequence."""
    from mindspore import Tensor

    from ms_zero._compat import backward, leaf, tape
    from ms_zero.kernels import CausalAttention

    rng = np.random.default_rng(0)
    made = [rng.random((1, length, HEADS, HEAD_DIM), np.float32) for _ in range(3)]
    inputs = [leaf(Tensor(each), requires_grad=True) for each in made]
    with tape():
        out = CausalAttention(HEAD_DIM**-0.5)(*inputs)
    backward(out, Tensor(np.ones(out.shape, np.float32)))


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def attention_figures(lengths: tuple[int, ...]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and cases of :func:`attention_peak`."""
    from ms_zero.testing import run_workers

    peaks = [run_workers(1, attention_peak, length, timeout_s=300)[0] for length in lengths]
    slope = np.polyfit([math.log(length) for length in lengths], [math.log(peak) for peak in peaks], 1)[0]
    cases = [
        {"case": f"attention over {length} tokens", "peak_bytes": peak}
        for length, peak in zip(lengths, peaks, strict=True)
    ]
    return {"attention_peak_bytes_growth_exponent": float(slope)}, cases


def measure(quick: bool) -> dict[str, Any]:
    """All figures as metrics and cases."""
    parts = [
        traffic_figures(),
        idle_figures(*(0.02, 1) if quick else (0.15, 4)),
        attention_figures((2048, 4096) if quick else (2048, 4096, 8192)),
    ]
    metrics = {name: value for part, _ in parts for name, value in part.items()}
    return {"metrics": metrics, "cases": [case for _, cases in parts for case in cases]}


def main() -> int:
    """Measure and print; returns the exit status."""
    from _figures import add_json_option, write_figures

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="short sleeps, to see that it runs")
    add_json_option(parser)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    load = os.getloadavg()[0]
    found = measure(args.quick)
    for name, value in found["metrics"].items():
        print(f"{name:46} {value:.4g}")
    print(f"load average {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end")
    write_figures({**found, "load": [load, os.getloadavg()[0]]}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
