"""The pipeline recipe: a plain model split over stages, each of them sharded and run as by the eager engine.

A model of one's own takes part by a :class:`ms_zero.pipeline.stage.Chain`; `chain_of` has those of this
package's models. Microbatches of a step are collected and then run together, as the schedule says.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ms_zero import models
from ms_zero.checkpoint import Checkpoint
from ms_zero.comm import Communicator, Group, ProcessMesh
from ms_zero.data import NO_RESETS, DocumentResets
from ms_zero.errors import UserError
from ms_zero.kernels import PutOff
from ms_zero.optim.optimizer import Optimizer
from ms_zero.parallel import Placement, Placements, Replicas
from ms_zero.pipeline.balance import balance, explicit, stage_of
from ms_zero.pipeline.runtime import Outcome, Pipeline, Tensors
from ms_zero.pipeline.schedule import Schedule
from ms_zero.pipeline.stage import Chain, Hidden, Staged, blocks_of, cell_at, shared_names, split
from ms_zero.recipes.context import Samples
from ms_zero.recipes.eager import EagerEngine
from ms_zero.recipes.expert import Balancer
from ms_zero.recipes.state import load_state
from ms_zero.zero.sharded import Sharded

# Chains of this package's models


def chain_of(model: nn.Cell) -> Chain:
    """How a model of this package is split; raises UserError for another."""
    known = {models.GPT: _GPT, models.Llama: _LLAMA, models.MoEDecoder: _MOE}
    if type(model) not in known:
        raise UserError(f"pipeline: {type(model).__name__} has no Chain: pass one that says how it is split")
    return known[type(model)]


def _gpt_begin(cell: nn.Cell, inputs: Mapping[str, Any]) -> Tensor:
    body, input_ids = cell.transformer, inputs["input_ids"]
    positions = inputs.get("position_ids")
    x = body.wte(input_ids) + body.wpe(body.positions(input_ids) if positions is None else positions)
    return x if body.dropout is None else body.dropout(x)


def _gpt_context(cell: nn.Cell, hidden: Tensor, inputs: Mapping[str, Any]) -> tuple:
    return (_mask(cell.transformer.document_mask, hidden, inputs),)


def _gpt_end(cell: nn.Cell, hidden: Tensor) -> Tensor:
    return cell.lm_head(cell.transformer.ln_f(hidden)).astype(ms.float32)


def _llama_begin(cell: nn.Cell, inputs: Mapping[str, Any]) -> Tensor:
    x = cell.model.embed_tokens(inputs["input_ids"])
    return x if cell.model.dropout is None else cell.model.dropout(x)


def _llama_context(cell: nn.Cell, hidden: Tensor, inputs: Mapping[str, Any]) -> tuple:
    cos, sin = cell.model.rotary_emb(inputs["input_ids"], inputs.get("position_ids"))
    return cos, sin, _mask(cell.model.document_mask, hidden, inputs)


def _llama_end(cell: nn.Cell, hidden: Tensor) -> Tensor:
    return cell.lm_head(cell.model.norm(hidden)).astype(ms.float32)


def _moe_begin(cell: nn.Cell, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    no_loss = np.zeros(inputs["input_ids"].shape[0], np.float32)
    return _llama_begin(cell, inputs), Tensor(no_loss)


def _moe_context(cell: nn.Cell, hidden: tuple[Tensor, Tensor], inputs: Mapping[str, Any]) -> tuple:
    return _llama_context(cell, hidden[0], inputs)


def _moe_end(cell: nn.Cell, hidden: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, aux = hidden
    return _llama_end(cell, x), aux


def _mask(document_mask: nn.Cell, hidden: Tensor, inputs: Mapping[str, Any]) -> Tensor | None:
    starts = inputs.get("document_starts")
    return None if starts is None else document_mask(starts, hidden)


_GPT = Chain(
    blocks="transformer.h",
    first=("transformer.wte", "transformer.wpe"),
    last=("transformer.ln_f", "lm_head"),
    begin=_gpt_begin,
    context=_gpt_context,
    end=_gpt_end,
)
_LLAMA = Chain(
    blocks="model.layers",
    first=("model.embed_tokens",),
    last=("model.norm", "lm_head"),
    begin=_llama_begin,
    context=_llama_context,
    end=_llama_end,
)
_MOE = replace(_LLAMA, begin=_moe_begin, context=_moe_context, end=_moe_end)

# Splitting


@dataclass(frozen=True)
class Part:
    """What one rank has of a split model.

    Attributes:
        cell: its stages.
        placements: of the parameters, those that stages share included.
        trained: all parameters of the plain model in definition order, and whether they are trained.
        blocks: of every stage.
        placement: the rank of each stage.
        stages: stage of each parameter of this rank; None: of several.
    """

    cell: Staged
    placements: Placements
    trained: dict[str, bool]
    blocks: tuple[range, ...]
    placement: tuple[int, ...]
    stages: Mapping[str, int | None]

    def stage_of(self, name: str) -> int | None:
        """The stage that a parameter of this rank belongs to; None: several, or the rank has only one."""
        return self.stages[name] if len(self.cell.stages) > 1 else None

    def describe(self) -> str:
        """The blocks of every stage, in a few words."""
        stages = (f"{part.start} to {part.stop - 1}" if part else "none" for part in self.blocks)
        return f"blocks of the stages: {', '.join(stages)}"


def split_model(
    model: nn.Cell,
    chain: Chain,
    pmesh: ProcessMesh,
    *,
    placement: Sequence[int] | None = None,
    counts: Sequence[int] | None = None,
    placements: Placements | None = None,
) -> Part:
    """Split a model, in place, into stages. Collective.

    Args:
        model: the plain model, or one that was cut by other techniques.
        chain: how it runs.
        pmesh: its ``pp`` axis has the ranks.
        placement: the rank of each stage; None: one stage a rank, in their order.
        counts: blocks of each stage; None: such that stages have about equally many parameters.
        placements: of its parameters; None: they are whole.

    Raises:
        UserError: the counts do not add up, or a rank has no stage.
    """
    placements = placements or Placements()
    group = pmesh.group("pp")
    placement = tuple(range(group.size) if placement is None else placement)
    if set(placement) != set(range(group.size)):
        raise UserError(
            f"pipeline: stages lie on ranks {sorted(set(placement))}, expected each of the {group.size} ranks"
        )
    shared = shared_names(model, chain)
    trained = {name: param.requires_grad for name, param in model.parameters_and_names()}
    shapes = {name: tuple(param.shape) for name, param in model.parameters_and_names()}
    if counts is None:
        ranges = _balance_parameters(model, chain, len(placement), placements)
    else:
        ranges = explicit(counts, len(blocks_of(model, chain).name_cells()), len(placement))
    mine = [stage for stage, owner in enumerate(placement) if owner == group.index]
    cell = split(model, chain, ranges, mine)
    cell.dropout_state = getattr(model, "dropout_state", None)
    by_name = dict(placements.by_name)
    first, last = sorted((placement[0], placement[-1]))
    if shared and first != last and group.index in (first, last):
        ends = pmesh.comm.new_group((group.ranks[first], group.ranks[last]), "pp_ends")
        for name in shared:
            replicas = (*placements.replicas(name), Replicas(ends, is_partial=True))
            by_name[name] = Placement(placements.box(name, shapes[name]), replicas)
    stages = {}
    for name, _ in cell.parameters_and_names():
        own = _stages_of(name, chain, ranges, shared) & set(mine)
        stages[name] = own.pop() if len(own) == 1 else None
    return Part(cell, Placements(by_name, (*placements.groups, group)), trained, ranges, placement, stages)


def _stages_of(name: str, chain: Chain, ranges: Sequence[range], shared: Sequence[str]) -> set[int]:
    """The stages that use a parameter."""
    if name.startswith(f"{chain.blocks}."):
        number = name.removeprefix(f"{chain.blocks}.").split(".")[0]
        return {stage_of(int(number), ranges)}
    ends = {0: chain.first, len(ranges) - 1: chain.last}
    if name in shared:
        return set(ends)
    return {stage for stage, paths in ends.items() if any(name.startswith(f"{path}.") for path in paths)}


def _balance_parameters(
    model: nn.Cell, chain: Chain, num_stages: int, placements: Placements
) -> tuple[range, ...]:
    # By whole parameters: ranks that hold parts of different sizes have to come to the same result.
    sizes = {
        id(param): prod(placements.box(name, tuple(param.shape)).global_shape)
        for name, param in model.parameters_and_names()
    }

    def cost(*cells: nn.Cell) -> int:
        return sum(sizes[id(param)] for cell in cells for param in cell.get_parameters())

    first, last = (cost(*(cell_at(model, path) for path in paths)) for paths in (chain.first, chain.last))
    blocks = [cost(block) for block in blocks_of(model, chain)]
    return balance(blocks, num_stages, first=first, last=last)


# Running


@dataclass(frozen=True)
class _Microbatch:
    """What the stages need of a microbatch; ``set_position`` prepares dropout."""

    inputs: dict[str, Tensor]
    labels: np.ndarray
    weight: float
    set_position: Callable[[], None]


# (the model's result, labels) -> summed token loss
_Loss = Callable[[Hidden, np.ndarray], Tensor]


class _Work:
    """The actions of one rank on the microbatches of a step; see `ms_zero.pipeline.runtime.Work`."""

    def __init__(
        self, cell: Staged, sharded: Sharded, microbatches: Sequence[_Microbatch], loss: _Loss
    ) -> None:
        self._cell, self._sharded, self._microbatches, self._loss = cell, sharded, microbatches, loss

    def key(self, microbatch: int) -> tuple[int, ...]:
        return tuple(self._microbatches[microbatch].inputs["input_ids"].shape)

    def forward(self, stage: int, microbatch: int, inputs: Tensors) -> Tensors:
        current = self._microbatches[microbatch]
        current.set_position()
        self._sharded.select((stage, microbatch))
        # Where something is only added to what is carried, its gradient arrives as the very tensor that it
        # started from; on CPU the framework cannot give that to a leaf (it has no kernel Clone).
        carried = tuple(other * 1.0 for other in inputs[1:])
        result = self._cell(stage, inputs[0] if inputs else None, current.inputs, carried=carried)
        if stage == self._cell.num_stages - 1:
            result = self._loss(result, current.labels)
        return result if isinstance(result, tuple) else (result,)

    def loss_gradient(self, microbatch: int, loss: Tensor) -> Tensor:
        weight = self._microbatches[microbatch].weight * self._sharded.loss_scale
        return Tensor(np.float32(weight)).astype(loss.dtype)

    def around_backward(
        self, stage: int, microbatch: int, *, weights: bool, last: bool
    ) -> AbstractContextManager:
        self._sharded.select((stage, microbatch), stage)
        return self._sharded.microbatch(last=last) if weights else self._sharded.putting_off()

    def weights(self, stage: int, microbatch: int, waiting: PutOff, *, last: bool) -> None:
        self._sharded.select((stage, microbatch), stage)
        self._sharded.finish(waiting, last=last)


class PipelineEngine(EagerEngine):
    """Runs the microbatches of a step through the stages of a pipeline.

    As the eager engine, with these differences: every rank of a pipeline is given the same microbatches, and
    they are computed when the last one of the step has been given.
    """

    def __init__(
        self,
        part: Part,
        sharded: Sharded,
        optimizer: Optimizer,
        *,
        comm: Communicator,
        group: Group,
        stages: Group,
        schedule: Callable[[int], Schedule],
        resets: DocumentResets = NO_RESETS,
        seed: int = 0,
        notes: Sequence[str] = (),
        loss_sum: nn.Cell | None = None,
        spans_of: Callable[[int], Sequence[tuple[int, int]]] | None = None,
        balancer: Balancer | None = None,
        samples: Samples | None = None,
    ) -> None:
        """Join the parts.

        Args:
            part: this rank's stages.
            sharded: holds their parameters.
            optimizer: updates them.
            comm: the communicator.
            group: as in `EagerEngine`.
            stages: the ranks of this pipeline.
            schedule: number of microbatches -> what is done in which order; on the placement of `part`.
            resets: what restarts where a document begins.
            seed: of dropout.
            notes: what the log should say about the parts.
            loss_sum: as in `EagerEngine`.
            spans_of: as in `EagerEngine`.
            balancer: as in `EagerEngine`.
            samples: as in `EagerEngine`.
        """
        super().__init__(
            part.cell,
            sharded,
            optimizer,
            comm=comm,
            group=group,
            resets=resets,
            seed=seed,
            notes=notes,
            loss_sum=loss_sum,
            spans_of=spans_of,
            balancer=balancer,
            samples=samples,
        )
        self._part, self._stages, self._schedule = part, stages, cache(schedule)
        self._pipeline = Pipeline(comm, stages)
        self._waiting: list[_Microbatch] = []
        self.outcome = Outcome()

    def forward_backward(
        self,
        input_ids: np.ndarray,
        labels: np.ndarray,
        document_starts: np.ndarray | None = None,
        *,
        weight: float,
        last: bool,
        step: int = 0,
        sample_numbers: Sequence[int] = (),
    ) -> None:
        """Add one microbatch to the step; the last one runs them all. Arguments as in `EagerEngine`."""
        inputs = self._inputs(input_ids, document_starts)

        def set_position() -> None:
            self._set_position(step, sample_numbers, input_ids.shape[1])

        self._waiting.append(_Microbatch(inputs, self._samples.labels(labels), weight, set_position))
        if last:
            self._run_step()

    def loss_sum(
        self, input_ids: np.ndarray, labels: np.ndarray, document_starts: np.ndarray | None = None
    ) -> float:
        """As in `EagerEngine`; equal on the ranks of the pipeline."""
        inputs = self._inputs(input_ids, document_starts)
        microbatch = _Microbatch(inputs, self._samples.labels(labels), 1.0, lambda: None)
        with self._without_dropout():
            outcome = self._pipeline.evaluate(self._part.placement, 1, self._work([microbatch]))
        loss = self._everywhere(outcome.losses.get(0))
        return float(self._samples.total(loss.reshape(())).asnumpy())

    def first_nonfinite(self) -> str | None:
        """Name of the first parameter, in definition order, whose reduced gradient has an inf or nan."""
        found = [shard.name for shard, values in self.gradient_shards() if not np.isfinite(values).all()]
        everywhere = {name for names in self._comm.exchange(found) for name in names}
        return next((name for name in self._part.trained if name in everywhere), None)

    def load_state(self, checkpoint: Checkpoint) -> None:
        """As in `EagerEngine`; each rank reads its stages."""
        load_state(self.sharded, self.optimizer, checkpoint, elsewhere=self._part.trained)

    def _run_step(self) -> None:
        microbatches, self._waiting = self._waiting, []
        self.outcome = self._pipeline.run(self._schedule(len(microbatches)), self._work(microbatches))
        total = None
        for number, loss in sorted(self.outcome.losses.items()):
            weighted = loss * microbatches[number].weight
            total = weighted if total is None else total + weighted
        self._loss_of_step = self._everywhere(total)

    def _work(self, microbatches: Sequence[_Microbatch]) -> _Work:
        return _Work(self.model, self.sharded, microbatches, self._loss_of)

    def _everywhere(self, loss: Tensor | None) -> Tensor:
        """The loss of the last stage on all ranks of the pipeline, [1]."""
        own = Tensor(np.zeros(1, np.float32)) if loss is None else loss.reshape((1,))
        return self._comm.all_reduce(own, self._stages)
