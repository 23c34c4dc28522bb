"""Certify that layouts train like plain single-process training. See ``ms_zero/testing/parity.py``.

    python scripts/parity.py --matrix data|zero|parallel [--quick] [--json [PATH]]

Prints one line a case and, for a case that differs, the first divergence, then layouts that do not agree in
every bit though they have to, and the figures. Exits with status 1 if any differs.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ms_zero.testing.context_matrix import context_cases
from ms_zero.testing.expert_matrix import expert_cases, moe_cases
from ms_zero.testing.parity import (
    Case,
    Plan,
    Result,
    bitwise_difference,
    bitwise_groups,
    run_cases,
    scale_histories,
)
from ms_zero.testing.pipeline_matrix import pipeline_cases
from ms_zero.testing.tensor_matrix import tensor_cases
from ms_zero.testing.zero_matrix import zero_cases

# AdamW divides by the root of the second moment: where a true gradient is zero, eps decides whether rounding
# noise becomes an update. With 1e-4 it does not, and parameters can be compared.
ADAM = ("optim.kind=adamw", "optim.eps=1e-4", "optim.lr=1e-3")
SGD = ("optim.kind=sgd", "optim.lr=0.05")
SHORT = ("optim.warmup_steps=3", "train.eval_interval=0", "data.seq_len=64", "train.output_dir=unused")
# 12 samples a step cut evenly for 1 to 4 workers with these numbers of microbatches.
MICROBATCHES = {1: (1, 3), 2: (1, 2, 6), 3: (1, 2), 4: (1, 3)}


def data_cases(quick: bool, scratch: Path) -> list[Case]:
    """Data parallelism: worlds 1-4, accumulation, optimizers, clipping, tied weights, small buckets, HSDP.

    The full matrix adds a growing batch, and documents whose attention and positions are reset; `scratch` is
    a folder for their text.
    """
    problems = {
        "gpt adamw": ("runs/quickstart", ADAM),
        "gpt sgd unclipped": ("runs/quickstart", (*SGD, "optim.clip_norm=0")),
        "gpt untied": ("runs/quickstart", (*ADAM, "model.tie_embeddings=false")),
        "llama adamw": ("runs/llama-tiny", ADAM),
        "llama sgd tied": ("runs/llama-tiny", (*SGD, "model.tie_embeddings=true")),
    }
    if quick:
        problems = {name: problems[name] for name in ("gpt adamw", "llama sgd tied")}
    cases = [] if quick else [*rampup_cases(), *document_cases(scratch)]
    for name, (base, overrides) in problems.items():
        problem = (*overrides, *SHORT, "train.global_batch_size=12", "model.num_layers=2")
        layouts = [(world, count) for world, counts in MICROBATCHES.items() for count in counts]
        for world, count in layouts:
            layout = (f"train.accumulation_steps={count}",)
            label = f"{name}, {world} workers x {count} microbatches"
            cases.append(Case(label, world, base, problem, layout))
        extras = (
            ("buckets of 50 kB", 3, "parallel.bucket_mb=0.05"),
            ("2 replicas x 2 shards", 4, "parallel.dp_replicate=2"),
        )
        for label, world, override in extras:
            layout = ("train.accumulation_steps=1", override)
            cases.append(Case(f"{name}, {world} workers, {label}", world, base, problem, layout))
    return cases


def rampup_cases() -> list[Case]:
    """A global batch that grows from 4 to 12 samples during the first 40."""
    growing = ("train.rampup_samples=40", "train.rampup_start=4", "train.rampup_increment=4")
    batch = ("train.global_batch_size=12", "train.micro_batch_size=1", "train.accumulation_steps=auto")
    problem = (*ADAM, *SHORT, *batch, *growing, "model.num_layers=2")
    layouts = {1: "train.micro_batch_size=4", 2: "train.micro_batch_size=2", 4: "train.micro_batch_size=1"}
    return [
        Case(f"gpt growing batch, {world} workers", world, "runs/quickstart", problem, (layout,))
        for world, layout in layouts.items()
    ]


def document_cases(folder: Path) -> list[Case]:
    """Attention and positions that restart at the borders of documents of 10 to 90 tokens."""
    for number in range(300):
        text = "".join(chr(97 + (number * i + i * i) % 26) for i in range(10 + number * 7 % 80))
        (folder / f"{number:03d}.txt").write_text(text)
    corpus = ("data.source=files", f"data.files=[{folder}/*.txt]", "data.validation_fraction=0")
    resets = ("data.reset_attention=true", "data.reset_positions=true")
    problem = (*ADAM, *SHORT, *corpus, *resets, "train.global_batch_size=12", "model.num_layers=2")
    return [
        Case(f"{name} documents, 2 workers", 2, base, problem, ("train.accumulation_steps=2",))
        for name, base in (("gpt", "runs/quickstart"), ("llama", "runs/llama-tiny"))
    ]


def parallel_cases(quick: bool, scratch: Path) -> list[Case]:
    """Tensor, sequence, pipeline, context and expert parallelism, alone and together."""
    dense = [*tensor_cases(quick), *pipeline_cases(quick), *context_cases(quick, scratch)]
    return [*dense, *moe_cases(quick), *expert_cases(quick)]


MATRICES: dict[str, Callable[[bool, Path], list[Case]]] = {
    "data": data_cases,
    "zero": zero_cases,
    "parallel": parallel_cases,
}
# In 16 bits only the first gradient is comparable to fp32 accuracy, see `ms_zero.testing.parity.TOLERANCES`.
GRADIENT_STEP = {"data": 2, "zero": 1, "parallel": 1}
# A router's choice between nearly equal experts is discrete: in time a rounding difference turns one around.
STEPS = {"data": 20, "zero": 20, "parallel": 10}
KINDS = ("loss", "grad_norm", "grad", "param")


def main() -> int:
    """Run a matrix; returns the exit status."""
    from _figures import add_json_option, write_figures

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrix", choices=MATRICES, default="data")
    parser.add_argument("--steps", type=int, help="default 20; parallel: 10")
    parser.add_argument("--quick", action="store_true", help="the subset that CI runs")
    add_json_option(parser)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        cases = MATRICES[args.matrix](args.quick, Path(folder))
        results = _run(cases, Plan(args.steps or STEPS[args.matrix], GRADIENT_STEP[args.matrix]))
    for line in _disagreements(results):
        print(f"DIFFERS: {line}")
    metrics, precisions = metrics_of(results), _by_precision(results)
    for name, part in {**precisions, "all": metrics}.items():
        print(f"{name}: " + ", ".join(f"{key} {value:g}" for key, value in part.items()))
    figures = {"metrics": metrics, "precisions": precisions, "cases": list(map(_row, results))}
    write_figures(figures, args.json)
    wrong = ("failures", "bitwise_failures", "scale_failures")
    return 1 if any(metrics[name] for name in wrong) else 0


def _run(cases: list[Case], plan: Plan) -> list[Result]:
    """Run the cases; prints a line for each as soon as it is done."""
    results = []
    print("".join(f"{kind:>10}" for kind in KINDS) + f"{'loss, fp32':>12}  case")
    for result in run_cases(cases, plan):
        results.append(result)
        columns = "".join(f"{result.max_rel[kind]:10.1e}" for kind in KINDS)
        wide = result.max_rel.get("fp32 loss")
        columns += f"{'' if wide is None else format(wide, '.1e'):>12}"
        print(f"{columns}  {result.case.name}", flush=True)
        if result.divergence:
            print(f"  DIFFERS: {result.divergence}", flush=True)
    return results


def _disagreements(results: list[Result]) -> list[str]:
    """Groups that differ in some bit, and problems whose loss scales depend on the layout."""
    pairs = map(bitwise_difference, bitwise_groups(results).values())
    scales = [reference for reference, found in scale_histories(results).items() if len(found) > 1]
    return [*filter(None, pairs), *(f"loss scales of {reference}" for reference in scales)]


def metrics_of(results: list[Result]) -> dict[str, float]:
    """The figures of all cases: "max_rel_..." in fp32, and of other precisions with their name before it."""
    groups = bitwise_groups(results)
    maxima = {}
    for precision in dict.fromkeys(result.precision for result in results):
        found = _maxima([result for result in results if result.precision == precision])
        prefix = "" if precision == "fp32" else f"{precision}_"
        maxima |= {f"{prefix}{name}": value for name, value in found.items()}
    return {
        "cases": len(results),
        "failures": sum(result.divergence is not None for result in results),
        **maxima,
        "bitwise_groups": len(groups),
        "bitwise_failures": sum(bool(bitwise_difference(members)) for members in groups.values()),
        "scale_failures": sum(len(histories) > 1 for histories in scale_histories(results).values()),
        "overflowing_cases": sum(result.skipped > 0 for result in results),
    }


def _by_precision(results: list[Result]) -> dict[str, dict[str, float]]:
    """The figures of each precision; "fp32_..." are those against fp32 training."""
    parts = {}
    for precision in dict.fromkeys(result.precision for result in results):
        members = [result for result in results if result.precision == precision]
        failures = sum(result.divergence is not None for result in members)
        parts[precision] = {"cases": len(members), "failures": failures, **_maxima(members)}
    return parts


def _maxima(results: list[Result]) -> dict[str, float]:
    kinds = dict.fromkeys(kind for result in results for kind in result.max_rel)
    found = {kind: max(result.max_rel.get(kind, 0.0) for result in results) for kind in kinds}
    return {f"max_rel_{kind.replace(' ', '_')}": value for kind, value in found.items()}


def _row(result: Result) -> dict[str, object]:
    return {
        "name": result.case.name,
        "divergence": str(result.divergence or ""),
        "group": result.case.group,
        "skipped_steps": result.skipped,
        **result.max_rel,
    }


if __name__ == "__main__":
    sys.exit(main())
