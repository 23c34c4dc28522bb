#!/usr/bin/env python3
"""Hold the planner against published tables and against the engine; print the figures.

    python scripts/validate_planner.py [--json]

All but the comparison with the engine needs neither mindspore nor numpy. Times are processor seconds, the
best of three. Status 1 when a figure is missed.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ms_zero.config.translate import translate_file
from ms_zero.errors import UserError
from ms_zero.hardware import load_device
from ms_zero.mesh import Mesh
from ms_zero.pipeline import schedule
from ms_zero.plan import traffic, update, zero
from ms_zero.plan.flops import selective_overhead, shape_flops
from ms_zero.plan.layout import (
    FP32,
    MINDFORMERS,
    MIXED,
    MIXED_FP32_GRADIENTS,
    Layout,
    Precision,
    in_flight,
)
from ms_zero.plan.memory import MemoryModel, state_bytes
from ms_zero.plan.models import load_model
from ms_zero.plan.parameters import count_parameters
from ms_zero.plan.planner import Request, make_plan
from ms_zero.plan.published import ASCEND_ROWS, predict
from ms_zero.plan.saved import Split, block_bytes, block_of
from ms_zero.plan.time import TimeModel

REPOSITORY = Path(__file__).resolve().parent.parent
_ON_ASCEND = ("hardware.target=Ascend", "hardware.device=ascend-910b2")
EXAMPLES = REPOSITORY / "tests" / "config" / "examples"
GB = 1e9


@dataclass(frozen=True)
class Check:
    """One published figure and the planner's; ``tolerance`` is absolute, 0 for exact figures."""

    table: str
    name: str
    got: float
    published: float
    tolerance: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether they agree."""
        return abs(self.got - self.published) <= self.tolerance * (1 + 1e-9)


# Memory: the ZeRO paper

ZERO_TABLE = {
    (7.5, 1): ("120", "120", "120"),
    (7.5, 4): ("52.5", "41.3", "30"),
    (7.5, 16): ("35.6", "21.6", "7.5"),
    (7.5, 64): ("31.4", "16.6", "1.88"),
    (7.5, 256): ("30.4", "15.4", "0.47"),
    (7.5, 1024): ("30.1", "15.1", "0.12"),
    (128, 1): ("2048", "2048", "2048"),
    (128, 4): ("896", "704", "512"),
    (128, 16): ("608", "368", "128"),
    (128, 64): ("536", "284", "32"),
    (128, 256): ("518", "263", "8"),
    (128, 1024): ("513", "257", "2"),
}


def states_gb(billions: float, degree: int, stage: int, precision: Precision = MIXED) -> float:
    """Weights, gradients and optimizer state of one device in GB."""
    # The paper's gradients of stage 1 are whole, as those of several microbatches are.
    layout = Layout(seq_len=1, dp_shard=degree, zero_stage=stage, microbatches=2, precision=precision)
    device, _ = state_bytes(layout, billions * 1e9)
    return sum(device.values()) / GB


def zero_checks() -> Iterator[Check]:
    """Table 1 of the ZeRO paper within one unit of its last digit, and bytes per parameter."""
    for (billions, degree), row in ZERO_TABLE.items():
        for stage, printed in zip((1, 2, 3), row, strict=True):
            unit = 10.0 ** -len(printed.partition(".")[2])
            got = states_gb(billions, degree, stage)
            yield Check("zero table 1", f"{billions}B N={degree} stage {stage}", got, float(printed), unit)
    formulas = {
        "fp16": (MIXED, (16, 4 + 12 / 8, 2 + 14 / 8, 16 / 8)),
        "fp32 gradients": (MIXED_FP32_GRADIENTS, (18, 6 + 12 / 8, 2 + 16 / 8, 18 / 8)),
        "fp32": (FP32, (16, 8 + 8 / 8, 4 + 12 / 8, 16 / 8)),
    }
    for name, (precision, row) in formulas.items():
        for stage, expected in enumerate(row):
            got = states_gb(1, 8, stage, precision)
            yield Check("bytes per parameter", f"{name} N=8 stage {stage}", got, expected, 1e-9)
    for stage, expected in enumerate((2, 2, 2, 3)):
        passes = zero.step_traffic(stage, microbatches=1)
        got = passes.weight_gathers + passes.gradient_scatters + passes.gradient_gathers
        yield Check("communication", f"stage {stage}, elements per parameter", got, expected)
        sent = passes.sent_bytes(1e9, 64, 1, weight=2, wire=2, kept=2) / 2e9
        yield Check("communication", f"stage {stage}, N=64: sent elements", sent, expected * 63 / 64, 1e-9)


def founding_checks() -> Iterator[Check]:
    """The figures of the project's first note about GPT-3 175B, as counted."""
    device, _ = state_bytes(Layout(seq_len=1), 175e9)
    moments, master = device["moments"] / GB, device["master"] / GB
    yield Check("gpt-3 note", "weights GB", device["weights"] / GB, 350)
    yield Check("gpt-3 note", "gradients GB", device["gradients"] / GB, 350)
    yield Check("gpt-3 note", "two moments GB", moments, 1400)
    yield Check("gpt-3 note", "moments and master GB", moments + master, 2100)
    held = sum(device.values()) / GB
    yield Check("gpt-3 note", "weights, gradients, states: TB", held / 1000, 2.8, 1e-9)
    yield Check("gpt-3 note", "weights, gradients, states: cards of 64 GB", math.ceil(held / 64), 44)
    activations = 2 * sbh("none") * 2048 * 12288 * 96 / GB
    yield Check("gpt-3 note", "activations of 2 samples: GB below 500", max(0.0, 500 - activations), 0.0)
    note = held - master + 500
    yield Check("gpt-3 note", "the note's sum, GB", note, 2600)
    yield Check("gpt-3 note", "the note's sum: cards of 64 GB", math.ceil(note / 64), 41)
    streamed = update.without_master(MIXED)
    yield Check("gpt-3 note", "step without master, bytes a parameter", streamed, 20)
    seconds = update.update_seconds(175e9, streamed, 1.6e12)
    yield Check("gpt-3 note", "step without master, seconds", seconds, 2.19, 0.005)
    yield Check("gpt-3 note", "unfused update bytes", update.update_bytes(MIXED, fused=False).update, 32)
    fused = update.update_bytes(MIXED)
    yield Check("gpt-3 note", "fused update bytes", fused.update, 28)
    yield Check("gpt-3 note", "statistics pass bytes", fused.passes, 2)
    yield Check("gpt-3 note", "fused update, TB", 175e9 * fused.update / 1e12, 4.9, 0.001)
    seconds = update.update_seconds(175e9, fused.update, 1.6e12)
    yield Check("gpt-3 note", "fused update, s", seconds, 3.1, 0.05)
    shape, device = load_model("gpt3-175b"), load_device("ascend-910b")
    time_model = TimeModel(shape, device)
    alone = time_model.estimate(Layout(seq_len=2048)).optimizer
    for ranks in (8, 1024):
        sharded = time_model.estimate(Layout(seq_len=2048, dp_shard=ranks, zero_stage=1)).optimizer
        yield Check("gpt-3 note", f"update on 1 rank over {ranks}", alone / sharded, ranks, 1e-6 * ranks)


# Activations: Korthikanti et al.


def sbh(kind: str, model: str = "gpt3-175b", **split: object) -> float:
    """Bytes that a layer keeps with dropout on, over s b h."""
    shape, s, b = load_model(model), 2048, 2
    found = block_bytes(
        block_of(shape, shape.blocks[0][1]),
        Split(batch=b, seq_len=s, dropout=True, **split),
        implementation="published",
        recompute=kind,
    )
    return found / (s * b * shape.hidden_size)


def activation_checks() -> Iterator[Check]:
    """The sums of table 2, what selective recompute saves, and the factor of interleaving."""
    core, t = 5 * 96 * 2048 / 12288, 8
    tensor, sequence = {"tp": t}, {"tp": t, "sequence_parallel": True}
    rows = (
        ("none", {}, "none", 34 + core),
        ("tp", tensor, "none", 10 + 24 / t + core / t),
        ("tp, sp", sequence, "none", (34 + core) / t),
        ("tp, selective", tensor, "selective", 10 + 24 / t),
        ("tp, sp, selective", sequence, "selective", 34 / t),
        ("full", {}, "full", 2),
    )
    for name, split, kind, expected in rows:
        yield Check("activations / sbh", name, sbh(kind, **split), expected, 1e-9)
    for model, share in (("gpt3-175b", 0.70), ("megatron-529.6b", 0.65)):
        saved = 1 - sbh("selective", model) / sbh("none", model)
        yield Check("selective recompute", f"{model}: share saved", saved, share, 0.005)
    for model, published, exact in (("gpt3-175b", 0.027, 0.009), ("megatron-529.6b", 0.016, 0.0055)):
        overhead = selective_overhead(load_model(model), 2048)
        yield Check("selective recompute", f"{model}: as published", overhead.published, published, 5e-4)
        yield Check("selective recompute", f"{model}: exact", overhead.exact, exact, 5e-5)
    for p, v in ((8, 2), (4, 3), (64, 2)):
        factor = sum(in_flight("interleaved", p, 0, 4 * p, v)) / (p * v)
        yield Check("interleaving", f"first stage p={p} v={v}", factor, 1 + (p - 1) / (p * v), 1e-9)


# FLOPs: Narayanan et al., SC21

# parameters in billions, heads, h, L, t, p, GPUs, B, TF/GPU
SC21 = (
    (1.7, 24, 2304, 24, 1, 1, 32, 512, 137),
    (3.6, 32, 3072, 30, 2, 1, 64, 512, 138),
    (7.5, 32, 4096, 36, 4, 1, 128, 512, 142),
    (18.4, 48, 6144, 40, 8, 1, 256, 1024, 135),
    (39.1, 64, 8192, 48, 8, 2, 512, 1536, 138),
    (76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140),
    (145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148),
    (310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155),
    (529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163),
    (1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163),
)


def flops_checks() -> Iterator[Check]:
    """Sizes, FLOPs of an iteration with and without recompute, and 34 days for 175B."""
    vocab, s = 51200, 2048
    for billions, _, h, layers, _, _, _, batch, _ in SC21:
        name = f"megatron-{billions:g}b"
        shape = load_model(name)
        parameters = count_parameters(shape)
        formula = 12 * layers * h**2 * (1 + 13 / (12 * h) + (vocab + s) / (12 * layers * h))
        yield Check("sc21 sizes", f"{name}: as printed", round(parameters / GB, 1), billions, 1e-9)
        # The formula leaves out the last norm, 2 h.
        yield Check("sc21 sizes", f"{name}: formula", parameters, formula + 2 * h, 1e-6 * formula)
        flops, tokens = shape_flops(shape, s), batch * s
        ends = 1 + s / (6 * h)
        recompute = 96 * batch * s * layers * h**2 * (ends + vocab / (16 * layers * h))
        plain = 72 * batch * s * layers * h**2 * (ends + vocab / (12 * layers * h))
        got = tokens * flops.train_with_full_recompute
        yield Check("sc21 flops", f"{name}: with recompute", got, recompute, 1e-9 * recompute)
        yield Check("sc21 flops", f"{name}: without", tokens * flops.train, plain, 1e-9 * plain)
    days = 8 * 300e9 * 175e9 / (1024 * 140e12) / 86400
    yield Check("sc21 flops", "175B, 300B tokens, 1024 A100: days", days, 34, 0.5)
    flops = shape_flops(load_model("gpt3-175b"), s).train_with_full_recompute
    exact = flops * 300e9 / (1024 * 140e12) / 86400
    yield Check("sc21 flops", "the same, counted exactly", exact, 34, 1.5)


# Pipeline, traffic, ranks


def pipeline_checks() -> Iterator[Check]:
    """Bubbles, microbatches in flight and the printed orders."""
    for p, m in ((4, 8), (8, 64), (16, 16)):
        unit = 1.0
        for name, v in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 4)):
            idle = schedule.bubble_time(name, p, m, v, forward=unit, backward=unit, weight=unit)
            ideal = 3 * m
            yield Check("bubble", f"{name} p={p} m={m} v={v}", idle / ideal, (p - 1) / (v * m), 1e-9)
            if v == 1:
                share = idle / (ideal + idle)
                yield Check("bubble", f"{name} p={p} m={m}: share", share, (p - 1) / (m + p - 1), 1e-9)
        third = schedule.bubble_time("zb-h1", p, m, forward=unit, backward=unit, weight=unit)
        yield Check("bubble", f"zb-h1 p={p} m={m}, F = B = W", third, (p - 1) * 3 / 3, 1e-9)
        for rank in range(p):
            flying = in_flight("1f1b", p, rank, m, 1)[0]
            yield Check("in flight", f"1f1b p={p} m={m} rank {rank}", flying, min(p - rank, m))
            ahead = schedule.warmup_forwards("1f1b", rank, p, m)
            yield Check("warm-up", f"1f1b p={p} m={m} rank {rank}", ahead, min(p - rank - 1, m))
            ahead, bound = schedule.warmup_forwards("interleaved", rank, p, m, 2), 2 * (p - rank - 1) + p
            yield Check("warm-up", f"interleaved p={p} m={m} rank {rank}", ahead, min(bound, 2 * m))
        yield Check("in flight", f"gpipe p={p} m={m}", in_flight("gpipe", p, 0, m, 1)[0], m)
    for name, built, printed in _printed_orders():
        yield Check("printed orders", name, float(built == printed), 1.0)


def _printed_orders() -> Iterator[tuple[str, str, str]]:
    plain = schedule.build("1f1b", 4, 8)
    printed = {
        0: "F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7",
        3: " ".join(f"F{m} B{m}" for m in range(8)),
    }
    for rank, order in printed.items():
        built = " ".join(f"{action.kind}{action.microbatch}" for action in plain.orders[rank])
        yield f"1f1b p=4 m=8 rank {rank}", built, order
    mixed = schedule.build("interleaved", 2, 4, 2)
    printed = {
        0: "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        1: "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    }
    for rank, order in printed.items():
        yield f"interleaved p=2 v=2 m=4 rank {rank}", " ".join(map(str, mixed.orders[rank])), order


def traffic_checks() -> Iterator[Check]:
    """Elements per axis, forward and backward."""
    tokens, h, t = 4096, 8192, 8
    sent = traffic.tensor_parallel(tokens, h, t)
    yield Check("traffic", "tp", sent, 8 * tokens * h * (t - 1) / t)
    yield Check("traffic", "pp", traffic.pipeline(tokens, h), tokens * h)
    yield Check("traffic", "pp, scatter and gather", traffic.pipeline(tokens, h, t), tokens * h / t)
    yield Check("traffic", "cp", traffic.context_parallel(tokens, 2048, 4), 3 * tokens * 2048 * 3 / 4)
    yield Check("traffic", "ep", traffic.expert_parallel(tokens, h, 2, 4), 4 * tokens * 2 * h * 3 / 4)


def rank_checks() -> Iterator[Check]:
    """16 ranks, tp 2, pp 4: the published groups."""
    mesh = Mesh(pp=4, dp_shard=2, tp=2)
    groups = {axis: {tuple(group) for group in mesh.groups((axis,))} for axis in ("dp_shard", "pp")}
    published = {
        "dp_shard": {(rank, rank + 2) for start in (0, 4, 8, 12) for rank in (start, start + 1)},
        "pp": {(rank, rank + 4, rank + 8, rank + 12) for rank in range(4)},
    }
    for axis, expected in published.items():
        yield Check("rank order", f"{axis} groups", float(groups[axis] == expected), 1.0)


# Parameter counts and hardware

PARAMETERS = {
    "gpt2-small": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama2-70b": 68_976_648_192,
    "llama-70b": 68_976_648_192,
    "llama3.1-8b": 8_030_261_248,
    "gpt3-175b": 174_604_259_328,
    # Counted from the public checkpoints of these models.
    "llama2-13b": 13_015_864_320,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v3": 671_026_419_200,
}

HARDWARE = {
    "ascend-910b1": (378, 64, 48),
    "ascend-910b2": (354, 64, 48),
    "ascend-910b3": (295, 64, 40),
    "ascend-910b4": (246, 32, None),
    "ascend-910c-die": (376, 64, None),
    "nvidia-a100-sxm-80gb": (312, 80, None),
    "nvidia-h100-sxm": (990, 80, None),
}


def catalogue_checks() -> Iterator[Check]:
    """Exact parameter counts, and what the device table says."""
    for name, published in PARAMETERS.items():
        yield Check("parameters", name, count_parameters(load_model(name)), published)
    for name, (teraflops, memory, cores) in HARDWARE.items():
        device = load_device(name)
        yield Check("hardware", f"{name}: bf16 TFLOP/s", device.peak_flops["bf16"] / 1e12, teraflops, 1e-9)
        yield Check("hardware", f"{name}: GB", device.memory_bytes / GB, memory)
        if cores is not None:
            yield Check("hardware", f"{name}: vector cores", device.vector_cores, cores)
    for bin_number in (1, 2, 3):
        visible = load_device(f"ascend-910b{bin_number}").usable_memory / 2**30
        yield Check("hardware", f"910B{bin_number}: visible GiB", visible, 60.97, 0.005)
    for name, rate in (("ascend-910b2", 1.6), ("nvidia-a100-sxm-80gb", 2.0), ("nvidia-h100-sxm", 3.35)):
        yield Check("hardware", f"{name}: TB/s", load_device(name).memory_bandwidth / 1e12, rate, 1e-9)
    for name, near, node in (("ascend-910b2", 50, 8), ("ascend-910c-die", 200, 16)):
        device = load_device(name)
        yield Check("hardware", f"{name}: collectives GB/s", device.intra_bandwidth / GB, near, 1e-9)
        yield Check("hardware", f"{name}: devices of a node", device.devices_per_node, node)
    beyond = load_device("ascend-910b2").inter_bandwidth / GB
    yield Check("hardware", "ascend-910b2: collectives between nodes GB/s", beyond, 10, 1e-9)
    for name, links in (("nvidia-a100-sxm-80gb", 600), ("nvidia-h100-sxm", 900)):
        yield Check("hardware", f"{name}: NVLink GB/s", load_device(name).link_bandwidth / GB, links)
    die = load_device("ascend-910c-die")
    package = (2 * die.peak_flops["bf16"] / 1e12, 2 * die.memory_bytes / GB, 2 * die.memory_bandwidth / 1e12)
    for unit, got, printed in zip(("TFLOP/s", "GB", "TB/s"), package, (752, 128, 3.2), strict=True):
        yield Check("hardware", f"910C package of two dies: {unit}", got, printed, 1e-9)


def cap_checks() -> Iterator[Check]:
    """MindFormers' model cards: at most 1.05 x the configured memory; and what is known to fit, fits."""
    for row in ASCEND_ROWS:
        share = predict(row).memory / row.cap
        yield Check("ascend memory", f"{row.name}: share of the cap above 1.05", max(0.0, share - 1.05), 0.0)
    fits = Layout(
        seq_len=4096,
        tp=4,
        pp=4,
        microbatches=4,
        recompute="full",
        hsdp_level=1,
        precision=MINDFORMERS,
    )
    peak = MemoryModel(load_model("qwen3-32b"), kernels="mindformers").peak(fits)
    yield Check("ascend memory", "Qwen3-32B on 16 cards: above 58 GB", max(0.0, peak / GB - 58), 0.0)


TABLES: tuple[Callable[[], Iterator[Check]], ...] = (
    zero_checks,
    founding_checks,
    activation_checks,
    flops_checks,
    pipeline_checks,
    traffic_checks,
    rank_checks,
    catalogue_checks,
    cap_checks,
)


def all_checks() -> list[Check]:
    """Every published figure."""
    return [check for table in TABLES for check in table()]


# Figures


# Times are seconds of one processor, the best of three, so that other programs on the machine hardly count;
# nothing runs in parallel here.


def search_seconds(devices: int) -> float:
    """Seconds to plan GPT-3 175B on so many Ascend devices."""
    request = Request(model="gpt3-175b", cluster="ascend-910b", devices=devices, seq_len=2048)
    return _best_of_three(time.process_time, lambda: make_plan(request))


def estimate_seconds() -> float:
    """Seconds of `ms-zero estimate`, Python's start included."""
    command = [sys.executable, "-m", "ms_zero", "estimate", "runs/quickstart", *_ON_ASCEND]
    run = partial(subprocess.run, command, check=True, capture_output=True)
    return _best_of_three(_children_seconds, run)


def _best_of_three(clock: Callable[[], float], work: Callable[[], object]) -> float:
    spent = []
    for _ in range(3):
        start = clock()
        work()
        spent.append(clock() - start)
    return min(spent)


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def files_translated() -> int:
    """Example files of other tools that translate; without them (no source tree) 0."""
    kinds = ("deepspeed", "fsdp", "mindformers", "megatron")
    files = sorted(EXAMPLES.iterdir()) if EXAMPLES.is_dir() else []
    count = 0
    for path in files:
        tool = next(kind for kind in kinds if path.name.startswith(kind))
        try:
            count += bool(translate_file(tool, path, 8).values)
        except UserError as error:
            print(f"not translated: {error}", file=sys.stderr)
    return count


def measured_error() -> float | None:
    """Largest relative error of the memory model against counted bytes; None without mindspore."""
    try:
        from ms_zero._compat import launch_blocking
        from ms_zero.testing.memory_cases import relative_errors
    except ImportError:
        return None
    launch_blocking()
    with tempfile.TemporaryDirectory() as folder:
        errors = dict(relative_errors(Path(folder)))
    worst = max(errors, key=lambda name: abs(errors[name]))
    print(f"memory model, furthest from the engine: {worst}: {errors[worst]:+.3%}", file=sys.stderr)
    return abs(errors[worst])


def figures() -> dict[str, float | None]:
    """Everything that this script measures."""
    checks = all_checks()
    for check in checks:
        if not check.passed:
            print(f"missed: {check.table}: {check.name}: {check.got}, not {check.published}", file=sys.stderr)
    rows = [predict(row) for row in ASCEND_ROWS]
    for row in rows:
        print(f"{row.row.name}: tokens/s/card {row.error:+.1%} of measured", file=sys.stderr)
    return {
        "tables_checked": len(checks),
        "tables_failed": sum(not check.passed for check in checks),
        "ascend_rows_within_25pct": sum(abs(row.error) <= 0.25 for row in rows),
        "memory_model_max_rel_error": measured_error(),
        "search_1024_s": search_seconds(1024),
        "search_100k_s": search_seconds(100_000),
        "estimate_s": estimate_seconds(),
        "configs_translated": files_translated(),
    }


def missed(found: dict[str, float | None]) -> list[str]:
    """Names of the figures that are not as they must be."""
    limits = {"memory_model_max_rel_error": 0.05, "search_1024_s": 2, "search_100k_s": 20, "estimate_s": 0.3}
    over = [name for name, limit in limits.items() if found[name] is not None and found[name] > limit]
    failed = ["tables_failed"] if found["tables_failed"] else []
    rows = ["ascend_rows_within_25pct"] if found["ascend_rows_within_25pct"] < len(ASCEND_ROWS) - 1 else []
    return failed + rows + over


def main() -> int:
    """Print the figures; 1 when one is missed."""
    parser = argparse.ArgumentParser(description="Hold the planner against published tables.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = figures()
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, value in found.items():
            print(f"{name:28s} {'n/a' if value is None else f'{value:.4g}'}")
    wrong = missed(found)
    if wrong:
        print(f"missed: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
