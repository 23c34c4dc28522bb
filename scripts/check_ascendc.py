#!/usr/bin/env python
"""Check the AscendC kernels without a device: the sources themselves, on emulated vector cores.

    python scripts/check_ascendc.py [--json] [--quick] [--jobs 2]

Numbers: FusedAdamW and GradStats in all dtypes, sizes from 1 to 2^20, 1 to 48 cores, against the numpy
reference, to the last bit. Rules: unified buffer, alignment, queues, events, barriers, guard bands, bytes
moved. Mutants: every mechanical change of the sources has to be noticed, or be proven equivalent. What this
cannot tell: whether CANN's compiler takes the sources, how a device rounds division and root, and any speed.
Needs g++ and numpy.
"""

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "ascendc"))

import all_finite
import mutation
from cases import CORES, SIZES, AdamCase, Checker, Outcome, adam_cases, stats_cases
from emulated import (
    ADAM_VARIANTS,
    STATS_VARIANTS,
    TOTAL,
    Library,
    build_variants,
    compiler,
)
from tiling import TilingLibrary

GRADS = ("float32", "float16", "bfloat16")
LOWS = ("float16", "bfloat16", None)


@dataclasses.dataclass(frozen=True)
class Figures:
    """What the check measured."""

    numeric_cases: int
    numeric_failures: int
    max_ulp: float
    bytes_per_param_fp16_grad: float
    bytes_per_param_fp32_grad: float
    ub_bytes: int
    mutants: int
    """Mutants that compile and are not proven equivalent."""
    mutants_caught: int
    mutants_equivalent: int
    mutants_not_compiling: int
    self_test_verdicts: int
    """Verdicts of MindSpore's own kernel under the emulation; 0 where MindSpore is not installed."""
    self_test_wrong: int

    @property
    def holds(self) -> bool:
        """Whether nothing failed and no mutant survived."""
        failures = self.numeric_failures + self.self_test_wrong
        return failures == 0 and self.mutants_caught == self.mutants


def run_numbers(checker: Checker, sizes: Sequence[int], cores: Sequence[int]) -> list[tuple[str, Outcome]]:
    """Every numeric case with its outcome."""
    outcomes = [(str(case), checker.adam(case)) for case in adam_cases(GRADS, LOWS, sizes, cores)]
    outcomes += [
        (str(case), checker.adam(case))
        for low in ("float16", "bfloat16")
        for case in (AdamCase("float32", low, 30_000, 8, kind="ties"),)
    ]
    return outcomes + [(str(case), checker.stats(case)) for case in stats_cases(GRADS, sizes, cores)]


def run_mutants(folder: Path, tiling: TilingLibrary, quick: bool, jobs: int) -> list[mutation.Verdict]:
    """Every mutant, or one of each rule, with the reason it was caught."""
    chosen = mutation.one_of_each_rule() if quick else mutation.all_mutants()
    return mutation.judge(chosen, folder, tiling, jobs)


def run_self_test(folder: Path) -> all_finite.SelfTest:
    """MindSpore's own kernel on the same emulation."""
    if all_finite.source_path() is None:
        return all_finite.SelfTest(0, 0, frozenset())
    return all_finite.self_test(Library(build_variants(folder, "all_finite", [all_finite.variant()])))


def summarise(
    checker: Checker,
    outcomes: list[tuple[str, Outcome]],
    verdicts: list[mutation.Verdict],
    self_test: all_finite.SelfTest,
) -> Figures:
    """The figures of a run."""
    fp16 = checker.adam(AdamCase("float16", "float16", 1 << 20, 48))
    fp32 = checker.adam(AdamCase("float32", "float16", 1 << 20, 48))
    compiled = [verdict for verdict in verdicts if verdict.reason != "compiler"]
    proven = [each for each in compiled if each.reason is None and mutation.proof_of(each.mutant)]
    return Figures(
        numeric_cases=len(outcomes),
        numeric_failures=sum(bool(outcome.errors) for _, outcome in outcomes),
        max_ulp=max(outcome.max_ulp for _, outcome in outcomes),
        bytes_per_param_fp16_grad=fp16.bytes_per_param,
        bytes_per_param_fp32_grad=fp32.bytes_per_param,
        ub_bytes=max(outcome.run.ub_peak for _, outcome in outcomes),
        mutants=len(compiled) - len(proven),
        mutants_caught=sum(verdict.reason is not None for verdict in compiled),
        mutants_equivalent=len(proven),
        mutants_not_compiling=len(verdicts) - len(compiled),
        self_test_verdicts=self_test.verdicts,
        self_test_wrong=self_test.wrong,
    )


def print_report(
    figures: Figures, outcomes: list[tuple[str, Outcome]], verdicts: list[mutation.Verdict]
) -> None:
    """The figures, then every failure, survivor and proof."""
    for name, value in dataclasses.asdict(figures).items():
        print(f"{name:28} {value}")
    for case, outcome in outcomes:
        if outcome.errors:
            print(f"FAILED {case}: {outcome.errors[0]}")
    for verdict in verdicts:
        if verdict.reason is None:
            proof = mutation.proof_of(verdict.mutant)
            print(f"{f'equivalent ({proof})' if proof else 'SURVIVED'} {verdict.mutant.site}")


def main() -> int:
    """Run the check; 0 when everything holds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")
    parser.add_argument("--quick", action="store_true", help="fewer sizes, one mutant of each rule")
    parser.add_argument("--jobs", type=int, default=2, help="compilers and mutants at a time (default: 2)")
    options = parser.parse_args()
    if compiler() is None:
        print("check_ascendc.py: error: no g++ in PATH: install a C++17 compiler", file=sys.stderr)
        return 2
    sizes, cores = (SIZES[::4], (1, 48)) if options.quick else (SIZES, CORES)
    with tempfile.TemporaryDirectory(prefix="check-ascendc-") as name:
        folder = Path(name)
        tiling = TilingLibrary(folder)
        kernels = build_variants(folder, "kernels", [*ADAM_VARIANTS, *STATS_VARIANTS, TOTAL])
        checker = Checker(Library(kernels), tiling)
        outcomes = run_numbers(checker, sizes, cores)
        verdicts = run_mutants(folder, tiling, options.quick, options.jobs)
        figures = summarise(checker, outcomes, verdicts, run_self_test(folder))
    if options.json:
        print(json.dumps(dataclasses.asdict(figures)))
    else:
        print_report(figures, outcomes, verdicts)
    return 0 if figures.holds else 1


if __name__ == "__main__":
    sys.exit(main())
