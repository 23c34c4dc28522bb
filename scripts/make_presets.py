"""Write the run presets of named sizes: the founding table, and what the planner recommends instead.

    python scripts/make_presets.py           writes configs/runs/NAME.yaml and NAME-planned.yaml
    python scripts/make_presets.py --check   status 1 when a file differs from what it would write
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ms_zero.hardware import load_device
from ms_zero.plan.explain import describe
from ms_zero.plan.layout import Layout
from ms_zero.plan.memory import MemoryModel, explain_shortage
from ms_zero.plan.models import load_model
from ms_zero.plan.planner import Plan, Request, capacity_of, make_plan, precision_of
from ms_zero.plan.runfile import layout_keys, section_lines, split_keys
from ms_zero.plan.time import TimeModel

CLUSTER = "ascend-910b"
RUNS = Path(__file__).resolve().parent.parent / "configs" / "runs"


@dataclass(frozen=True, kw_only=True)
class Founding:
    """One row of the founding table, and the training run that it stands in.

    Args:
        name: Of the model and of the run.
        origin: Where batch, rate and length are from.
        zero_stage: As in the table.
        pp: As in the table.
        micro_batch_size: As in the table.
        dtype: As in the table.
        seq_len: Tokens of a sample.
        global_batch_size: Samples of a step.
        tokens: Of the whole run.
        lr: Peak learning rate; it ends at a tenth.
        warmup_steps: Of the rate.

    """

    name: str
    origin: str
    zero_stage: int
    pp: int
    micro_batch_size: int
    dtype: str
    seq_len: int
    global_batch_size: int
    tokens: float
    lr: float
    warmup_steps: int


_GPT3 = "batch, rate and length: GPT-3 (Brown et al. 2020, tables 2.1 and B.1)"
_LLAMA2 = "batch, rate and length: Llama 2 (Touvron et al. 2023, section 2.2)"
TABLE = (
    Founding(
        name="gpt3-1.5b",
        origin=_GPT3,
        zero_stage=1,
        pp=1,
        micro_batch_size=16,
        dtype="fp16",
        seq_len=2048,
        global_batch_size=512,
        tokens=300e9,
        lr=2e-4,
        warmup_steps=358,
    ),
    Founding(
        name="gpt3-13b",
        origin=_GPT3,
        zero_stage=2,
        pp=2,
        micro_batch_size=8,
        dtype="fp16",
        seq_len=2048,
        global_batch_size=1024,
        tokens=300e9,
        lr=1e-4,
        warmup_steps=179,
    ),
    Founding(
        name="gpt3-175b",
        origin=_GPT3,
        zero_stage=3,
        pp=8,
        micro_batch_size=4,
        dtype="fp16",
        seq_len=2048,
        global_batch_size=1536,
        tokens=300e9,
        lr=6e-5,
        warmup_steps=119,
    ),
    Founding(
        name="llama-70b",
        origin=_LLAMA2,
        zero_stage=2,
        pp=4,
        micro_batch_size=4,
        dtype="bf16",
        seq_len=4096,
        global_batch_size=1024,
        tokens=2e12,
        lr=1.5e-4,
        warmup_steps=2000,
    ),
)


def main() -> int:
    """Write or check the files; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="only compare")
    arguments = parser.parse_args()
    stale = []
    for name, text in presets():
        path = RUNS / f"{name}.yaml"
        if arguments.check and (not path.is_file() or path.read_text() != text):
            stale.append(path.name)
        elif not arguments.check:
            path.write_text(text)
    if stale:
        print(f"stale: {', '.join(stale)}; run scripts/make_presets.py", file=sys.stderr)
    return 1 if stale else 0


def presets() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every preset."""
    for row in TABLE:
        layout = founding_layout(row)
        plan = make_plan(
            Request(
                model=row.name,
                cluster=CLUSTER,
                devices=layout.devices,
                seq_len=row.seq_len,
                tokens=row.tokens,
                global_batch_size=row.global_batch_size,
                dtype=row.dtype,
            )
        )
        yield row.name, founding_text(row, layout)
        yield f"{row.name}-planned", planned_text(row, plan, layout)


def founding_layout(row: Founding) -> Layout:
    """The row on the fewest cards on which it fits when every block is recomputed."""
    memory = MemoryModel(load_model(row.name))
    capacity = capacity_of(load_device(CLUSTER)).device
    for cards in (2**power for power in range(13)):
        layout = _layout(row, cards // row.pp) if cards >= row.pp else None
        if layout is not None and memory.peak(layout) <= capacity:
            return layout
    raise SystemExit(f"{row.name} fits on no number of cards")


def founding_text(row: Founding, layout: Layout) -> str:
    """The run file of a row of the table."""
    memory = MemoryModel(load_model(row.name))
    capacity = capacity_of(load_device(CLUSTER)).device
    shortage = explain_shortage(memory.report(layout.replace(recompute="none")), capacity)
    known, missing = split_keys(layout_keys(layout, row.dtype))
    lines = [
        f"# {row.name} with the layout of the founding table: ZeRO-{row.zero_stage}, pp {row.pp}, micro "
        f"batch {row.micro_batch_size}, {row.dtype}.",
        f"# {row.origin[0].upper()}{row.origin[1:]}.",
        f"# Planned for {layout.devices} x Ascend 910B, the fewest that it fits on with full recompute: "
        f"{memory.peak(layout) / 1e9:.0f} of {capacity / 1e9:.0f} GB.",
        f"# Without recompute: {shortage}." if shortage else "# It fits without recompute as well.",
        *_not_here(missing),
        f"include: [models/{row.name}]",
        "",
        "data:",
        "  source: megatron",
        "  files: [data/train]                     # name your own token files",
        "  tokenizer: none",
        f"  seq_len: {row.seq_len}",
        "",
        "train:",
        f"  steps: {round(row.tokens / (row.global_batch_size * row.seq_len))}",
        f"  global_batch_size: {row.global_batch_size}",
        f"  micro_batch_size: {row.micro_batch_size}",
        "  log_interval: 10",
        f"  output_dir: runs/{row.name}",
        "",
        "optim:",
        f"  lr: {row.lr:g}",
        f"  min_lr: {row.lr / 10:g}",
        f"  warmup_steps: {row.warmup_steps}",
        "  schedule: cosine",
        *section_lines(known),
        "",
        "checkpoint:",
        "  interval: 1000",
        "  keep: 3",
        "",
        "hardware:",
        "  target: Ascend",
        f"  device: {CLUSTER}",
    ]
    return "\n".join(lines) + "\n"


def planned_text(row: Founding, plan: Plan, founding: Layout) -> str:
    """The run file of the planner's layout, on top of the founding one."""
    choice = plan.choice
    assert choice is not None
    known, missing = split_keys(layout_keys(choice.layout, row.dtype))
    before = TimeModel(plan.shape, plan.device, row.dtype).simulate(founding).tokens_per_second_per_device
    after = choice.time.tokens_per_second_per_device
    lines = [
        f"# What the planner recommends on {founding.devices} x Ascend 910B instead of runs/{row.name}:",
        f"# {describe(choice.layout)}.",
        f"# Predicted: {after:.0f} tokens/s a card instead of {before:.0f} (x {after / before:.2f}), "
        f"{choice.memory / 1e9:.0f} of {plan.capacity.device / 1e9:.0f} GB.",
        *_not_here(missing),
        f"include: [runs/{row.name}]",
        "",
        "train:",
        f"  micro_batch_size: {choice.layout.micro_batch_size}",
        f"  output_dir: runs/{row.name}-planned",
        *section_lines(known),
    ]
    return "\n".join(lines) + "\n"


def _not_here(missing: list[str]) -> list[str]:
    return [f"# Not in this version, add it when it is: {line}" for line in missing]


def _layout(row: Founding, shards: int) -> Layout | None:
    share = row.micro_batch_size * shards
    if row.global_batch_size % share:
        return None
    return Layout(
        seq_len=row.seq_len,
        pp=row.pp,
        dp_shard=shards,
        zero_stage=row.zero_stage,
        micro_batch_size=row.micro_batch_size,
        microbatches=row.global_batch_size // share,
        recompute="full",
        precision=precision_of(row.dtype),
    )


if __name__ == "__main__":
    sys.exit(main())
