"""From a run config to what the planner asks about: the model's shape, its layout, its memory model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ms_zero.config.auto_parallel import COMPILED
from ms_zero.errors import UserError
from ms_zero.hardware import load_device
from ms_zero.pipeline.balance import balance
from ms_zero.pipeline.schedule import Schedule, is_file, read_csv
from ms_zero.plan.activations import kernels_of
from ms_zero.plan.flops import head_flops, layer_flops
from ms_zero.plan.layout import Layout, Precision, split_layers
from ms_zero.plan.memory import RESERVE, Calibration, MemoryModel
from ms_zero.plan.shapes import ModelShape, from_config
from ms_zero.plan.time import TimeModel

if TYPE_CHECKING:
    from ms_zero.config import PrecisionConfig, RunConfig

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def layout_of(config: RunConfig) -> Layout:
    """The layout that a run config describes.

    Raises:
        UserError: the schedule is one from a file, and it cannot be read; or one that only MindSpore has,
            for which the planner has no formulas.
    """
    if config.parallel.pp > 1 and config.parallel.schedule in COMPILED:
        raise UserError(
            f"parallel.schedule: the planner has no formulas for {config.parallel.schedule}: plan with "
            "another, such as parallel.schedule=1f1b"
        )
    layout = _layout(config)
    is_default = config.parallel.stage_balance == "parameters" and not config.parallel.stage_layers
    if config.parallel.pp == 1 or is_default:
        return layout
    return layout.replace(chunk_layers=stage_layers(config, layout.chunks))


def stage_layers(config: RunConfig, num_stages: int) -> tuple[int, ...]:
    """Blocks of each stage of a run's pipeline, in model order."""
    parallel, shape = config.parallel, from_config(config.model)
    if parallel.stage_layers:
        return parallel.stage_layers
    if parallel.stage_balance == "parameters":
        return split_layers(shape, num_stages)
    name, dtype = config.hardware.device, config.precision.compute
    device = None if name is None else load_device(name)
    if device is None or dtype not in device.peak_flops or device.memory_bandwidth is None:
        return _layers_by_arithmetic(shape, num_stages, config.data.seq_len)
    layout = _layout(config).replace(schedule="1f1b", virtual_stages=1, pp=num_stages, order=None)
    return TimeModel(shape, device, dtype).balanced_layers(layout)


def placed_layout(config: RunConfig) -> Layout:
    """As :func:`layout_of` for bytes sent and held: orders that only MindSpore has are known by their places.

    zb-v puts chunks on the ranks forth and back; seqpipe sends in parts what 1f1b sends.
    """
    parallel = config.parallel
    if parallel.pp == 1 or parallel.schedule not in COMPILED:
        return layout_of(config)
    layout = _layout(config).replace(schedule="1f1b")
    if parallel.schedule == "zb-v":
        forth = tuple(range(parallel.pp))
        places = Schedule("zb-v", config.train.accumulation_steps, forth + forth[::-1], ((),) * parallel.pp)
        layout = layout.replace(order=places)
    return layout.replace(chunk_layers=stage_layers(config, layout.chunks))


def _layers_by_arithmetic(shape: ModelShape, num_stages: int, seq_len: int) -> tuple[int, ...]:
    """About equally many floating-point operations a stage."""
    costs = [layer_flops(layer, shape.hidden_size, seq_len).total for layer in shape.layers()]
    return tuple(len(part) for part in balance(costs, num_stages, last=head_flops(shape)))


def _layout(config: RunConfig) -> Layout:
    parallel, offload, memory = config.parallel, config.offload, config.memory
    precision = precision_of(config.precision, config.hardware.target)
    _, flash_attention = _kernels(config)
    layout = Layout(
        seq_len=config.data.seq_len,
        pp=parallel.pp,
        schedule=parallel.schedule,
        order=read_csv(Path(parallel.schedule)) if parallel.pp > 1 and is_file(parallel.schedule) else None,
        virtual_stages=parallel.virtual_stages if parallel.schedule == "interleaved" else 1,
        tp=parallel.tp,
        sequence_parallel=parallel.tp > 1 and parallel.sequence_parallel,
        cp=parallel.cp,
        context=parallel.context,
        ep=parallel.ep,
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        zero_stage=parallel.zero_stage,
        micro_batch_size=config.train.micro_batch_size,
        microbatches=config.train.accumulation_steps,
        recompute=memory.recompute,
        recompute_every=memory.recompute_every if memory.recompute == "every_k" else 1,
        recompute_budget=0.0 if memory.budget_gb is None else memory.budget_gb * 1e9,
        flash_attention=flash_attention,
        reshard_after_forward=parallel.reshard_after_forward,
        prefetch=parallel.prefetch,
        unit_elements=parallel.wrap_elements if parallel.wrap == "size" else None,
        optimizer_offload=0.0 if offload.optimizer == "none" else offload.fraction,
        offload_to="nvme" if offload.optimizer == "nvme" else "cpu",
        parameter_offload=offload.params == "cpu",
        activation_offload=memory.activations in ("host", "int8_host"),
        activation_bits=8 if memory.activations in ("int8", "int8_host") else None,
        dropout=config.model.dropout > 0,
        bucket_bytes=parallel.bucket_mb * 2**20,
        sync_each_microbatch=parallel.sync_each_microbatch,
        precision=replace(precision, moments=0) if config.optim.kind == "sgd" else precision,
    )
    return _compiled(layout) if config.engine.kind == "graph" else layout


def _compiled(layout: Layout) -> Layout:
    """The layout in the graph engine: fp32 weights are their own masters, and hsdp stands for ZeRO stages.

    Weights travel in the width of the computation, but not to a single microbatch in stages 1 and 2.
    """
    precision, level = layout.precision, layout.zero_stage
    casts_first = level == 3 or layout.microbatches > 1
    precision = replace(
        precision,
        weight=4,
        gathered=precision.activation if casts_first else 4,
        gradient=4,
        master=0,
        reduce=4,
    )
    return layout.replace(engine="graph", hsdp_level=level or None, precision=precision)


def precision_of(config: PrecisionConfig, target: str) -> Precision:
    """Bytes per element of a precision section, with Adam's two fp32 moments.

    A CPU computes bf16 with fp32 tensors.
    """
    emulated = target == "CPU" and config.compute == "bf16"
    keeps_master = config.master == "fp32" and config.param != "fp32"
    return Precision(
        weight=_BYTES[config.param],
        gathered=_BYTES[config.param],
        gradient=_BYTES[config.accumulate],
        master=_BYTES["fp32"] if keeps_master else 0,
        activation=_BYTES["fp32" if emulated else config.compute],
        reduce=_BYTES[config.reduce],
        rounded=emulated,
    )


def memory_model_of(config: RunConfig, name: str, calibration: Calibration | None = None) -> MemoryModel:
    """The memory model of a run config; a CPU has no runtime reserve of its own."""
    kernels, _ = _kernels(config)
    reserve = 0.0 if config.hardware.target == "CPU" else RESERVE
    shape = from_config(config.model, name)
    return MemoryModel(shape, kernels=kernels, reserve=reserve, calibration=calibration)


def _kernels(config: RunConfig) -> tuple[str, bool]:
    """The kernels of a run, and whether their attention stores no probabilities."""
    target = config.hardware.target
    if target == "CPU":
        return config.hardware.kernels, config.hardware.kernels == "native"
    return kernels_of(target, precision_of(config.precision, target).activation)
