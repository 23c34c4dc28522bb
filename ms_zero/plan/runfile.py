"""Writes a run file for a layout, and says what of it this version cannot run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ms_zero.config import check_config
from ms_zero.config.render import yaml_value
from ms_zero.config.schema import SECTIONS, keys_of
from ms_zero.errors import UserError
from ms_zero.plan.layout import Layout
from ms_zero.plan.planner import Plan

Wanted = tuple[str, Any, Any]
"""(`section.key`, value, the value that needs no key)."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A run file and its limits.

    Args:
        text: YAML.
        missing: what the layout asks for and no key of this version says.

    """

    text: str
    missing: tuple[str, ...]


def run_file(plan: Plan, output_dir: str) -> RunFile:
    """Put the recommended layout of a plan into a run file."""
    assert plan.choice is not None
    decided = layout_keys(plan.choice.layout, plan.request.dtype)
    known, missing = split_keys([*_run_keys(plan, output_dir), *decided])
    known["hardware"] = {"target": plan.device.target, "device": plan.device.name}
    model, problem = _model_line(plan.request.model)
    if problem:
        missing.append(problem)
    text = "\n".join(
        [
            f"# {plan.shape.name} on {plan.space.devices} x {plan.device.name}, as the planner recommends:",
            f"# {plan.choice.time.tokens_per_second_per_device:.0f} tokens/s/device, "
            f"{plan.choice.memory / 1e9:.1f} GB predicted. Name your own data.",
            model,
            *(f"# not in this version: {line}" for line in missing),
            *section_lines(known),
            "",
        ]
    )
    return RunFile(text=text, missing=tuple(missing))


def write_run_file(plan: Plan, path: Path) -> list[str]:
    """Write the run file of a plan; return one line for each thing that this version cannot run of it.

    The file is checked as `ms-zero lint` would. What that refuses is in the answer.

    Raises:
        UserError: nothing fits, the file exists already, or it cannot be written.

    """
    if plan.choice is None:
        raise UserError(f"{path}: not written, because no layout fits")
    written = run_file(plan, output_dir=f"runs/{path.stem}")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(written.text)
    except FileExistsError:
        raise UserError(f"{path}: exists already; name another file or remove it") from None
    except OSError as error:
        raise UserError(f"{path}: cannot write the run file: {error.strerror}") from None
    checked = check_config(path, world_size=plan.space.devices)
    refused = [str(finding) for finding in checked.findings if finding.severity != "warning"]
    return [*(f"no key for {line}" for line in written.missing), *refused]


def split_keys(wanted: Iterable[Wanted]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Split settings into section -> key -> value of this version's keys, and a line for each other."""
    known: dict[str, dict[str, Any]] = {}
    missing = []
    for path, value, standard in wanted:
        section, name = path.split(".")
        if section in SECTIONS and name in keys_of(SECTIONS[section]):
            known.setdefault(section, {})[name] = value
        elif value != standard:
            missing.append(f"{path}: {yaml_value(value)}")
    return known, missing


def layout_keys(layout: Layout, dtype: str) -> Iterator[Wanted]:
    """Everything that a layout decides, but the batch and the sequence length."""
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp"):
        yield f"parallel.{axis}", getattr(layout, axis), 1
    if layout.ep > 1:
        yield "parallel.ep", layout.ep, 1
    if layout.cp > 1:
        yield "parallel.context", layout.context, "ring"
    yield "parallel.zero_stage", layout.zero_stage, 0
    if layout.zero_stage == 3 and not layout.reshard_after_forward:
        yield "parallel.reshard_after_forward", False, True
    if layout.sync_each_microbatch is not None:
        yield "parallel.sync_each_microbatch", layout.sync_each_microbatch, layout.zero_stage >= 2
    if layout.pp > 1:
        yield "parallel.schedule", layout.schedule, "1f1b"
        if layout.schedule == "interleaved":
            yield "parallel.virtual_stages", layout.virtual_stages, 1
        if layout.chunk_layers is not None:
            yield "parallel.stage_layers", list(layout.chunk_layers), None
    if layout.tp > 1:
        yield "parallel.sequence_parallel", layout.sequence_parallel, False
    yield "precision.policy", dtype, "fp32"
    yield from _memory_keys(layout)


def section_lines(known: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """The sections as YAML, an empty line before each."""
    for section, keys in known.items():
        yield ""
        yield f"{section}:"
        yield from (f"  {name}: {yaml_value(value)}" for name, value in keys.items())


def _memory_keys(layout: Layout) -> Iterator[Wanted]:
    yield "memory.recompute", layout.recompute, "none"
    if layout.recompute == "every_k":
        yield "memory.recompute_every", layout.recompute_every, 1
    if layout.recompute == "budget":
        yield "memory.budget_gb", layout.recompute_budget / 1e9, None
    places = ("int8" * (layout.activation_bits is not None), "host" * layout.activation_offload)
    if any(places):
        yield "memory.activations", "_".join(filter(None, places)), "device"
    if layout.optimizer_offload:
        yield "offload.optimizer", layout.offload_to, "none"
        yield "offload.fraction", layout.optimizer_offload, 1.0
    if layout.parameter_offload:
        yield "offload.params", "cpu", "none"


def _run_keys(plan: Plan, output_dir: str) -> Iterator[Wanted]:
    """The batch, the sequence length and how long to train."""
    layout = plan.choice.layout
    steps = max(1, round((plan.request.tokens or 1000 * layout.tokens_per_step) / layout.tokens_per_step))
    yield "data.seq_len", layout.seq_len, None
    yield "train.steps", steps, None
    yield "train.global_batch_size", layout.global_batch_size, None
    yield "train.micro_batch_size", layout.micro_batch_size, None
    yield "train.output_dir", output_dir, None
    if steps <= _DEFAULT_WARMUP:
        yield "optim.warmup_steps", steps // 10, None


def _model_line(model: str) -> tuple[str, str]:
    """The line that brings in the model, and what is wrong with it."""
    if model.endswith((".yaml", ".yml")):
        return f"include: [{yaml_value(str(Path(model).resolve()))}]", ""
    if model.endswith(".json") or Path(model).is_dir():
        return "# model: see the Hugging Face config", f"model: {model} is no run file of ours"
    return f"include: [models/{model.removeprefix('models/')}]", ""


_DEFAULT_WARMUP = 2000
