"""What ZeRO costs and saves: time a step, the engine's own share of it, bytes sent and bytes held.

    python scripts/bench_zero.py [--quick] [--json [PATH]]

Two workers, one core and one thread each, train a GPT of 5.3 million parameters (4 layers, width 256) in
fp32 on 8 x 128 tokens each, with ``ms_zero.zero.shard`` and ``ms_zero.optim.AdamW``. Everything that is
compared by time runs in the same two processes, one after another in every round; the median over the rounds
counts.

- ``stageN_over_stage0``: time of a step.
- ``overhead_stageN``: (step - compute - collectives) / step. Compute is the bare model's forward and backward
  on the same local batch, plus the kernels of the norm and of the update on as many elements as a rank
  updates, on flat buffers; each of the two workers runs it for itself, with one core as in the step.
  Collectives are those of a step, the same operations, sizes and dtypes, issued back to back.
- ``overhead_cpu_stageN``: the same of processor time, all threads of a worker: waiting is not counted,
  neither for the peer nor for a core that somebody else uses. On a loaded machine only this one means
  something. The medians of all times are among the ``cases``.
- ``traffic_stageN_over_theory``: bytes that a rank sends in a step over those of ``ms_zero.plan.zero``.
- ``bytes_per_param_stageN_worldM``: of weights, gradients and optimizer state that are alive between two
  microbatches, bf16 with 2-byte gradients; ``..._fp32`` and ``..._fp32_gradients`` likewise. ``cases`` has
  the formulas beside them.
- ``offload_cpu_over_none``, ``offload_nvme_over_none``: time of a step of stage 2 with the optimizer state in
  host memory, or in a file in the folder for temporary files.
- ``live_tensor_growth``: tensors alive after 450 steps that were not after 250, the most of all stages, some
  with recompute and offload, each in processes of its own. ``rss_bytes_per_step``: growth of resident memory
  meanwhile, the most of them. MindSpore's operators leak a little, so each case has a plain loop beside it,
  MindSpore's own from ``value_and_grad`` to ``AdamWeightDecay``, which runs as many operators: with recompute
  by ``mindspore.recompute`` of the same cells, in bf16 with the same rounding of activations.
  ``rss_bytes_per_step_plain``: the most of these loops; ``rss_bytes_per_step_over_plain``: the most that a
  case grows more than its own loop. (The first 250 steps fill MindSpore's caches: in them all grow more.)
- ``fsdp2_over_ddp``: time of a step of PyTorch's ``fully_shard`` over its ``DistributedDataParallel``, the
  same model, sizes and dtype, gloo, two processes of one thread; left out where torch is not installed.
"""

import argparse
import ctypes
import gc
import importlib.util
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

SHAPE = {"vocab_size": 4096, "hidden_size": 256, "num_layers": 4, "num_heads": 4, "ffn_hidden_size": 1024}
SMALL = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 2, "ffn_hidden_size": 256}
SEQ_LEN, BATCH = 128, 8
WORKERS = 2
HYPER = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
LR, CLIP = 3e-4, 1.0
#: Buckets that all stages cut the model into, small enough that a step has several.
BUCKET_BYTES = 4 * 2**20
STAGES = range(4)
#: name -> dtype of weights, of gradients kept, bytes of the master copy
PRECISIONS = {"": ("bf16", "bf16", 4), "_fp32_gradients": ("bf16", "fp32", 4), "_fp32": ("fp32", "fp32", 0)}
GROWN = ("live_tensor_growth", "rss_bytes_per_step")
#: Cases of growth.
GROWTH = {
    "stage 0": {"stage": 0},
    "stage 1": {"stage": 1},
    "stage 2": {"stage": 2},
    "stage 3": {"stage": 3},
    "stage 1 full recompute": {"stage": 1, "recompute": "full"},
    "stage 2 selective recompute cpu": {"stage": 2, "recompute": "selective", "offload": "cpu"},
    "stage 3 full recompute": {"stage": 3, "recompute": "full"},
    "stage 3 bf16 nvme": {"stage": 3, "policy": "bf16", "offload": "nvme"},
}
#: Those of the quick mode.
QUICK_GROWTH = ("stage 0", "stage 3 bf16 nvme")
#: What of a case decides on the operators that run.
OF_THE_LOOP = ("recompute", "policy")

Step = Callable[[], object]


def tokens(rank: int, batch: int, vocab_size: int) -> np.ndarray:
    """int32 [B, T + 1] of random tokens of one worker."""
    return np.random.default_rng(rank).integers(0, vocab_size, (batch, SEQ_LEN + 1)).astype(np.int32)


class Recorder:
    """A backend that notes the collectives that pass through it."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.calls: list[tuple] = []

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._backend, name)
        if name not in ("all_reduce", "all_gather", "reduce_scatter"):
            return operation

        def call(x: Any, group: Any, *more: Any) -> Any:
            self.calls.append((operation, x.shape, x.dtype, group, more))
            return operation(x, group, *more)

        return call


def replay(calls: list[tuple]) -> Step:
    """Those collectives, back to back."""
    from mindspore import Tensor

    from ms_zero.zero.convert import as_dtype

    made = [
        partial(operation, as_dtype(Tensor(np.ones(shape, np.float32)), dtype), group, *more)
        for operation, shape, dtype, group, more in calls
    ]

    def run() -> None:
        for call in made:
            call().wait()

    return run


def build_model(shape: Mapping[str, int]) -> Any:
    """A GPT with an untied head and initial values."""
    from ms_zero.models import GPT, initialise

    model = GPT(**shape, max_seq_len=SEQ_LEN, tie_embeddings=False)
    initialise(model, 1)
    return model


def loss_of(model: Callable, data: np.ndarray) -> Any:
    """Mean token loss, a function without arguments."""
    from mindspore import Tensor

    from ms_zero.kernels import CrossEntropySum

    loss_sum = CrossEntropySum()
    ids, labels = Tensor(data[:, :-1].copy()), Tensor(data[:, 1:].reshape(-1).copy())

    def loss() -> Any:
        logits = model(ids)
        return loss_sum(logits.reshape((-1, logits.shape[-1])), labels) / labels.size

    return loss


class Training:
    """A sharded model, its optimizer and one worker's batch."""

    def __init__(
        self,
        comm: Any,
        shape: Mapping[str, int],
        *,
        policy: Any = "fp32",
        recompute: str = "none",
        offload: Any = None,
        batch: int = BATCH,
        **options: Any,
    ) -> None:
        from ms_zero import memory, zero
        from ms_zero.comm import ProcessMesh
        from ms_zero.mesh import Mesh
        from ms_zero.optim import AdamW

        cell = build_model(shape)
        if recompute != "none":
            memory.apply_recompute(cell, recompute)
        chosen = zero.Options(**options)
        mesh = ProcessMesh(Mesh(dp_shard=comm.world_size), comm)
        wrap = zero.wrap_blocks(cell, leaves=True)
        self.model = zero.shard(cell, mesh, stage=chosen.stage, policy=policy, wrap=wrap, options=chosen)
        self.optimizer = AdamW(self.model, **HYPER, offload=offload)
        self._loss = loss_of(self.model, tokens(comm.rank, batch, shape["vocab_size"]))

    @property
    def psi(self) -> int:
        """Number of parameters."""
        return sum(int(np.prod(shape)) for shape in self.model.names.values())

    def microbatch(self, *, last: bool) -> None:
        """Forward and backward."""
        with self.model.record():
            loss = self._loss()
        self.model.backward(loss, last=last)

    def step(self) -> None:
        """One step of one microbatch."""
        self.microbatch(last=True)
        self.optimizer.step(lr=LR, clip_norm=CLIP)


def bare_pass(comm: Any, shape: Mapping[str, int], batch: int = BATCH) -> Step:
    """Forward and backward of the model that nobody has touched."""
    from ms_zero._compat import backward, clear_grads, tape

    model = build_model(shape)
    loss, params = loss_of(model, tokens(comm.rank, batch, shape["vocab_size"])), model.trainable_params()

    def run() -> None:
        with tape():
            value = loss()
        backward(value)
        clear_grads(params)

    return run


def bare_update(num_updated: int, num_owned: int) -> Step:
    """The kernels of the norm and of the update on flat buffers."""
    from mindspore import Tensor

    from ms_zero import kernels

    param, mean, mean_sq, grad = (Tensor(np.full(num_updated, 0.01, np.float32)) for _ in range(4))
    owned = Tensor(np.full(num_owned, 0.01, np.float32))

    def run() -> None:
        kernels.sum_of_squares(owned)
        kernels.adamw_update(param, mean, mean_sq, grad, lr=LR, step=10, **HYPER)

    return run


def timed(comm: Any, step: Step) -> tuple[float, float]:
    """Seconds until all workers have done it, and processor seconds of this one."""
    comm.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    step()
    cpu = time.process_time() - cpu
    comm.barrier()
    return time.perf_counter() - wall, cpu


def time_steps(comm: Any, shape: Mapping[str, int], rounds: int, folder: str) -> dict[str, Any]:
    """Times of every contestant by round, and bytes sent over the theory. Runs on the workers."""
    from ms_zero.plan.zero import step_traffic
    from ms_zero.zero import HostStates, NvmeStates

    recorders = []
    comm = comm.with_backend(lambda backend: recorders.append(Recorder(backend)) or recorders[0])
    trainings = {f"stage{n}": Training(comm, shape, stage=n, bucket_bytes=BUCKET_BYTES) for n in STAGES}
    for place, store in (("cpu", HostStates()), ("nvme", NvmeStates(folder))):
        trainings[place] = Training(comm, shape, stage=2, bucket_bytes=BUCKET_BYTES, offload=store)
    psi = trainings["stage0"].psi
    contestants = {"pass": bare_pass(comm, shape)}
    chunk = psi // WORKERS
    contestants |= {"update0": bare_update(psi, chunk), "update1": bare_update(chunk, chunk)}
    contestants |= {name: training.step for name, training in trainings.items()}
    traffic = {}
    for _ in range(2):  # the second has found out what to gather ahead
        for stage in STAGES:
            recorders[0].calls.clear()
            comm.counters.reset()
            trainings[f"stage{stage}"].step()
            theory = step_traffic(stage, 1).sent_bytes(psi, WORKERS, 1, weight=4, wire=4, kept=4)
            traffic[stage] = comm.counters.total_bytes() / theory
            contestants[f"replay{stage}"] = replay(list(recorders[0].calls))
    times = [{name: timed(comm, step) for name, step in contestants.items()} for _ in range(2 + rounds)]
    trainings["nvme"].optimizer.close()
    return {"times": times[2:], "traffic": traffic, "parameters": psi}


def held_between_microbatches(comm: Any, shape: Mapping[str, int]) -> dict[str, tuple[float, float]]:
    """Bytes per parameter that are alive, and the formula, by stage and precision. Runs on the workers."""
    from ms_zero.plan.zero import held_bytes
    from ms_zero.precision.policy import BYTES, Policy
    from ms_zero.testing.live import live_bytes

    found = {}
    for suffix, (weight, gradient, master) in PRECISIONS.items():
        for stage in STAGES:
            before = live_bytes()
            policy = Policy(weight, weight, gradient, gradient)
            cut = {"bucket_bytes": BUCKET_BYTES // 16}
            training = Training(comm, shape, policy=policy, batch=1, stage=stage, **cut)
            training.microbatch(last=False)
            gradient_bytes, weight_bytes = BYTES[gradient], BYTES[weight]
            theory = held_bytes(
                stage, comm.world_size, weight=weight_bytes, gradient=gradient_bytes, master=master
            )
            alive = (live_bytes() - before) / training.psi
            found[f"stage{stage}_world{comm.world_size}{suffix}"] = (alive, theory.total)
            del training
            gc.collect()
    return found


def growth(
    comm: Any,
    shape: Mapping[str, int],
    steps: tuple[int, int],
    options: Mapping[str, Any],
    folder: str | None,
) -> dict[str, Any]:
    """Live tensors and resident memory that a number of steps add after a first number of them.

    folder: for states on disk; None: the plain loop.
    """
    from ms_zero.monitor import host_rss_bytes
    from ms_zero.testing.live import live_storages

    make = plain_step if folder is None else partial(sharded_step, folder=folder)
    step = make(comm, shape, **options)
    counts = []
    for number in steps:
        for _ in range(number):
            step()
        tensors = len(live_storages())
        ctypes.CDLL(None).malloc_trim(0)  # what is free in the heap does not count
        counts.append((tensors, host_rss_bytes()))
    (tensors, resident), (later_tensors, later_resident) = counts
    return {
        "live_tensor_growth": later_tensors - tensors,
        "rss_bytes_per_step": (later_resident - resident) / steps[-1],
    }


def sharded_step(
    comm: Any, shape: Mapping[str, int], folder: str, offload: str = "none", **options: Any
) -> Step:
    """The step of a case of growth."""
    from ms_zero.zero import HostStates, NvmeStates

    places = {"cpu": HostStates, "nvme": partial(NvmeStates, folder), "none": lambda: None}
    return Training(comm, shape, batch=1, offload=places[offload](), **options).step


def plain_step(comm: Any, shape: Mapping[str, int], recompute: str = "none", policy: str = "fp32") -> Step:
    """The loop that MindSpore's documentation shows, on the same model."""
    import mindspore as ms
    from mindspore import nn

    from ms_zero.precision.autocast import apply as autocast
    from ms_zero.precision.policy import policy as named_policy

    model = build_model(shape)
    if policy != "fp32":
        autocast(model, named_policy(policy), "CPU")
    blocks = model.transformer.h
    if recompute == "full":
        model.transformer.h = nn.CellList([repeated(block) for block in blocks])
    elif recompute == "selective":
        for block in blocks:
            block.attn.attention = repeated(block.attn.attention)
    params = model.trainable_params()
    optimizer = nn.AdamWeightDecay(params, LR)
    gradients = ms.value_and_grad(loss_of(model, tokens(comm.rank, 1, shape["vocab_size"])), None, params)

    def step() -> None:
        optimizer(gradients()[1])

    return step


def repeated(cell: Any) -> Any:
    """The cell, whose forward MindSpore repeats in backward."""
    import mindspore as ms

    class Repeated(ms.nn.Cell):
        def __init__(self) -> None:
            super().__init__(auto_prefix=False)
            self.cell = cell

        def construct(self, *args: Any) -> Any:
            return ms.recompute(self.cell, *args)

    return Repeated()


def measure_growth(quick: bool, folder: str) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and cases of what is left over by steps."""
    steps = (10, 10) if quick else (250, 200)
    tensors, resident = GROWN
    plain: dict[tuple, dict[str, Any]] = {}
    cases, over = [], []
    for name in QUICK_GROWTH if quick else GROWTH:
        options = GROWTH[name]
        loop = {key: options[key] for key in OF_THE_LOOP if key in options}
        key = tuple(loop.items())
        if key not in plain:
            plain[key] = {"case": "plain loop", **loop, **most_growth(steps, loop, None)}
        cases.append({"case": name, **most_growth(steps, options, folder)})
        over.append(cases[-1][resident] - plain[key][resident])
    metrics = {
        tensors: max(case[tensors] for case in cases),
        resident: max(case[resident] for case in cases),
        f"{resident}_plain": max(case[resident] for case in plain.values()),
        f"{resident}_over_plain": max(over),
    }
    return metrics, [*plain.values(), *cases]


def most_growth(steps: tuple[int, int], options: Mapping[str, Any], folder: str | None) -> dict[str, Any]:
    """Of the worker with the most."""
    from ms_zero.testing import run_workers

    ranks = run_workers(WORKERS, growth, SMALL, steps, options, folder, timeout_s=600)
    return max(ranks, key=itemgetter(*GROWN))


def torch_worker(rank: int, port: int, shape: Mapping[str, int], rounds: int) -> dict[str, list[float]]:
    """Seconds of a step under DDP and under FSDP2, by round, in one of two processes."""
    import torch
    from bench_overhead import torch_gpt
    from torch import distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    where = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=WORKERS)
    torch.manual_seed(1)
    sharded = torch_gpt(shape, SEQ_LEN)
    for block in sharded.blocks:
        fully_shard(block)
    models = {
        "ddp": DistributedDataParallel(torch_gpt(shape, SEQ_LEN), bucket_cap_mb=BUCKET_BYTES / 2**20),
        "fsdp2": fully_shard(sharded),
    }
    data = torch.from_numpy(tokens(rank, BATCH, shape["vocab_size"])).long()
    steps = {name: _torch_step(model, data) for name, model in models.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(2 + rounds):
        for name, step in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            times[name].append(time.perf_counter() - start)
    dist.destroy_process_group()
    return {name: taken[2:] for name, taken in times.items()}


def _torch_step(model: Any, data: Any) -> Step:
    import torch

    betas = (HYPER["beta1"], HYPER["beta2"])
    decay, eps = HYPER["weight_decay"], HYPER["eps"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=betas, eps=eps, weight_decay=decay)

    def step() -> None:
        logits = model(data[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()

    return step


def time_torch(quick: bool, rounds: int) -> dict[str, list[float]]:
    """What the first of two torch processes measures."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, "--rounds", str(rounds), "--torch-port", str(port), "--torch-rank"]
    start = partial(
        subprocess.Popen, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True
    )
    running = [start([*command, str(rank), *["--quick"] * quick]) for rank in range(WORKERS)]
    shown = [process.communicate()[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("the processes of torch failed")
    return json.loads(shown[0].splitlines()[-1])


def ratio(times: list[Mapping[str, float]], name: str, base: str) -> float:
    """Median over the rounds of one time over another."""
    return statistics.median(each[name] / each[base] for each in times)


def overhead(times: list[Mapping[str, float]], stage: int) -> float:
    """Median over the rounds of the share of a step that is neither compute nor collectives."""
    step, update, collectives = f"stage{stage}", f"update{min(stage, 1)}", f"replay{stage}"
    return statistics.median(
        1 - (each["pass"] + each[update] + each[collectives]) / each[step] for each in times
    )


def time_figures(ranks: list[dict[str, Any]]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and cases of :func:`time_steps`."""
    walls = [{name: wall for name, (wall, _) in each.items()} for each in ranks[0]["times"]]
    processor = [
        {name: statistics.mean(rank[name][1] for rank in each) for name in each[0]}
        for each in zip(*(rank["times"] for rank in ranks), strict=True)
    ]
    metrics = {f"stage{n}_over_stage0": ratio(walls, f"stage{n}", "stage0") for n in STAGES if n}
    metrics |= {f"overhead_stage{n}": overhead(walls, n) for n in STAGES}
    metrics |= {f"overhead_cpu_stage{n}": overhead(processor, n) for n in STAGES}
    metrics |= {f"traffic_stage{n}_over_theory": ranks[0]["traffic"][str(n)] for n in STAGES}
    metrics |= {f"offload_{place}_over_none": ratio(walls, place, "stage2") for place in ("cpu", "nvme")}
    cases = [
        {
            "case": f"time of {name}",
            "wall_ms": 1e3 * statistics.median(each[name] for each in walls),
            "cpu_ms": 1e3 * statistics.median(each[name] for each in processor),
        }
        for name in walls[0]
    ]
    return metrics, cases


def measure(quick: bool, rounds: int, folder: str) -> dict[str, Any]:
    """All figures as metrics and cases."""
    from ms_zero.testing import run_workers

    shape = SMALL if quick else SHAPE
    timed_ranks = run_workers(WORKERS, time_steps, shape, rounds, folder, timeout_s=900)
    metrics, cases = time_figures(timed_ranks)
    for world_size in (1, WORKERS) if quick else (1, 2, 3, 4):
        held = run_workers(world_size, held_between_microbatches, shape, timeout_s=300)[0]
        metrics |= {f"bytes_per_param_{name}": alive for name, (alive, _) in held.items()}
        cases += [{"case": name, "bytes_per_param": held[name][0], "theory": held[name][1]} for name in held]
    left, grown = measure_growth(quick, folder)
    metrics, cases = metrics | left, cases + grown
    if importlib.util.find_spec("torch"):
        times = time_torch(quick, rounds)
        metrics["fsdp2_over_ddp"] = statistics.median(
            ours / base for ours, base in zip(times["fsdp2"], times["ddp"], strict=True)
        )
    return {"metrics": metrics, "cases": cases}


def main() -> int:
    """Measure and print; returns the exit status."""
    from _figures import add_json_option, write_figures

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, to see that it runs")
    parser.add_argument("--rounds", type=int, default=0, help="measured rounds (default 11, quick: 3)")
    add_json_option(parser)
    parser.add_argument("--torch-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--torch-port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    rounds = args.rounds or (3 if args.quick else 11)
    if args.torch_rank is not None:
        shape = SMALL if args.quick else SHAPE
        print(json.dumps(torch_worker(args.torch_rank, args.torch_port, shape, rounds)))
        return 0
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args.quick, rounds, folder)
    for name, value in found["metrics"].items():
        print(f"{name:46} {value:.4g}")
    print(f"load average {load:.1f} at the start, {os.getloadavg()[0]:.1f} at the end")
    write_figures({**found, "load": [load, os.getloadavg()[0]]}, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
