"""Certify that layouts train like plain single-process training. See ``ms_zero/testing/parity.py``.

    python scripts/parity.py --matrix data|parallel [--quick] [--json PATH]

Prints one line a case and, for a case that differs, the first divergence. Exits with status 1 if any differs.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ms_zero.testing.parity import Case, Plan, Result, run_cases
from ms_zero.testing.tensor_matrix import tensor_cases

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
    """Tensor and sequence parallelism, alone and with data parallelism."""
    return tensor_cases(quick)


MATRICES: dict[str, Callable[[bool, Path], list[Case]]] = {"data": data_cases, "parallel": parallel_cases}
KINDS = ("loss", "grad_norm", "grad", "param")


def main() -> int:
    """Run a matrix; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--matrix", choices=MATRICES, default="data")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="the subset that CI runs")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = _run(MATRICES[args.matrix](args.quick, Path(folder)), Plan(args.steps))
    metrics = _metrics(results)
    print(", ".join(f"{name} {value:g}" for name, value in metrics.items()))
    if args.json:
        rows = [{"name": r.case.name, "divergence": str(r.divergence or ""), **r.max_rel} for r in results]
        args.json.write_text(json.dumps({"metrics": metrics, "cases": rows}, indent=1) + "\n")
    return 1 if metrics["failures"] else 0


def _run(cases: list[Case], plan: Plan) -> list[Result]:
    """Run the cases; prints a line for each as soon as it is done."""
    results = []
    print(f"{'case':56}" + "".join(f"{kind:>11}" for kind in KINDS))
    for result in run_cases(cases, plan):
        results.append(result)
        columns = "".join(f"{result.max_rel[kind]:11.1e}" for kind in KINDS)
        print(f"{result.case.name:56}{columns}", flush=True)
        if result.divergence:
            print(f"  DIFFERS: {result.divergence}", flush=True)
    return results


def _metrics(results: list[Result]) -> dict[str, float]:
    maxima = {f"max_rel_{kind}": max(r.max_rel[kind] for r in results) for kind in KINDS}
    return {"cases": len(results), "failures": sum(r.divergence is not None for r in results), **maxima}


if __name__ == "__main__":
    sys.exit(main())
