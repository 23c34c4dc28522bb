"""A model of one's own under AutoParallel. The protocol, see :func:`parallelise`:

1. a Cell that maps the tensors of a microbatch to its summed loss, as for `ms_zero.graph.build_step`;
2. names: the blocks that repeat, and what comes before and after them, for pipeline stages;
3. strategies of layers and operators by path, or sharding propagation, or both.

Model and loss are written for whole tensors and know nothing of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn
from mindspore.communication import get_group_size
from mindspore.parallel.nn import GradAccumulation, Pipeline

from ms_zero._compat import device_target
from ms_zero.checkpoint import Checkpoint, Shard
from ms_zero.comm import Communicator
from ms_zero.config.auto_parallel import SCHEDULES
from ms_zero.errors import UserError, one_line
from ms_zero.graph.compiled import CompiledEngine, CompiledStep
from ms_zero.graph.given import Strategy, apply_strategies, uses_axis
from ms_zero.graph.network import ReusedScaledLoss, ScaledLoss, loss_factor
from ms_zero.graph.parallel import Options, Stages, auto_parallel, place_blocks
from ms_zero.graph.places import load_function
from ms_zero.graph.reduce import MicrobatchGradients, SameGradients
from ms_zero.graph.step import Summary, check_parameters
from ms_zero.graph.strategies import Grid
from ms_zero.graph.train import TrainCell, TrainParts
from ms_zero.graph.update import Update
from ms_zero.mesh import AXES, Mesh
from ms_zero.optim.clip import GradientDecision, decide
from ms_zero.parallel.styles import matches
from ms_zero.pipeline.balance import even_split
from ms_zero.precision.scaler import LossScaler, StaticLossScaler

_RATES = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8}


@dataclass(frozen=True)
class Arrangement:
    """How a network is cut. Patterns are of Cell paths, ``*`` and ``?`` within one name.

    Attributes:
        mesh: the ranks; ``ep`` is not used.
        blocks: patterns of the Cells that repeat; shared out evenly between the stages of a pipeline.
        first: patterns of the Cells before them; on the first stage.
        last: patterns of the Cells after them; on the last stage.
        strategies: pattern -> how a layer or an operator is cut; see `ms_zero.graph.given`.
        propagate: whether MindSpore finds the strategies that are not given ("sharding_propagation").
            Otherwise operators without one cut their first dim over all ranks of a stage.
        zero_stage: 0 to 3; see `ms_zero.graph.parallel`.
        microbatches: of a step; each tensor of a batch is cut into so many along its first dim.
        schedule: of the pipeline: "1f1b", "gpipe" or "interleaved".
        virtual_stages: of a rank, with "interleaved".
        recompute: patterns of Cells whose forward runs again in backward.
        fusion_mb: collectives of gradients and weights are joined up to this many MiB.
    """

    mesh: Mesh = field(default_factory=Mesh)
    blocks: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    strategies: Mapping[str, Strategy] = field(default_factory=dict)
    propagate: bool = False
    zero_stage: int = 0
    microbatches: int = 1
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    virtual_stages: int = 1
    recompute: tuple[str, ...] = ()
    fusion_mb: int = 25

    def __post_init__(self) -> None:
        for name in ("blocks", "first", "last", "recompute"):
            if isinstance(getattr(self, name), str):
                raise UserError(f"graph: {name}: expected a tuple of patterns, such as ('layers.*',)")
        if self.zero_stage not in (0, 1, 2, 3):
            raise UserError(f"graph: zero_stage {self.zero_stage}: expected 0 to 3")
        if self.zero_stage > 0 and self.mesh.dp_replicate > 1 and self.mesh.dp_shard * self.mesh.cp == 1:
            raise UserError(
                "graph: replicas of one rank have nothing to shard: set zero_stage to 0, or dp_shard above 1"
            )
        if self.schedule not in SCHEDULES:
            raise UserError(f"graph: schedule {self.schedule}: expected one of {', '.join(SCHEDULES)}")
        if self.microbatches < 1:
            raise UserError(f"graph: microbatches {self.microbatches}: expected at least 1")
        if self.mesh.pp > 1 and not self.blocks:
            raise UserError("graph: a pipeline cuts between blocks: name them with blocks=")
        if self.propagate:
            self._check_propagation()
        if self.mesh.tp > 1 and not uses_axis(self.strategies, "tp"):
            raise UserError(f"graph: no strategy cuts anything over the {self.mesh.tp} ranks of tp")

    def _check_propagation(self) -> None:
        """Refuse what needs microbatches that share a subgraph: with that 2.10.0 propagates wrong shapes."""
        if self.mesh.pp > 1:
            raise UserError("graph: propagate: not in a pipeline with MindSpore 2.10.0: give strategies")
        if self.zero_stage > 1 and self.microbatches > 1:
            raise UserError(
                f"graph: propagate: not with zero_stage {self.zero_stage} and {self.microbatches} micro"
                "batches with MindSpore 2.10.0: use zero_stage 1, one microbatch, or give strategies"
            )

    @property
    def grid(self) -> Grid:
        """The devices of a stage."""
        return Grid(dp=self.mesh.dp, cp=self.mesh.cp, tp=self.mesh.tp)

    @property
    def row_parts(self) -> int:
        """Into how many parts ranks of equal data cut its rows before it enters the graph."""
        return self.mesh.cp * self.mesh.tp if self.propagate and self.mesh.world_size > 1 else 1

    def options(self, num_blocks: int) -> Options:
        """What AutoParallel is told."""
        mesh = self.mesh
        return Options(
            grid=self.grid,
            stages=self._stages(num_blocks) if mesh.pp > 1 else None,
            hsdp_level=self.zero_stage,
            shard_size=mesh.dp_shard * mesh.cp if mesh.dp_replicate > 1 else -1,
            fusion_mb=self.fusion_mb,
            recompute=("none",) * num_blocks,
            offload_activations=False,
            speed_up={},
        )

    def _stages(self, num_blocks: int) -> Stages:
        scheduler, interleave = SCHEDULES[self.schedule]
        virtual = self.virtual_stages if self.schedule == "interleaved" else 1
        layers = even_split(num_blocks, self.mesh.pp * virtual)
        return Stages(self.mesh.pp, scheduler, interleave, layers)


@dataclass(frozen=True)
class NamedParts:
    """The Cells of a network that its user has named, in order.

    Attributes:
        first_cells: before the blocks.
        blocks: those that repeat.
        last_cells: after the blocks.
    """

    first_cells: tuple[nn.Cell, ...]
    blocks: tuple[nn.Cell, ...]
    last_cells: tuple[nn.Cell, ...]


class ParallelStep:
    """Training steps of a network, each one compiled graph; made by :func:`parallelise`.

    Attributes:
        network: of the user.
        cell: what is compiled: a train cell, inside AutoParallel if there is more than one rank.
        batch: an example of the tensors of a step, of the shapes that this rank passes to the compiled cell.
        mesh: the ranks.
    """

    def __init__(
        self,
        network: nn.Cell,
        cell: nn.Cell,
        parts: TrainParts,
        *,
        batch: Sequence[Tensor],
        arrangement: Arrangement,
        clip_norm: float,
        weight_decay: float,
        comm: Communicator | None,
        loss_rank: int = 0,
        **rates: float,
    ) -> None:
        self.network, self.cell, self.mesh = network, cell, arrangement.mesh
        self._parts = arrangement.row_parts
        self._clip_norm, self._lr, self._comm = clip_norm, 0.0, comm
        self.batch = self._own_rows(batch)
        rates = _RATES | {"weight_decay": weight_decay} | rates
        self._step = CompiledStep(cell, parts, lambda _: self._lr, comm=comm, loss_rank=loss_rank, **rates)

    def __call__(self, *batch: Tensor, lr: float, weight: float) -> tuple[Summary, GradientDecision]:
        """Make one training step. Collective; compiles when it is called first.

        Args:
            batch: all microbatches of the step, of the shapes of the example: the same on ranks that only
                differ in tp or cp.
            lr: learning rate.
            weight: factor on the summed loss: one over what the sum over all ranks is to be divided by.

        Returns:
            loss times weight and the gradient's square, and what was decided; equal on all ranks.

        Raises:
            UserError: the compiler refuses the step, or the ranks disagree.
        """
        if self._comm is None and self.mesh.world_size > 1:
            raise UserError("graph: a step of several ranks needs the communicator of the job: pass comm=")
        if not self._step.is_prepared:
            self.compile()
        self._lr = lr
        self._step.forward_backward(*self._own_rows(batch), weight=weight)
        summary = self._step.reduce()
        decision = decide(summary.sum_of_squares, self._clip_norm)
        if decision.finite:
            self._step.update(lr=lr)
        else:
            self._step.discard()
        return summary, decision

    def compile(self) -> None:
        """Compile, so that parameters are what this rank holds.

        Raises:
            UserError: the compiler refuses the step, with its reason.
        """
        try:
            self._step.compile(*self.batch)
        except (RuntimeError, ValueError, TypeError) as error:
            raise UserError(
                f"graph: MindSpore's compiler refuses the step: {_first_line(error)}; change strategies, "
                "degrees or the model so that they fit"
            ) from None

    def state_shards(self) -> Iterator[tuple[Shard, np.ndarray]]:
        """This rank's part of parameters and optimizer state, for `ms_zero.checkpoint.save`. Collective."""
        return self._engine().state_shards()

    def load_state(self, checkpoint: Checkpoint) -> None:
        """Take parameters and optimizer state from a checkpoint of any mesh; compiles before, if need be.

        Raises:
            UserError: the checkpoint lacks a tensor, has one more, or one of another shape.
        """
        if not self._step.is_prepared:
            self.compile()
        self._engine().load_state(checkpoint)

    def _engine(self) -> CompiledEngine:
        if self._comm is None:
            raise UserError("graph: saving and loading needs the communicator of the job: pass comm=")
        return CompiledEngine(self.network, self._step, comm=self._comm, group=self._comm.world)

    def _own_rows(self, batch: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What this rank passes of a batch: where sharding propagates, one part for each of cp x tp ranks."""
        if self._parts == 1:
            return tuple(batch)
        index = (0 if self._comm is None else self._comm.rank) % self._parts
        arrays = [tensor.asnumpy() for tensor in batch]
        return tuple(Tensor(np.split(array, self._parts)[index].copy()) for array in arrays)


def _first_line(error: BaseException) -> str:
    return one_line(next(iter(str(error).strip().splitlines()), type(error).__name__))


def parallelise(
    network: nn.Cell,
    batch: Sequence[Tensor],
    arrangement: Arrangement,
    *,
    optimizer: str = "adamw",
    decays: Callable[[Parameter], bool] = lambda param: param.ndim > 1,
    weight_decay: float = 0.1,
    clip_norm: float = 0.0,
    scaler: LossScaler | None = None,
    comm: Communicator | None = None,
    **rates: float,
) -> ParallelStep:
    """Train any Cell under AutoParallel.

    With one rank the same graph is compiled without AutoParallel, on any target; with more, for Ascend.
    ``ms-zero graph inspect FILE.py:FUNCTION`` shows what the compiler inserts: FUNCTION returns the result.

    Args:
        network: maps the tensors of a microbatch to its summed loss, a 0-d float. All its parameters that
            want a gradient are trained; they need values, in fp32, and different names. Its operators get
            their strategies in place.
        batch: an example of the tensors of a step, all microbatches along the first dim; the rows of one of
            the ranks with different data.
        arrangement: how it is cut.
        optimizer: "adamw" or "sgd".
        decays: whether weight decay applies to a parameter; by default to those of two or more dims.
        weight_decay: its coefficient.
        clip_norm: largest gradient norm; 0: no clipping.
        scaler: of the loss; see `ms_zero.precision.scaler`.
        comm: of a job of more than one rank, which starts from the values of rank 0.
        rates: ``beta1``, ``beta2``, ``eps``.

    Raises:
        UserError: names or strategies do not fit the network or the mesh, the ranks are not those of the
            mesh, or AutoParallel is asked for on a target that does not have it.
    """
    mesh = arrangement.mesh
    _check_job(mesh, comm)
    _check_batch(batch, arrangement.microbatches * arrangement.row_parts)
    params = [param for _, param in network.parameters_and_names() if param.requires_grad]
    check_parameters(params)
    if comm is not None and comm.world_size > 1:
        for _, param in network.parameters_and_names():
            param.set_data(comm.broadcast(Tensor(param.asnumpy()), 0, comm.world))
    options = _arrange(network, arrangement)
    scaler = StaticLossScaler() if scaler is None else scaler
    update = Update(ParameterTuple(params), [decays(param) for param in params], kind=optimizer)
    parts = _train_parts(network, arrangement, update, scaler, clip_norm)
    return ParallelStep(
        network,
        _wrapped(parts.cell, batch, options, arrangement),
        parts,
        batch=batch,
        arrangement=arrangement,
        clip_norm=clip_norm,
        weight_decay=weight_decay,
        comm=comm,
        loss_rank=options.loss_rank,
        **rates,
    )


def build_inspected(
    function: str, arguments: Mapping[str, Any]
) -> tuple[nn.Cell, tuple[Tensor, ...], dict[str, Any]]:
    """What `ms_zero.graph.frontend` compiles for a function that returns a step: its cell, inputs and notes.

    Args:
        function: "package.module:function" or "path/to/file.py:function".
        arguments: of the function.

    Raises:
        UserError: there is no such function, or it returns something else.
    """
    step = load_function(function)(**arguments)
    if not isinstance(step, ParallelStep):
        kind = type(step).__name__
        raise UserError(f"graph: {function} returns a {kind}: expected the result of graph.parallelise")
    shapes = {param.name: list(param.shape) for param in step.network.get_parameters()}
    mesh = {axis: getattr(step.mesh, axis) for axis in AXES}
    return step.cell, step.batch, {"parameters": shapes, "mesh": mesh}


def _check_job(mesh: Mesh, comm: Communicator | None) -> None:
    if mesh.world_size == 1 and comm is None:
        return
    if device_target() == "CPU" and mesh.world_size > 1:
        raise UserError(
            "graph: MindSpore's AutoParallel is not for CPU: train with a mesh of one rank here, and look at "
            f"{mesh.describe()} with ms-zero graph inspect"
        )
    size = get_group_size() if comm is None else comm.world_size
    if size != mesh.world_size:
        raise UserError(f"graph: the mesh has {mesh.world_size} ranks ({mesh.describe()}), the job {size}")


def _check_batch(batch: Sequence[Tensor], parts: int) -> None:
    for number, tensor in enumerate(batch):
        if tensor.ndim == 0 or tensor.shape[0] % parts:
            raise UserError(
                f"graph: tensor {number} of the batch, {list(tensor.shape)}, cannot be cut into {parts} "
                "parts along its first dim (microbatches, and ranks of tp and cp where sharding propagates)"
            )


def _arrange(network: nn.Cell, arrangement: Arrangement) -> Options:
    """Give the Cells and operators of a network their stages, recompute and strategies."""
    apply_strategies(network, arrangement.strategies, arrangement.grid)
    cells = {path: cell for path, cell in network.cells_and_names() if path}
    for cell in _named(cells, arrangement.recompute, "recompute"):
        cell.recompute()
    names = ("first", "blocks", "last")
    parts = NamedParts(*(_named(cells, getattr(arrangement, name), name) for name in names))
    options = arrangement.options(len(parts.blocks))
    if options.stages is not None:
        _check_every_parameter_has_a_stage(network, parts, arrangement.zero_stage)
    place_blocks(parts, options)
    return options


def _named(cells: Mapping[str, nn.Cell], patterns: Sequence[str], key: str) -> tuple[nn.Cell, ...]:
    """The Cells that patterns name, in the order of the patterns and then of the network."""
    found: dict[str, nn.Cell] = {}
    for pattern in patterns:
        paths = [path for path in cells if matches(path, pattern)]
        if not paths:
            raise UserError(f"graph: {key}: pattern {pattern} matches no Cell of the network")
        found |= {path: cells[path] for path in paths}
    return tuple(found.values())


def _check_every_parameter_has_a_stage(network: nn.Cell, parts: NamedParts, zero_stage: int) -> None:
    placed: dict[int, set[int]] = {}
    for number, cell in enumerate((*parts.first_cells, *parts.blocks, *parts.last_cells)):
        for param in cell.get_parameters():
            placed.setdefault(id(param), set()).add(number)
    for name, param in network.parameters_and_names():
        if id(param) not in placed:
            raise UserError(
                f"graph: parameter {name} is in none of the Cells that first, blocks and last name: name "
                "its Cell"
            )
        if len(placed[id(param)]) > 1 and zero_stage > 0:
            raise UserError(
                f"graph: parameter {name} is in several Cells: MindSpore 2.10.0 does not sum the gradients "
                f"of what stages share: give each its own, or set zero_stage {zero_stage} to 0"
            )


def _train_parts(
    network: nn.Cell, arrangement: Arrangement, update: Update, scaler: LossScaler, clip_norm: float
) -> TrainParts:
    """The train cell of a network, not wrapped yet."""
    count, mesh, factor = arrangement.microbatches, arrangement.mesh, loss_factor()
    # Shared subgraphs are not for CPU, and sharding propagation cuts some of their reshapes wrongly (2.10.0).
    plain = device_target() == "CPU" or arrangement.propagate
    scaled = (ScaledLoss if plain else ReusedScaledLoss)(network, factor)
    if mesh.pp > 1:
        step = Pipeline(scaled, count)
    else:
        step = GradAccumulation(scaled, count) if count > 1 else scaled
    # Without AutoParallel the gradients of the microbatches are one sum already.
    if mesh.world_size > 1 and (mesh.pp > 1 or count > 1):
        gradients = MicrobatchGradients(update.params, sharded=arrangement.zero_stage > 0)
    else:
        gradients = SameGradients()
    cell = TrainCell(
        step,
        update.params,
        gradients=gradients,
        update=update,
        scaler=scaler,
        factor=factor,
        clip_norm=clip_norm,
    )
    cell.set_train()
    return TrainParts(cell, scaled, update.params, update, scaler, ())


def _wrapped(cell: nn.Cell, batch: Sequence[Tensor], options: Options, arrangement: Arrangement) -> nn.Cell:
    """The train cell inside AutoParallel, if there is more than one rank."""
    if arrangement.mesh.world_size == 1:
        return cell
    mode = "sharding_propagation" if arrangement.propagate else "semi_auto"
    dims = [tensor.ndim for tensor in batch]
    return auto_parallel(cell, options, len(batch), None, dims=dims, mode=mode)
