"""Mutants of the kernel sources: does the emulation notice what it claims to check?

Mutants are made mechanically, by rules over lines, at every site where a rule applies. A mutant is caught
when some case fails: a wrong bit, a broken rule, a hang, bytes that do not add up, transfers that no longer
overlap. One that survives has to stand in `EQUIVALENT`, with the proof that no input can tell it from the
original.
"""

import multiprocessing
import re
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cases import STATS_TILE, AdamCase, Checker, StatsCase
from emulated import (
    ADAM_KERNELS,
    FLAGS,
    STATS_KERNELS,
    TOTAL,
    Library,
    Variant,
    adam_variant,
    compile_command,
    inline_header,
    stats_variant,
    translation_unit,
)
from tiling import TilingLibrary

TIMEOUT_S = 60
CHUNK = 24
# Warnings about mutated code are of no interest.
MUTANT_FLAGS = (*(flag for flag in FLAGS if not flag.startswith("-W")), "-w")


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    file: str
    line: int
    rule: str
    before: str
    after: str
    text: str
    """The whole mutated source."""

    @property
    def site(self) -> str:
        after = self.after.strip() or "(nothing)"
        return f"{self.file}:{self.line} [{self.rule}] {self.before.strip()}  ->  {after}"


@dataclass(frozen=True)
class Verdict:
    """Why a mutant was caught: "compiler" (it never ran), a failure, or None for a survivor."""

    mutant: Mutant
    reason: str | None


Rule = Callable[[str], Iterator[str]]


def _drop(pattern: str) -> Rule:
    """The statement of a line disappears."""

    def apply(line: str) -> Iterator[str]:
        if re.search(pattern, line):
            yield re.match(r"\s*", line).group() + ";"

    return apply


def _replace(*pairs: tuple[str, str]) -> Rule:
    """Each match of a pattern, one at a time, is replaced."""

    def apply(line: str) -> Iterator[str]:
        for pattern, replacement in pairs:
            for match in re.finditer(pattern, line):
                changed = line[: match.start()] + match.expand(replacement) + line[match.end() :]
                if changed != line:
                    yield changed

    return apply


def _swapped_arguments(line: str) -> Iterator[str]:
    """Neighbours in the list of addresses change places."""
    head, start, rest = line.partition("kernel.Init({")
    if start:
        names = [name.strip() for name in rest.rstrip(",").split(",")]
        for i in range(len(names) - 1):
            swapped = [*names[:i], names[i + 1], names[i], *names[i + 2 :]]
            yield f"{head}{start}{', '.join(swapped)},"


RULES: dict[str, Rule] = {
    "arguments swapped": _swapped_arguments,
    "barrier dropped": _drop(r"PipeBarrier<"),
    "barrier of another pipe": _replace((r"PipeBarrier<PIPE_V>", "PipeBarrier<PIPE_MTE2>")),
    "event not set": _drop(r"\bSetFlag<"),
    "event not awaited": _drop(r"\bWaitFlag<"),
    "another event": _replace(
        (r"HardEvent::MTE2_S\b", "HardEvent::MTE2_V"),
        (r"HardEvent::S_MTE3\b", "HardEvent::V_MTE3"),
        (r"HardEvent::V_MTE3\b", "HardEvent::MTE3_V"),
    ),
    "not queued": _drop(r"\.(template )?EnQue\b"),
    "not freed": _drop(r"\.FreeTensor\("),
    "not dequeued": _replace((r"\.template DeQue<.*?(\w+)>\(\)", r".template AllocTensor<\1>()")),
    "other queue positions": _replace(
        (r"TPosition::GM, AscendC::TPosition::VECIN,", "TPosition::VECIN, AscendC::TPosition::VECOUT,"),
        (r"TPosition::VECOUT, AscendC::TPosition::GM,", "TPosition::VECIN, AscendC::TPosition::VECOUT,"),
    ),
    "one buffer": _replace((r"kBuffers, ", "1, ")),
    "nine buffers": _replace((r"kBuffers, ", "9, ")),
    "smaller buffer": _replace((r"(InitBuffer\(.*)\);", r"\1 - 32);"), (r"(InitBuffer\(.*)\);", r"\1 / 2);")),
    "larger buffer": _replace((r"(InitBuffer\(.*)\);", r"\1 * 2);")),
    "no buffer": _drop(r"InitBuffer\("),
    "constant": _replace(
        (r"(constexpr \w+ k\w+ = )(\d+);", r"\1 \2 / 2;"),
        (r"(constexpr \w+ k\w+ = )(\d+);", r"\1 \2 + 1;"),
        (r"(constexpr \w+ k\w+ = \w+) \+ 8;", r"\1 + 1;"),
        (r"(constexpr \w+ k\w+ = \w+) \+ 8;", r"\1;"),
    ),
    "count": _replace(
        (r", count\);", ", count - 1);"),
        (r", count\);", ", count + 1);"),
        (r", count\);", ", tile_);"),
        (r"\(count \* sizeof", "((count + 1) * sizeof"),
        (r"\(count \* sizeof", "((count - 1) * sizeof"),
        (r"sizeof\(float\), 0, 0, 0\}", "2 * sizeof(float), 0, 0, 0}"),
    ),
    "tail": _replace(
        (r"left < (\S+) \? \S+ : (\S+);", r"\2;"),
        (r"left < (\S+) \?", r"left > \1 ?"),
        (r"left < (\S+) \?", r"left <= \1 ?"),
        (r"count < (\S+)\)", r"count > \1)"),
        (r"count < (\S+)\)", r"count + 1 < \1)"),
    ),
    "loop": _replace(
        (r"(for \(.*; \w+) < (.*;)", r"\1 <= \2"),
        (r"(for \(\w+ \w+ = )0;", r"\1 1;"),
        (r"(for \(.*) \+= (\w+)\)", r"\1 += 2 * \2)"),
        (r"\+\+row", "row += 2"),
    ),
    "split": _replace(
        (r"start < tiling\.length", "start <= tiling.length"),
        (r"tiling\.length - start", "tiling.length"),
        (r"tiling\.perCore \* ", "(tiling.perCore + 1) * "),
        (r" \+ start\)", ")"),
        (r"(from|to|x_)\[start\]", r"\1[0]"),
        (r"\[(own|cores_) \* kGradStatsRowItems\]", r"[\1]"),
        (r"own \+ 1 ==", "own =="),
        (r"cores_ < kGradStatsRows\)", "cores_ <= kGradStatsRows)"),
        (r"kGradStatsRows - cores_", "kGradStatsRows"),
        (r"\[kGradStatsRowItems\]", "[0]"),
    ),
    "padding": _replace(
        (r"\{false, 0, 0,", "{true, 0, 1,"),
        (r"\{false, 0, 0,", "{true, 1, 0,"),
        (r"\{false, 0, 0,", "{true, 0, 0,"),
        (r"Duplicate\((\w+), 0\.0f", r"Duplicate(\1, 1.0f"),
    ),
    "padding dropped": _drop(r"Duplicate\("),
    "rounding": _replace(
        *(
            (r"RoundMode::CAST_RINT", f"RoundMode::CAST_{mode}")
            for mode in ("FLOOR", "CEIL", "ROUND", "TRUNC")
        ),
        (r"RoundMode::CAST_NONE", "RoundMode::CAST_RINT"),
    ),
    "instruction dropped": _drop(r"AscendC::(Muls|Mul|Add|Adds|Sub|Div|Sqrt|Cast|WholeReduceSum)\("),
    "another instruction": _replace(
        (r"AscendC::Add\(", "AscendC::Sub("),
        (r"AscendC::Sub\(", "AscendC::Add("),
        (r"AscendC::Div\(", "AscendC::Mul("),
        (r"AscendC::Mul\(", "AscendC::Add("),
        (r"AscendC::Muls\(", "AscendC::Adds("),
        (r"AscendC::Adds\(", "AscendC::Muls("),
    ),
    "operands": _replace(
        (r"(Div|Sub)\((\w+), (\w+), (\w+),", r"\1(\2, \4, \3,"),
        (r"(Muls?|Adds?|Sqrt)\(\w+, (\w+), ", r"\1(p, \2, "),
    ),
    "scalar": _replace(
        (r"GetValue\((\d+)\)", r"GetValue(\1 + 1)"), (r"GetValue\(row \*", "GetValue(1 + row *")
    ),
    "reduction": _replace(
        (r"kLanes, (kRows|kRowSums), 1, 1, kRowBlocks", r"kLanes / 2, \1, 1, 1, kRowBlocks"),
        (r"kLanes, (kRows|kRowSums), 1, 1, kRowBlocks", r"kLanes, \1 - 1, 1, 1, kRowBlocks"),
        (r"kLanes, (kRows|kRowSums), 1, 1, kRowBlocks", r"kLanes, \1, 2, 1, kRowBlocks"),
        (r"kLanes, (kRows|kRowSums), 1, 1, kRowBlocks", r"kLanes, \1, 1, 1, kRowBlocks / 2"),
        (r"kRowSums, 1, 1, 1,", "1, 1, 1, 1,"),
        (r"sums\[(kTileSum|kSecondLevel)\]", "sums"),
    ),
    "decision": _replace(
        (r"!\(local\.GetValue\(9\) == 0\.0f\)", "local.GetValue(9) > 0.0f"),
        (r"!\(local\.GetValue\(9\) == 0\.0f\)", "local.GetValue(9) == 1.0f"),
        (r"!\(local\.GetValue\(9\) == 0\.0f\)", "false"),
        (r"if \(skip_\)", "if (!skip_)"),
        (r"GetBlockIdx\(\) == 0", "GetBlockIdx() != 0"),
        (r"AscendC::GetBlockIdx\(\) == 0", "true"),
        (r"skip_ \? 0\.0f : 1\.0f", "skip_ ? 1.0f : 0.0f"),
    ),
    "address": _replace(
        (r"at\.param\)", "at.expAvg)"),
        (r"at\.expAvg\)", "at.expAvgSq)"),
        (r"at\.expAvgSq\)", "at.param)"),
        (r"at\.paramOut\)", "at.expAvgOut)"),
        (r"at\.expAvgOut\)", "at.expAvgSqOut)"),
        (r"at\.expAvgSqOut\)", "at.paramOut)"),
        (r"at\.grad\)", "at.param)"),
        (r"at\.low\)", "at.paramOut)"),
    ),
}

_LEFT_EQUAL = "Where both sides are equal, both branches give the same value."
_NOTHING_LEFT = "At start == length the difference is 0, as in the other branch."
_NO_PADDING = "Padding of no elements on either side: the same transfer."
# (file, rule, part of the line after the change) -> why no input can tell the difference.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("fused_adam_w.h", "tail", "left <= tiling.perCore ?"): _LEFT_EQUAL,
    ("fused_adam_w.h", "tail", "left <= tile_ ?"): _LEFT_EQUAL,
    ("fused_adam_w.h", "split", "start <= tiling.length ?"): _NOTHING_LEFT,
    ("fused_adam_w.h", "padding", "{true, 0, 0, {}}"): _NO_PADDING,
    ("grad_stats.cpp", "tail", "left <= tiling.perCore ?"): _LEFT_EQUAL,
    ("grad_stats.cpp", "tail", "left <= kGradStatsTile ?"): _LEFT_EQUAL,
    ("grad_stats.cpp", "split", "start <= tiling.length ?"): _NOTHING_LEFT,
    ("grad_stats.cpp", "padding", "{true, 0, 0, {}}"): _NO_PADDING,
    ("grad_stats.cpp", "constant", "kSumItems = kTileSum + 1"): (
        "A buffer is rounded up to 32 bytes: 137 and 144 floats are the same 576 bytes."
    ),
}


def proof_of(mutant: Mutant) -> str | None:
    """Why a mutant is equivalent to the original, None when it is not known to be."""
    for (file, rule, part), proof in EQUIVALENT.items():
        if mutant.file == file and mutant.rule == rule and part in mutant.after:
            return proof
    return None


def mutants_of(folder: Path, file: str, into: str) -> Iterator[Mutant]:
    """Mutants of `file`; `into` is the entry source with it: itself, or the one that includes it."""
    lines = (folder / file).read_text(encoding="utf-8").splitlines()
    entry = (folder / into).read_text(encoding="utf-8")
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith(("//", "#")):
            continue
        for name, rule in RULES.items():
            for changed in dict.fromkeys(rule(line)):
                mutated = "\n".join([*lines[: number - 1], changed, *lines[number:]]) + "\n"
                yield Mutant(
                    file, number, name, line, changed, _assembled(entry, mutated, file == into, folder)
                )


def _assembled(entry: str, mutated: str, is_entry: bool, folder: Path) -> str:
    if is_entry:
        return inline_header(mutated, folder)
    body = re.sub(r"^#ifndef (\w+)\n#define \1\n", "", mutated, count=1, flags=re.MULTILINE)
    return re.sub(r'#include "fused_adam_w\.h"\n', lambda _: body.removesuffix("#endif\n"), entry)


@dataclass(frozen=True)
class Target:
    """A source under mutation, the binaries it is tried in, and the cases that have to notice."""

    folder: Path
    file: str
    entry: str
    variants: tuple[Variant, ...]


TARGETS = (
    Target(
        ADAM_KERNELS,
        "fused_adam_w.h",
        "fused_adam_w.cpp",
        (adam_variant("float16", "float16"), adam_variant("float32", "bfloat16")),
    ),
    Target(ADAM_KERNELS, "fused_adam_w.cpp", "fused_adam_w.cpp", (adam_variant("bfloat16", "bfloat16"),)),
    Target(
        ADAM_KERNELS, "fused_adam_w_master.cpp", "fused_adam_w_master.cpp", (adam_variant("float16", None),)
    ),
    Target(
        STATS_KERNELS,
        "grad_stats.cpp",
        "grad_stats.cpp",
        (stats_variant("float32"), stats_variant("float16")),
    ),
    Target(STATS_KERNELS, "grad_stats_total.cpp", "grad_stats_total.cpp", (TOTAL,)),
)


def one_of_each_rule() -> list[tuple[Target, Mutant]]:
    """The first mutant of every rule that is not known to be equivalent."""
    first: dict[str, tuple[Target, Mutant]] = {}
    for target, mutant in all_mutants():
        if proof_of(mutant) is None:
            first.setdefault(mutant.rule, (target, mutant))
    return list(first.values())


def all_mutants() -> list[tuple[Target, Mutant]]:
    """Every mutant of every kernel source."""
    return [
        (target, mutant)
        for target in TARGETS
        for mutant in mutants_of(target.folder, target.file, target.entry)
    ]


def find_failure(checker: Checker, variant: Variant, kernel: str) -> str | None:
    """The first failure among the cases for a binary, None when all hold."""
    for outcome in _outcomes(checker, variant, kernel):
        if outcome.errors:
            return outcome.errors[0]
    return None


def _outcomes(checker: Checker, variant: Variant, kernel: str) -> Iterator:
    if variant.entry == "grad_stats_total":
        rng = np.random.default_rng(0)
        yield checker.total(rng.standard_normal((64, 8)).astype(np.float32), kernel)
        return
    dtypes = list(variant.dtypes.values())
    if variant.entry == "grad_stats":
        for case, overlap in _stats_trials(dtypes[0]):
            yield checker.stats(case, kernel, overlap)
        return
    for case, overlap in _adam_trials(dtypes[0], dtypes[1] if len(dtypes) > 1 else None):
        yield checker.adam(case, kernel, overlap)


def _adam_trials(grad: str, low: str | None) -> Iterator[tuple[AdamCase, float]]:
    yield AdamCase(grad, low, 257, 1, kind="special", offset=1), np.inf
    yield AdamCase(grad, low, 0, 4), np.inf
    yield AdamCase(grad, low, 4864, 1), np.inf
    yield AdamCase(grad, low, 4867, 1, kind="ties"), np.inf
    for found in (np.nan, 1.0, -3.0):
        yield AdamCase(grad, low, 700, 2, found_inf=found), np.inf
    yield AdamCase(grad, low, 3 * 14000 + 11, 3, kind="special", offset=3), np.inf
    yield AdamCase(grad, low, 24 * 4864, 1), 1.2


def _stats_trials(dtype: str) -> Iterator[tuple[StatsCase, float]]:
    yield StatsCase(dtype, 257, 1, offset=1), np.inf
    yield StatsCase(dtype, 0, 4), np.inf
    yield StatsCase(dtype, STATS_TILE - 1, 1), np.inf
    yield StatsCase(dtype, 5 * STATS_TILE + 3, 3, offset=3), np.inf
    yield StatsCase(dtype, 2 * STATS_TILE, 1, kind="special"), np.inf
    yield StatsCase(dtype, 63 * STATS_TILE + 9, 64), np.inf
    yield StatsCase(dtype, 24 * STATS_TILE, 1), 1.15


def judge(
    mutants: Sequence[tuple[Target, Mutant]], folder: Path, tiling: TilingLibrary, jobs: int = 2
) -> list[Verdict]:
    """Compile and try mutants, `jobs` at a time."""
    chunks = [list(enumerate(mutants))[start : start + CHUNK] for start in range(0, len(mutants), CHUNK)]
    with ThreadPoolExecutor(jobs) as pool:
        judged = pool.map(
            lambda job: _judge_chunk(job[1], folder, f"mutants_{job[0]}", tiling), enumerate(chunks)
        )
        return [verdict for verdicts in judged for verdict in verdicts]


def _judge_chunk(
    chunk: Sequence[tuple[int, tuple[Target, Mutant]]], folder: Path, name: str, tiling: TilingLibrary
) -> list[Verdict]:
    library, stillborn = _compile(chunk, folder, name)
    verdicts = []
    for number, (target, mutant) in chunk:
        if number in stillborn:
            verdicts.append(Verdict(mutant, "compiler"))
            continue
        reason = next(
            (
                found
                for variant in target.variants
                if (found := _try_in_child(library, tiling, variant, _kernel_name(number, variant)))
            ),
            None,
        )
        verdicts.append(Verdict(mutant, reason))
    return verdicts


def _kernel_name(number: int, variant: Variant) -> str:
    return f"{number}:{variant.name}"


def _compile(
    chunk: Sequence[tuple[int, tuple[Target, Mutant]]], folder: Path, name: str
) -> tuple[Path | None, set[int]]:
    """The library of the mutants that compile, and the numbers of those that do not."""
    source, library, stillborn = folder / f"{name}.cc", folder / f"{name}.so", set()
    while len(stillborn) < len(chunk):
        kernels = [
            (_kernel_name(number, variant), variant, f'\n#line 1 "mutant_{number}_"\n{mutant.text}')
            for number, (target, mutant) in chunk
            if number not in stillborn
            for variant in target.variants
        ]
        source.write_text(translation_unit(kernels), encoding="utf-8")
        done = subprocess.run(
            compile_command(source, library, MUTANT_FLAGS), capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return library, stillborn
        blamed = {int(number) for number in re.findall(r"mutant_(\d+)_", done.stderr)}
        if not blamed - stillborn:
            raise RuntimeError(f"compiling {source} failed:\n{done.stderr[:2000]}")
        stillborn |= blamed
    return None, stillborn


def _try_in_child(library: Path, tiling: TilingLibrary, variant: Variant, kernel: str) -> str | None:
    """Run the cases in a child process: a mutant may crash or hang."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def work() -> None:
        sender.send(find_failure(Checker(Library(library), tiling), variant, kernel))

    child = context.Process(target=work)
    child.start()
    sender.close()
    try:
        if not receiver.poll(TIMEOUT_S):
            child.kill()
            return "runs forever"
        return receiver.recv()
    except EOFError:
        return "crashed"
    finally:
        child.join()
