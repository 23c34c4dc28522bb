"""From a run's configuration to MindSpore's AutoParallel.

ZeRO stages and the levels of ``hsdp`` are not the same numbers. Bytes that a rank of N holds per parameter,
with fp32 weights that are their own masters and are gathered as such, and Adam:

| zero_stage | hsdp   | weights between steps | gathered in a step | summed gradients | moments | sent   |
|------------|--------|-----------------------|--------------------|------------------|---------|--------|
| 0          | off    | 4                     | 0                  | 4                | 8       | 2      |
| 1          | level1 | 4 / N                 | 4                  | 4                | 8 / N   | 1 + 1  |
| 2          | level2 | 4 / N                 | 4                  | 4 / N            | 8 / N   | 1 + k  |
| 3          | level3 | 4 / N                 | 4, of one unit     | 4 / N            | 8 / N   | 2k + k |

"sent" counts gathers and reductions of all parameters, 4 (N - 1)/N bytes each, in a step of k microbatches.
Levels 1 and 2 keep what they gathered until the last backward. Level 3 gathers for every forward and again
for every backward; without accumulation or a pipeline MindSpore 2.10.0 leaves the second gather out, and
always for tables whose rows are looked up. A parameter whose first dim N does not divide is not sharded but
summed as in stage 0. Replicas sum whole gradients before they are scattered where k is 1, and else the
shards, once a step. `ms_zero.plan.compiled` counts it all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from mindspore import nn
from mindspore.parallel.auto_parallel import AutoParallel

from ms_zero.comm import Group
from ms_zero.config import RunConfig
from ms_zero.config.auto_parallel import COMPILED, SCHEDULES, problems, stages_per_rank
from ms_zero.errors import UserError
from ms_zero.graph.seqpipe import in_parts
from ms_zero.graph.strategies import Grid, Head, TokenRows
from ms_zero.plan.recompute import plan_recompute
from ms_zero.plan.run import stage_layers
from ms_zero.precision.policy import DTYPES


@dataclass(frozen=True)
class Stages:
    """How a pipeline cuts a model.

    Attributes:
        count: pipeline stages.
        scheduler: MindSpore's name of the order.
        interleave: whether a stage may hold several chunks of the model.
        chunk_layers: layers of each chunk, in model order.
    """

    count: int
    scheduler: str
    interleave: bool
    chunk_layers: tuple[int, ...]

    def place(self, chunk: int) -> tuple[int, int]:
        """The stage that holds a chunk, and which of its chunks it is.

        Chunks go round the stages; with zero_bubble_v from the last one back to the first.
        """
        segment, place = divmod(chunk, self.count)
        goes_back = self.scheduler == "zero_bubble_v" and segment == 1
        return (self.count - 1 - place if goes_back else place), segment


@dataclass(frozen=True)
class Options:
    """What AutoParallel is told.

    Attributes:
        grid: the devices of a stage.
        stages: of the pipeline; None without one.
        hsdp_level: 1 to 3; 0: off.
        shard_size: ranks that share a parameter; -1: all that have it.
        fusion_mb: collectives of gradients and weights are joined up to this many MiB.
        recompute: "none", "selective" or "full" for each block.
        offload_activations: whether blocks keep their activations in host memory.
        speed_up: content of MindSpore's ``parallel_speed_up.json``.
    """

    grid: Grid
    stages: Stages | None
    hsdp_level: int
    shard_size: int
    fusion_mb: int
    recompute: tuple[str, ...]
    offload_activations: bool
    speed_up: Mapping[str, Any]

    @property
    def loss_rank(self) -> int:
        """The first rank that knows the loss: of the stage of the last chunk, the first stage with zb-v."""
        if self.stages is None:
            return 0
        stage, _ = self.stages.place(len(self.stages.chunk_layers) - 1)
        return stage * self.grid.dp * self.grid.cp * self.grid.tp


def options_of(config: RunConfig, ring: Group | None = None) -> Options:
    """What a config asks of AutoParallel.

    ``ring``: this rank's group of cp ranks.

    Raises:
        UserError: something that this engine does not do.
    """
    parallel = config.parallel
    grid = Grid(
        dp=parallel.dp_replicate * parallel.dp_shard,
        cp=parallel.cp,
        tp=parallel.tp,
        sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
        context=parallel.context,
        ring=ring,
        ep=parallel.ep,
    )
    _check(config)
    return Options(
        grid=grid,
        stages=stages_of(config) if parallel.pp > 1 else None,
        hsdp_level=parallel.zero_stage,
        shard_size=parallel.dp_shard * parallel.cp if parallel.dp_replicate > 1 else -1,
        fusion_mb=max(1, int(parallel.bucket_mb)),
        recompute=recompute_kinds(config),
        offload_activations=config.memory.activations == "host",
        speed_up=speed_up_of(config),
    )


def _check(config: RunConfig) -> None:
    """Refuse what would silently be something else."""
    for path, message in problems(partial(_value, config)):
        raise UserError(f"graph: {path}: {message}")
    for holds, message in _other_problems(config):
        if holds:
            raise UserError(f"graph: {message}")


def _value(config: RunConfig, path: str) -> Any:
    section, key = path.split(".")
    return getattr(getattr(config, section), key, None)


def _other_problems(config: RunConfig) -> Iterator[tuple[bool, str]]:
    precision, memory, offload = config.precision, config.memory, config.offload
    yield (
        {precision.reduce, precision.accumulate, precision.master} != {"fp32"},
        "precision: gradients are reduced and kept in fp32, and so are weights: leave reduce, accumulate and "
        "master on fp32",
    )
    yield (
        config.model.dropout > 0,
        "model.dropout: its masks are drawn on the host, and all microbatches of a step go in at once: set "
        "it to 0",
    )
    yield (
        config.model.family == "moe" and (config.data.reset_attention or config.data.reset_positions),
        "data.reset_attention and data.reset_positions: there are no strategies for documents in models with "
        "experts: set both to false",
    )
    yield (
        memory.activations.startswith("int8"),
        f"memory.activations {memory.activations}: activations are kept exactly: use device or host",
    )
    yield (
        memory.recompute in ("sqrt", "budget"),
        f"memory.recompute {memory.recompute}: blocks are recomputed one by one: use full, every_k, "
        "selective or none",
    )
    yield (
        offload.params != "none",
        f"offload.params {offload.params}: what MindSpore 2.10.0 has for it, Parameter(device=), leaves no "
        "trace in the graph that it compiles, so that it cannot be checked without devices: use none",
    )
    yield (
        offload.optimizer == "nvme",
        "offload.optimizer nvme: MindSpore 2.10.0 has no optimizer state in files: use cpu or none",
    )


def stages_of(config: RunConfig) -> Stages:
    """The cut of a pipeline, by the same keys as the eager engine's.

    Raises:
        UserError: a stage would have nothing.
    """
    parallel = config.parallel
    scheduler, interleave = {**SCHEDULES, **COMPILED}[parallel.schedule]
    layers = stage_layers(config, parallel.pp * stages_per_rank(parallel.schedule, parallel.virtual_stages))
    # The first and the last have the table of tokens and the head at least.
    if 0 in (layers if scheduler == "seqpipe" else layers[1:-1]):
        raise UserError(
            f"graph: the stages have {list(layers)} blocks: each needs at least one, but for the ends "
            "without seqpipe: set parallel.stage_layers, or lower parallel.pp or parallel.virtual_stages"
        )
    return Stages(parallel.pp, scheduler, interleave, layers)


def recompute_kinds(config: RunConfig) -> tuple[str, ...]:
    """What runs again of each block."""
    memory, layers = config.memory, config.model.num_layers
    every = memory.recompute_every if memory.recompute == "every_k" else None
    return plan_recompute(memory.recompute, layers, every=every).kinds(layers)


def speed_up_of(config: RunConfig) -> dict[str, Any]:
    """The overlaps of communication and computation that a config can use."""
    parallel, recomputes = config.parallel, config.memory.recompute != "none"
    shards = parallel.zero_stage > 0 and parallel.dp_shard > 1
    return {
        "recomputation_communication_overlap": recomputes and parallel.tp > 1,
        "grad_matmul_communication_overlap": parallel.tp > 1,
        "grad_fa_allgather_overlap": recomputes and parallel.sequence_parallel,
        "enable_communication_fusion": False,
        "grad_computation_allreduce_overlap": parallel.dp_replicate * parallel.dp_shard > 1 and not shards,
        "computation_allgather_overlap": shards and parallel.zero_stage < 3,
        "computation_communication_fusion_level": 0,
    }


def place_blocks(model: nn.Cell, options: Options) -> None:
    """Give the parts of a sharded model their pipeline stages, recompute and offload.

    ``model``: see `ms_zero.graph.strategies.sharded_model`.
    """
    if options.stages is not None:
        _place_stages(model, options.stages)
    for block, kind in zip(model.blocks, options.recompute, strict=True):
        if kind == "full":
            block.recompute()
        elif kind == "selective":
            block.recompute_attention()
        if options.offload_activations and kind != "full":
            block.offload()


def _place_stages(model: nn.Cell, stages: Stages) -> None:
    chunks = [chunk for chunk, number in enumerate(stages.chunk_layers) for _ in range(number)]
    last = len(stages.chunk_layers) - 1
    placed = [(cell, 0) for cell in model.first_cells]
    placed += [(cell, last) for cell in model.last_cells]
    placed += list(zip(model.blocks, chunks, strict=True))
    for cell, chunk in placed:
        cell.pipeline_stage, segment = stages.place(chunk)
        if last >= stages.count:
            cell.pipeline_segment = segment
    table, head = model.first_cells[0], model.last_cells[-1]
    is_tied = isinstance(table, TokenRows) and isinstance(head, Head) and head.is_tied
    if is_tied and table.pipeline_stage != head.pipeline_stage:
        table.sends_table = True


def cut_sequences(model: nn.Cell, config: RunConfig, grid: Grid) -> nn.Cell:
    """A sharded model, with its blocks placed, as the order of a run's pipeline needs it."""
    parallel, train = config.parallel, config.train
    if parallel.pp == 1 or parallel.schedule != "seqpipe":
        return model
    return in_parts(
        model,
        num_parts=parallel.sequence_parts,
        samples=train.micro_batch_size * grid.dp,
        tokens=config.data.seq_len,
        grid=grid,
        dtype=DTYPES[config.precision.compute],
    )


def auto_parallel(
    cell: nn.Cell,
    options: Options,
    num_inputs: int,
    folder: Path | None,
    *,
    dims: Sequence[int] | None = None,
    mode: str = "semi_auto",
) -> AutoParallel:
    """Wrap a train cell.

    Args:
        cell: takes ``num_inputs`` tensors [samples, ...].
        options: of the run.
        num_inputs: of the cell.
        folder: gets ``parallel_speed_up.json``; None: MindSpore's defaults.
        dims: number of dims of each input; None: two.
        mode: MindSpore's name of how operators get their strategies.
    """
    for param in cell.get_parameters():
        if param.ndim == 0:
            param.parallel_optimizer = False  # hsdp ends the process at a 0-d parameter (2.10.0)
    wrapped = AutoParallel(cell, mode)
    grid = options.grid
    # Data is cut along one dim only: cp ranks get whole sequences and take their part of them.
    if mode == "semi_auto":
        dims = (2,) * num_inputs if dims is None else dims
        wrapped.dataset_strategy(tuple((grid.dp, *(1,) * (number - 1)) for number in dims))
    else:  # the only strategy that 2.10.0 keeps then: every rank of a stage has rows of its own
        wrapped.dataset_strategy("data_parallel")
    if options.hsdp_level:
        level = f"level{options.hsdp_level}"
        wrapped.hsdp(shard_size=options.shard_size, threshold=0, optimizer_level=level)
    if options.stages is not None:
        stages = options.stages
        wrapped.pipeline(stages=stages.count, interleave=stages.interleave, scheduler=stages.scheduler)
    size = {"mode": "size", "config": options.fusion_mb}
    wrapped.comm_fusion({"openstate": True, "allreduce": size, "allgather": size, "reducescatter": size})
    if folder is not None:
        path = folder / "parallel_speed_up.json"
        path.write_text(json.dumps(dict(options.speed_up), indent=2) + "\n")
        wrapped.transformer_opt(str(path))
    wrapped.no_init_parameters_in_compile()
    wrapped.set_train()
    return wrapped
