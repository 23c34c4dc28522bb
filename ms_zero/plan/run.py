"""From a run config to what the planner asks about: the model's shape, its layout, its memory model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ms_zero.plan.activations import kernels_of
from ms_zero.plan.layout import Layout, Precision
from ms_zero.plan.memory import RESERVE, Calibration, MemoryModel
from ms_zero.plan.shapes import from_config

if TYPE_CHECKING:
    from ms_zero.config import PrecisionConfig, RunConfig

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def layout_of(config: RunConfig) -> Layout:
    """The layout that a run config describes."""
    parallel, offload, target = config.parallel, config.offload, config.hardware.target
    precision = precision_of(config.precision, target)
    _, flash_attention = kernels_of(target, precision.activation)
    return Layout(
        seq_len=config.data.seq_len,
        pp=parallel.pp,
        tp=parallel.tp,
        cp=parallel.cp,
        dp_replicate=parallel.dp_replicate,
        dp_shard=parallel.dp_shard,
        zero_stage=parallel.zero_stage,
        micro_batch_size=config.train.micro_batch_size,
        microbatches=config.train.accumulation_steps,
        flash_attention=flash_attention,
        reshard_after_forward=parallel.reshard_after_forward,
        prefetch=parallel.prefetch,
        optimizer_offload=0.0 if offload.optimizer == "none" else offload.fraction,
        offload_to="nvme" if offload.optimizer == "nvme" else "cpu",
        parameter_offload=offload.params == "cpu",
        bucket_bytes=parallel.bucket_mb * 2**20,
        sync_each_microbatch=parallel.sync_each_microbatch,
        precision=replace(precision, moments=0) if config.optim.kind == "sgd" else precision,
    )


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
    target = config.hardware.target
    kernels, _ = kernels_of(target, precision_of(config.precision, target).activation)
    reserve = 0.0 if target == "CPU" else RESERVE
    shape = from_config(config.model, name)
    return MemoryModel(shape, kernels=kernels, reserve=reserve, calibration=calibration)
