"""A whole training step as one compiled graph, for AutoParallel."""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops
from mindspore.parallel.nn import GradAccumulation, MicroBatchInterleaved, Pipeline

from ms_zero import models
from ms_zero.config import OffloadConfig, OptimConfig, RunConfig
from ms_zero.graph.network import EXTRA_ARGUMENTS, LossNetwork, ReusedScaledLoss, ScaledLoss, loss_factor
from ms_zero.graph.reduce import MicrobatchGradients, SameGradients
from ms_zero.graph.scale import ClipDecision, GlobalSquares, WithDecision
from ms_zero.graph.seqpipe import SequenceParts
from ms_zero.graph.update import GRAD_SCALE_AT, Update, host_flags, scalars_parameter
from ms_zero.kernels import reference
from ms_zero.kernels.dispatch import resolve_target
from ms_zero.precision.scaler import LossScaler, StaticLossScaler


class TrainCell(nn.Cell):
    """Forward, backward, one decision for all ranks, and the update, skipped when a gradient is not finite.

    Before a call the host sets ``loss_factor`` (token weight times loss scale) and the scalars of the update
    (``decayed_scalars``, ``plain_scalars``; see `ms_zero.graph.update.step_scalars`, with grad_scale 1).

    Args:
        network: differentiated; maps the tensors of a step to the sum of its scaled losses.
        params: trained.
        gradients: joins the gradients of microbatches.
        update: of the same parameters.
        scaler: of the loss.
        factor: the Parameter in ``network`` that scales the loss.
        clip_norm: largest gradient norm; 0: no clipping.
    """

    def __init__(
        self,
        network: nn.Cell,
        params: ParameterTuple,
        *,
        gradients: nn.Cell,
        update: Update,
        scaler: LossScaler,
        factor: Parameter,
        clip_norm: float,
    ) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.update, self.scaler = network, update, scaler
        self.loss_and_gradients = ops.value_and_grad(network, None, params)
        self.gradients, self.squares, self.decide = gradients, GlobalSquares(), ClipDecision(clip_norm)
        scale_at = GRAD_SCALE_AT[update.kind]
        self.with_decision = WithDecision(scale_at, reference.FOUND_INF, reference.NUM_SCALARS)
        self.loss_factor, self.assign = factor, ops.Assign()
        # Of a pipeline MindSpore 2.10.0 leaves the first output away, and what it alone needs: the loss.
        self.step_loss = Parameter(Tensor(np.float32(0.0)), name="step_loss", requires_grad=False)
        self.decayed_scalars = scalars_parameter("decayed_scalars")
        self.plain_scalars = scalars_parameter("plain_scalars")

    def construct(self, *batch: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make a step on all microbatches of this step, [samples, ...] each.

        Returns:
            (scaled loss, norm of the unscaled gradient before clipping, whether the update was applied), 0-d.
        """
        loss, grads = self.loss_and_gradients(*batch)
        grads = self.gradients(grads)
        norm, finite, factor = self.decide(self.squares(grads), self.scaler.current)
        decayed = self.with_decision(self.decayed_scalars, factor, finite)
        plain = self.with_decision(self.plain_scalars, factor, finite)
        done = self.update(grads, decayed, plain)
        done = ops.depend(done, self.scaler(ops.depend(finite, done)))
        done = ops.depend(done, self.assign(self.step_loss, loss.reshape(())))
        return ops.depend(loss, done), norm, finite


@dataclass(frozen=True)
class TrainParts:
    """A train cell and what it is made of.

    Attributes:
        cell: to be compiled, alone or inside AutoParallel; its inputs are input_ids, labels and ``extras``.
        network: the cell that is differentiated (one microbatch after another).
        params: trained, in order, with the names of the plain model.
        update: the optimizer.
        scaler: of the loss.
        extras: further inputs.
    """

    cell: TrainCell
    network: nn.Cell
    params: ParameterTuple
    update: Update
    scaler: LossScaler
    extras: tuple[str, ...]


def build_train_cell(
    config: RunConfig,
    model: nn.Cell,
    *,
    loss_sum: nn.Cell | None = None,
    aux_sum: nn.Cell | None = None,
    scaler: LossScaler | None = None,
    wrap: Callable[[nn.Cell], nn.Cell] | None = None,
    gradients: Callable[[ParameterTuple], nn.Cell] | None = None,
    plain: nn.Cell | None = None,
    target: str | None = None,
) -> TrainParts:
    """The step of a run as one graph. Nothing here communicates or needs a running job.

    Args:
        config: of the run.
        model: plain, or a twin of it with strategies and the same parameter names; with values.
        loss_sum: see `ms_zero.graph.network.LossNetwork`, as for the next.
        aux_sum: of auxiliary losses.
        scaler: of the loss; None: a fixed scale of 1.
        wrap: makes of the network of one microbatch that of a step; None: Pipeline with stages, else
            GradAccumulation with several microbatches, else nothing.
        gradients: makes the cell that joins the gradients of microbatches; None: what fits ``wrap``.
        plain: whose layers say which parameters decay; None: ``model``.
        target: see `ms_zero.kernels.dispatch`.
    """
    extras = batch_extras(config)
    factor = loss_factor()
    on_cpu = resolve_target(target).startswith("CPU")
    scaled = ScaledLoss if on_cpu else ReusedScaledLoss
    network = scaled(LossNetwork(model, extras, loss_sum=loss_sum, aux_sum=aux_sum), factor)
    params = trained_parameters(model)
    step = _wrapped(config, network, model) if wrap is None else wrap(network)
    joined = default_gradients(config, params) if gradients is None else gradients(params)
    decays = model if plain is None else plain
    update = build_update(config.optim, decays, params, target, host_share=host_share(config.offload))
    scaler = StaticLossScaler(1.0) if scaler is None else scaler
    cell = TrainCell(
        step,
        params,
        gradients=joined,
        update=update,
        scaler=scaler,
        factor=factor,
        clip_norm=config.optim.clip_norm,
    )
    cell.set_train()
    return TrainParts(cell, network, params, update, scaler, extras)


def batch_extras(config: RunConfig) -> tuple[str, ...]:
    """Which of EXTRA_ARGUMENTS the batches of a run have."""
    asked = {"position_ids": config.data.reset_positions, "document_starts": config.data.reset_attention}
    return tuple(name for name in EXTRA_ARGUMENTS if asked[name])


def trained_parameters(model: nn.Cell) -> ParameterTuple:
    """The parameters that want a gradient, in the order of the model."""
    return ParameterTuple([param for _, param in model.parameters_and_names() if param.requires_grad])


def build_update(
    config: OptimConfig,
    model: nn.Cell,
    params: ParameterTuple,
    target: str | None = None,
    *,
    host_share: float = 0.0,
) -> Update:
    """The optimizer of a model whose layers say which of their parameters decay.

    ``host_share``: of the optimizer state, what is kept in host memory.
    """
    decaying = models.decay_names(model)
    decays = [param.name in decaying for param in params]
    on_host = host_flags([prod(param.shape) for param in params], host_share)
    return Update(params, decays, kind=config.kind, target=target, on_host=on_host)


def host_share(config: OffloadConfig) -> float:
    """The share of the optimizer state that a config keeps in host memory."""
    return config.fraction if config.optimizer == "cpu" else 0.0


def _wrapped(config: RunConfig, network: nn.Cell, model: nn.Cell) -> nn.Cell:
    count, parts = config.train.accumulation_steps, config.parallel.micro_batch_interleave
    if parts > 1:
        network = MicroBatchInterleaved(network, parts)
    if config.parallel.pp > 1:
        if config.parallel.schedule == "seqpipe":
            network = SequenceParts(network, model.counter, config.parallel.sequence_parts)
        return Pipeline(network, count)
    return GradAccumulation(network, count) if count > 1 else network


def default_gradients(config: RunConfig, params: ParameterTuple) -> nn.Cell:
    """The cell that joins the gradients of the microbatches of a config."""
    if config.parallel.pp > 1 or config.train.accumulation_steps > 1:
        return MicrobatchGradients(params, sharded=config.parallel.zero_stage > 0)
    return SameGradients()
