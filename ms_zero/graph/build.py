"""From a run's configuration to the graph engine."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mindspore import nn

from ms_zero.comm import Communicator, Group, ProcessMesh
from ms_zero.config import RunConfig
from ms_zero.data import DocumentResets
from ms_zero.graph.compiled import CompiledEngine, CompiledStep
from ms_zero.graph.dropout import GivenMasks
from ms_zero.graph.engine import GraphEngine
from ms_zero.graph.initial import declare, seeded_values
from ms_zero.graph.moe import LoadBalancer, MoEGraphEngine, auxiliary_sum, compiled_decoder, twin_of
from ms_zero.graph.network import LossNetwork
from ms_zero.graph.parallel import auto_parallel, cut_sequences, options_of, place_blocks
from ms_zero.graph.precision import compute_in
from ms_zero.graph.ring import ring_order
from ms_zero.graph.step import GraphStep
from ms_zero.graph.strategies import Grid, ShardedCrossEntropySum
from ms_zero.graph.train import batch_extras, build_train_cell, build_update, trained_parameters
from ms_zero.models import initialise
from ms_zero.precision.policy import DTYPES
from ms_zero.precision.scaler import LossScaler

# The ranks that see different data.
_DATA_AXES = ("dp_replicate", "dp_shard")


def build_graph_engine(
    config: RunConfig, pmesh: ProcessMesh, model: nn.Cell, *, scaler: LossScaler, resets: DocumentResets
) -> GraphEngine:
    """Give the model its initial values and the engine its graphs; they are compiled by the first step.

    Args:
        config: of the run; one that `ms_zero.config.require_runnable` lets pass.
        pmesh: of the job.
        model: plain, with parameters frozen as wanted; its values are those of the eager engine.
        scaler: of the loss.
        resets: what restarts where a document begins.
    """
    optim, group, target = config.optim, pmesh.group(*_DATA_AXES), config.hardware.target
    dtype, has_experts = DTYPES[config.precision.compute], config.model.family == "moe"
    initialise(model, config.train.seed)
    if has_experts:
        twin = compiled_decoder(model, config.model, dtype, target=target)
    else:
        compute_in(model, dtype, target=target)
        twin = model
    aux_sum = auxiliary_sum(config.model, Grid())
    update, masks, train = build_update(optim, model, trained_parameters(model)), None, config.train
    if config.model.dropout > 0:
        shape = (train.micro_batch_size, config.data.seq_len, config.model.hidden_size)
        masks = GivenMasks(model, train.seed, shape)
    step = GraphStep(
        LossNetwork(twin, batch_extras(config), aux_sum=aux_sum),
        update,
        weight_decay=optim.weight_decay,
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.eps,
        scaler=scaler,
        group=group,
        bucket_bytes=int(config.parallel.bucket_mb * 2**20),
    )
    common = {"group": group, "resets": resets, "notes": _notes(config.precision.compute, group.size)}
    if not has_experts:
        return GraphEngine(model, step, masks=masks, **common)
    balancer = LoadBalancer(twin, pmesh.comm, group, speed=config.model.router_bias_speed)
    return MoEGraphEngine(model, twin, step, balancer, **common)


def needs_auto_parallel(config: RunConfig) -> bool:
    """Whether a run is for AutoParallel, and not only for whole models on ranks with different data."""
    parallel, memory = config.parallel, config.memory
    is_cut = max(parallel.pp, parallel.tp, parallel.cp, parallel.ep) > 1 or parallel.zero_stage > 0
    leaves_device = memory.activations != "device" or config.offload.optimizer != "none"
    return is_cut or leaves_device or memory.recompute != "none"


def build_compiled_engine(
    config: RunConfig,
    pmesh: ProcessMesh,
    model: nn.Cell,
    *,
    scaler: LossScaler,
    schedule: Callable[[int], float],
    folder: Path,
    resets: DocumentResets,
) -> CompiledEngine:
    """The engine of a run that AutoParallel cuts; compiles at once. For Ascend, on which it has not been run.

    Args:
        config: of the run.
        pmesh: of the job.
        model: plain, with parameters frozen as wanted.
        scaler: of the loss.
        schedule: learning rate of an update.
        folder: gets MindSpore's options for overlaps.
        resets: what restarts where a document begins.

    Raises:
        UserError: something that AutoParallel does not do.
    """
    declare(model)
    values = seeded_values(model, config.train.seed)  # of whole parameters, so before they are cut
    train, group, ring = config.train, pmesh.group(*_DATA_AXES), pmesh.group("cp")
    parts = {"scaler": scaler, "schedule": schedule, "folder": folder}
    step = auto_parallel_step(config, model, pmesh.comm, ring=ring, **parts)
    step.prepare(train.micro_batch_size * train.accumulation_steps, config.data.seq_len)
    notes = _notes(config.precision.compute, 1)
    notes += ["engine graph: MindSpore's AutoParallel cuts this run; that has not been tried on a device"]
    if config.offload.optimizer == "cpu":
        share = f"{config.offload.fraction:.0%}"
        notes.append(f"offload: {share} of the optimizer state is kept and updated on the host")
    is_ring = ring.size > 1 and config.parallel.context == "ring"
    order = partial(ring_order, degree=ring.size) if is_ring else None
    common = {"group": group, "resets": resets, "notes": notes}
    engine = CompiledEngine(model, step, comm=pmesh.comm, order=order, **common)
    engine.fill(values)
    return engine


def auto_parallel_step(
    config: RunConfig,
    model: nn.Cell,
    comm: Communicator,
    *,
    scaler: LossScaler,
    schedule: Callable[[int], float],
    folder: Path,
    ring: Group | None = None,
) -> CompiledStep:
    """The step of such a run, not compiled yet; arguments as for :func:`build_compiled_engine`.

    ``ring``: this rank's group of cp ranks. With several and ``context: ring`` the tokens of a sample are to
    come in the order of `ms_zero.graph.ring.ring_order`.
    """
    options, optim = options_of(config, ring=ring), config.optim
    twin = twin_of(model, config.model, options.grid, DTYPES[config.precision.compute])
    place_blocks(twin, options)
    twin = cut_sequences(twin, config, options.grid)
    loss = ShardedCrossEntropySum(config.model.vocab_size, options.grid)
    aux = auxiliary_sum(config.model, options.grid)
    losses = {"loss_sum": loss, "aux_sum": aux}
    parts = build_train_cell(config, twin, plain=model, **losses, scaler=scaler, target="Ascend")
    cell = auto_parallel(parts.cell, options, 2 + len(parts.extras), folder)
    return CompiledStep(
        cell,
        parts,
        schedule,
        weight_decay=optim.weight_decay,
        beta1=optim.beta1,
        beta2=optim.beta2,
        eps=optim.eps,
        comm=comm,
        loss_rank=options.loss_rank,
    )


def _notes(compute: str, num_ranks: int) -> list[str]:
    ranks = f", gradients summed over {num_ranks} ranks inside the graph" if num_ranks > 1 else ""
    return [
        f"engine graph: steps compiled by MindSpore{ranks}; the first takes longer",
        f"precision: weights fp32, computed with in {compute}; gradients and optimizer state fp32",
    ]
