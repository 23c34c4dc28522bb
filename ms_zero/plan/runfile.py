"""Writes a run file for a layout, and says what of it this version cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ms_zero.config import check_config
from ms_zero.config.schema import SECTIONS, keys_of
from ms_zero.errors import UserError
from ms_zero.hardware import Device
from ms_zero.plan.layout import Layout
from ms_zero.plan.planner import Plan


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
    layout = plan.choice.layout
    known, missing = {}, []
    for section, name, value, default in _wanted(plan, layout, output_dir):
        if section in SECTIONS and name in keys_of(SECTIONS[section]):
            known.setdefault(section, {})[name] = value
        elif value != default:
            missing.append(f"{section}.{name}: {value}")
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
            *_sections(known),
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


def _wanted(plan: Plan, layout: Layout, output_dir: str) -> Iterator[tuple[str, str, Any, Any]]:
    """(section, key, value, value that needs no key) of all that a layout decides."""
    steps = max(1, round((plan.request.tokens or 1000 * layout.tokens_per_step) / layout.tokens_per_step))
    yield "data", "seq_len", layout.seq_len, None
    yield "train", "steps", steps, None
    yield "train", "global_batch_size", layout.global_batch_size, None
    yield "train", "micro_batch_size", layout.micro_batch_size, None
    yield "train", "output_dir", output_dir, None
    if steps <= _DEFAULT_WARMUP:
        yield "optim", "warmup_steps", steps // 10, None
    for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "zero_stage"):
        yield "parallel", axis, getattr(layout, axis), 0 if axis == "zero_stage" else 1
    if layout.pp > 1:
        yield "parallel", "schedule", layout.schedule, "1f1b"
        yield "parallel", "virtual_stages", layout.virtual_stages, 1
    if layout.tp > 1:
        yield "parallel", "sequence_parallel", layout.sequence_parallel, False
    if plan.request.dtype != "fp32":
        yield "precision", "policy", plan.request.dtype, None
    yield from _memory_keys(layout)
    yield from _hardware_keys(plan.device)


def _memory_keys(layout: Layout) -> Iterator[tuple[str, str, Any, Any]]:
    if layout.recompute != "none":
        yield "memory", "recompute", layout.recompute, "none"
        if layout.recompute == "every_k":
            yield "memory", "recompute_every", layout.recompute_every, 1
    if layout.activation_offload:
        yield "memory", "activations", "host", "device"
    if layout.optimizer_offload:
        yield "offload", "optimizer", layout.offload_to, "none"
        yield "offload", "fraction", layout.optimizer_offload, 1.0
    if layout.parameter_offload:
        yield "offload", "params", "cpu", "none"


def _hardware_keys(device: Device) -> Iterator[tuple[str, str, Any, Any]]:
    yield "hardware", "target", device.target, None
    yield "hardware", "device", device.name, None


def _model_line(model: str) -> tuple[str, str]:
    """The line that brings in the model, and what is wrong with it."""
    if model.endswith((".yaml", ".yml")):
        return f"include: [{Path(model).resolve()}]", ""
    if model.endswith(".json") or Path(model).is_dir():
        return "# model: see the Hugging Face config", f"model: {model} is no run file of ours"
    return f"include: [models/{model.removeprefix('models/')}]", ""


def _sections(known: dict[str, dict[str, Any]]) -> Iterator[str]:
    for section, keys in known.items():
        yield ""
        yield f"{section}:"
        yield from (f"  {name}: {_scalar(value)}" for name, value in keys.items())


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


_DEFAULT_WARMUP = 2000
