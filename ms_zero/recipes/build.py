"""From a run's configuration to an engine: model, parallelism, optimizer."""

import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import mindspore as ms
from mindspore import nn

from ms_zero import models
from ms_zero._compat import device_target
from ms_zero.comm import Communicator, ProcessMesh
from ms_zero.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RunConfig,
)
from ms_zero.data import DocumentResets
from ms_zero.errors import UserError
from ms_zero.memory import apply_recompute, compress_activations, offload_activations
from ms_zero.models.from_config import build_decoder
from ms_zero.models.init import InitRule, init_rules, initial_values
from ms_zero.optim.optimizer import SGD, AdamW, GroupOptions, Optimizer
from ms_zero.parallel import Placements
from ms_zero.pipeline import schedule as schedules
from ms_zero.pipeline.stage import Staged
from ms_zero.plan.run import stage_layers
from ms_zero.plan.saved import Split, block_of, bytes_by_kind
from ms_zero.plan.shapes import from_config
from ms_zero.precision.autocast import apply as autocast
from ms_zero.precision.autocast import fp32_parameters
from ms_zero.precision.policy import DTYPES, Policy
from ms_zero.precision.scaler import DynamicLossScaler, LossScaler, StaticLossScaler, scaling_rule
from ms_zero.recipes.context import Samples, cut_samples
from ms_zero.recipes.eager import EagerEngine
from ms_zero.recipes.expert import Balancer, bias_names, cut_experts, join_sequences
from ms_zero.recipes.pipeline import PipelineEngine, chain_of, split_model
from ms_zero.recipes.tensor import CutModel, cut_model
from ms_zero.zero.api import data_groups
from ms_zero.zero.bucket import ValueSource
from ms_zero.zero.nvme import NvmeStates, check_space, padded_bytes
from ms_zero.zero.sharded import Options, Sharded
from ms_zero.zero.states import HostStates, StateStore
from ms_zero.zero.units import wrap_blocks, wrap_size

# The ranks that see different data and hold the same parameters, and those that see different tokens of it.
DATA_AXES = ("dp_replicate", "dp_shard")
TOKEN_AXES = (*DATA_AXES, "cp")


def build_engine(config: RunConfig, pmesh: ProcessMesh, model: nn.Cell | None = None) -> EagerEngine:
    """Build the model with its initial values, shard its training state and return the engine.

    ``model``: what :func:`build_model` gave for this config, with parameters frozen as wanted; None: all are
    trained.
    """
    model = build_model(config.model) if model is None else model
    values = seeded_values(model, config.train.seed)
    cut = cut_model(model, config.model, pmesh, split_sequence=config.parallel.sequence_parallel)
    cut = replace(cut, placements=cut_experts(model, pmesh, cut.placements))
    samples = cut_samples(model, pmesh, config.parallel.context)
    join_sequences(model, pmesh, config.parallel.context)
    notes = apply_memory(config, model)
    policy = build_policy(config.precision)
    notes += describe_sharding(config, policy)
    if config.parallel.pp > 1:
        return _build_pipeline(config, pmesh, model, cut, samples, values, notes)
    autocast(model, policy, device_target())
    sharded = build_sharded(config, model, policy, pmesh, values, cut.placements)
    states = build_states(config, sharded, pmesh.comm)
    return EagerEngine(
        model,
        sharded,
        build_optimizer(config.optim, sharded, states, config.offload.fraction),
        comm=pmesh.comm,
        group=pmesh.group(*TOKEN_AXES),
        resets=build_resets(config.data),
        seed=config.train.seed,
        notes=notes,
        loss_sum=cut.loss_sum,
        spans_of=cut.spans_of,
        balancer=build_balancer(config, model, sharded, pmesh),
        samples=samples,
    )


def _build_pipeline(
    config: RunConfig,
    pmesh: ProcessMesh,
    model: nn.Cell,
    cut: CutModel,
    samples: Samples,
    values: ValueSource,
    notes: list[str],
) -> PipelineEngine:
    """The engine of a model that is split over stages."""
    policy = build_policy(config.precision)
    schedule, placement = build_pipeline_schedule(config.parallel)
    counts = stage_layers(config, len(placement))
    part = split_model(
        model,
        chain_of(model),
        pmesh,
        placement=placement,
        counts=counts,
        placements=cut.placements,
    )
    autocast(part.cell, policy, device_target())
    sharded = build_sharded(config, part.cell, policy, pmesh, values, part.placements, part.stage_of)
    states = build_states(config, sharded, pmesh.comm)
    return PipelineEngine(
        part,
        sharded,
        build_optimizer(config.optim, sharded, states, config.offload.fraction),
        comm=pmesh.comm,
        group=pmesh.group(*TOKEN_AXES),
        stages=pmesh.group("pp"),
        schedule=schedule,
        resets=build_resets(config.data),
        seed=config.train.seed,
        notes=[*notes, f"pipeline: schedule {config.parallel.schedule}, {part.describe()}"],
        loss_sum=cut.loss_sum,
        spans_of=cut.spans_of,
        balancer=build_balancer(config, part.cell, sharded, pmesh),
        samples=samples,
    )


def build_pipeline_schedule(
    config: ParallelConfig,
) -> tuple[Callable[[int], schedules.Schedule], tuple[int, ...]]:
    """The schedule of a number of microbatches, and the rank of each stage.

    Raises:
        UserError: a schedule from a file is not valid, or for other numbers than it is asked for.
    """
    name, ranks, num_virtual = config.schedule, config.pp, config.virtual_stages
    if not schedules.is_file(name):
        placement = tuple(stage % ranks for stage in range(ranks * num_virtual))
        return lambda count: schedules.build(name, ranks, count, num_virtual), placement
    read = schedules.read_csv(Path(name))

    def checked(count: int) -> schedules.Schedule:
        refusal = schedules.refuse_use(read, ranks, count)
        if refusal:
            raise UserError(refusal)
        return read

    return checked, read.placement


def describe_sharding(config: RunConfig, policy: Policy) -> list[str]:
    """What is where, in lines for the log."""
    parallel, offload = config.parallel, config.offload
    replicas = f", {parallel.dp_replicate} replicas" if parallel.dp_replicate > 1 else ""
    parts = ("optimizer state", "gradients", "weights")[: parallel.zero_stage]
    lines = [
        f"ZeRO stage {parallel.zero_stage}: {' + '.join(parts) or 'nothing'} sharded over "
        f"{parallel.dp_shard * parallel.cp} ranks{replicas}",
        f"precision {config.precision.policy}: {policy.describe(config.hardware.target)}",
    ]
    if parallel.tp > 1:
        sequence = " and along the sequence" if parallel.sequence_parallel else ""
        lines.append(f"tensor parallelism: weights and activations cut over {parallel.tp} ranks{sequence}")
    if parallel.ep > 1:
        copies = parallel.dp_shard * parallel.cp // parallel.ep
        lines.append(
            f"expert parallelism: experts cut over {parallel.ep} ranks, their states sharded over {copies}"
        )
    if parallel.cp > 1:
        lines.append(f"context parallelism: samples cut over {parallel.cp} ranks, {parallel.context}")
    if offload.optimizer != "none":
        lines.append(f"offload: {offload.fraction:.0%} of the optimizer state on {offload.optimizer}")
    return lines


def build_sharded(
    config: RunConfig,
    model: nn.Cell,
    policy: Policy,
    pmesh: ProcessMesh,
    values: ValueSource,
    placements: Placements,
    part_of: Callable[[str], int | None] = lambda name: None,
) -> Sharded:
    """The shards of a model, given where its parameters lie in the whole ones and the values of these.

    ``part_of``: the pipeline stage of a parameter, where a rank has several; None: all.
    """
    parallel = config.parallel
    working = policy.working(device_target())
    wrap = wrap_blocks(model, leaves=True)
    if parallel.wrap != "block":
        uncalled = model.uncalled() if isinstance(model, Staged) else ()
        wrap = wrap_size(model, parallel.wrap_elements, uncalled=uncalled)
    return Sharded(
        model,
        placements.local_values(values),
        Options(
            stage=parallel.zero_stage,
            policy=policy,
            synchronise=parallel.sync_each_microbatch,
            reshard_after_forward=parallel.reshard_after_forward,
            prefetch=parallel.prefetch,
            bucket_bytes=int(parallel.bucket_mb * 2**20),
            params_on_host=config.offload.params == "cpu",
        ),
        comm=pmesh.comm,
        groups=data_groups(pmesh, parallel.zero_stage),
        working=working.dtype,
        grid=None if working.grid is None else DTYPES[working.grid],
        in_fp32=fp32_parameters(model).__contains__,
        key_of=models.decay_names(model).__contains__,
        keep=bias_names(model).__contains__,
        scaler=build_scaler(config.precision),
        wrap=wrap,
        placements=placements,
        part_of=part_of,
    )


def build_balancer(
    config: RunConfig, model: nn.Cell, sharded: Sharded, pmesh: ProcessMesh
) -> Balancer | None:
    """What moves the biases of the routers on this rank; None: there are none."""
    if not bias_names(model):
        return None
    group = pmesh.group(*DATA_AXES, "cp")
    return Balancer(model, sharded, pmesh.comm, group, speed=config.model.router_bias_speed)


def apply_memory(config: RunConfig, model: nn.Cell) -> list[str]:
    """Recompute, offload and compression of activations; what was done, in lines for the log."""
    memory = config.memory
    applied = apply_recompute(
        model,
        memory.recompute,
        every=memory.recompute_every if memory.recompute == "every_k" else None,
        budget_bytes=None if memory.budget_gb is None else memory.budget_gb * 1e9,
        bytes_of=kept_bytes(config).__getitem__,
    )
    cells = None if memory.cells == "blocks" else memory.cells
    if memory.activations == "host":
        offload_activations(model, cells=cells)
    elif memory.activations != "device":
        compress_activations(model, cells=cells, offload=memory.activations == "int8_host")
    return [applied.text] if memory.recompute != "none" else []


def kept_bytes(config: RunConfig) -> dict[str, float]:
    """Bytes that one block keeps of a microbatch, by kind of recompute; of unlike blocks the largest."""
    shape = from_config(config.model)
    working = build_policy(config.precision).working(config.hardware.target)
    split = Split(
        batch=config.train.micro_batch_size,
        seq_len=config.data.seq_len // config.parallel.cp,
        keys=config.data.seq_len,
        tp=config.parallel.tp,
        sequence_parallel=config.parallel.sequence_parallel,
        activation_bytes=4 if working.dtype == ms.float32 else 2,
        dropout=config.model.dropout > 0,
        rounded=working.grid is not None,
    )
    kernels_of = {"CPU": config.hardware.kernels, "Ascend": "ascend"}
    implementation = kernels_of.get(config.hardware.target, "portable")
    blocks = [block_of(shape, layer) for _, layer in shape.blocks]
    sizes = [bytes_by_kind(block, split, implementation=implementation) for block in blocks]
    return {kind: max(each[kind] for each in sizes) for kind in sizes[0]}


def build_policy(config: PrecisionConfig) -> Policy:
    """The dtypes of a run."""
    return Policy(
        param=config.param,
        compute=config.compute,
        reduce=config.reduce,
        accumulate=config.accumulate,
        master=config.master,
    )


def build_scaler(config: PrecisionConfig) -> LossScaler:
    """The loss scale of a run; without scaling a fixed 1, so that skipped steps are counted all the same."""
    if config.loss_scale == "dynamic":
        rule = scaling_rule(
            config.loss_scale_convention,
            initial=config.initial_scale,
            window=config.growth_interval,
            hysteresis=None if config.loss_scale_convention == "torch" else config.hysteresis,
            minimum=config.min_scale,
        )
        return DynamicLossScaler(rule)
    return StaticLossScaler(config.initial_scale if config.loss_scale == "static" else 1.0)


def build_model(config: ModelConfig) -> nn.Cell:
    """The plain model of a family; its parameters have shapes and no values yet."""
    if config.family == "moe":
        return build_decoder(config)
    values = {key: value for key, value in vars(config).items() if key != "family"}
    family = {"gpt": models.GPT, "llama": models.Llama}[config.family]
    return family(**values)


def seeded_values(model: nn.Cell, seed: int) -> ValueSource:
    """Initial values by the layout-invariance contract: element i depends on (seed, name, i) only."""
    rules: dict[str, InitRule] = init_rules(model)
    shapes = {name: tuple(param.shape) for name, param in model.parameters_and_names()}
    return lambda name, start, stop: initial_values(rules[name], name, shapes[name], seed, start, stop)


def build_resets(config: DataConfig) -> DocumentResets:
    """What restarts where a document begins."""
    return DocumentResets(attention=config.reset_attention, positions=config.reset_positions)


def build_states(config: RunConfig, sharded: Sharded, comm: Communicator) -> StateStore | None:
    """Where optimizer state goes that leaves the device; None: nothing does.

    Raises:
        UserError: the folder for files cannot be used, or has no room for the ranks of this machine.
    """
    offload = config.offload
    if offload.optimizer == "none":
        return None
    if offload.optimizer == "cpu":
        return HostStates()
    num_vectors = len(_OPTIMIZERS[config.optim.kind].moments) + sharded.options.policy.keeps_master
    lengths = [stop - start for start, stop in map(sharded.owned, range(len(sharded.buckets)))]
    needed = sum(padded_bytes(round(length * offload.fraction)) for length in lengths) * num_vectors
    machine = socket.gethostname()
    everyone = comm.exchange([machine, needed])
    check_space(offload.nvme_path, sum(size for name, size in everyone if name == machine))
    comm.barrier()  # nobody takes space before everybody has looked
    return NvmeStates(offload.nvme_path)


_OPTIMIZERS = {"adamw": AdamW, "sgd": SGD}


def build_optimizer(
    config: OptimConfig, sharded: Sharded, offload: StateStore | None = None, fraction: float = 1.0
) -> Optimizer:
    """The optimizer of a model whose groups are "does it decay"."""
    options = {
        "weight_decay": config.weight_decay,
        "groups": {False: GroupOptions(weight_decay=0.0)},
        "offload": offload,
        "fraction": fraction,
    }
    if config.kind == "adamw":
        options |= {"beta1": config.beta1, "beta2": config.beta2, "eps": config.eps}
    return _OPTIMIZERS[config.kind](sharded, **options)
