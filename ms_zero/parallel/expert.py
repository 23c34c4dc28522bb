"""Expert parallelism: each rank holds some of the experts, and tokens travel to those that they chose.

The ranks of a group see different data. A rank sorts the copies of its tokens by expert, as it does alone;
then the ranks tell each other how many rows they have for each expert, send the rows to the ranks that hold
the experts (an all-to-all with uneven parts), compute, and send the results back the same way. Backward does
the same with gradients. Each pass moves k copies of each token once in each direction, and those that stay on
their rank, 1/ep of them when experts are used evenly, do not travel.

Rows arrive ordered by rank and are put in the order of experts, those of one expert by rank and then by
token: the order in which one process that had all the data would compute them.

The weights of experts are stacked: dim 0 of each counts the experts. The gradient of an expert is made where
the expert is, of the tokens of all ranks of the group; ranks of other groups that hold the same expert add
theirs, see :attr:`ms_zero.parallel.placement.Placement.parts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from mindspore import Parameter, Tensor, mint, nn

from ms_zero._compat import function_class
from ms_zero.comm import Communicator, Group
from ms_zero.comm.communicator import DTYPES
from ms_zero.errors import UserError
from ms_zero.kernels.buffers import take_rows
from ms_zero.parallel.placement import Box, Placement, Placements


class Experts(Protocol):
    """Some experts.

    Attributes:
        num_experts: how many.
    """

    num_experts: int

    def __call__(self, rows: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Map rows [M, H], sorted by expert, to [M, H]; counts: rows of each expert."""


class Dispatcher(Protocol):
    """What brings tokens to experts."""

    def __call__(self, tokens: Tensor, ids: Tensor, *, weights: Tensor, experts: Experts) -> Tensor:
        """Sum what the experts of each token compute, by weight.

        Args:
            tokens: [N, H].
            ids: int32 [N, k], -1: dropped.
            weights: fp32 [N, k].
            experts: called with the tokens' rows.

        Returns:
            [N, H].
        """


class Layer(Protocol):
    """A layer of experts that can be split.

    Attributes:
        experts: a cell with `num_experts`; dim 0 of each of its own parameters counts them.
        dispatcher: what brings tokens to them.
    """

    experts: nn.Cell
    dispatcher: Dispatcher


class ExpertDispatcher(nn.Cell):
    """Brings tokens to the experts of all ranks of a group, and their results back."""

    fp32_arguments = ("weights",)  # read by ms_zero.precision

    def __init__(self, local: Dispatcher, comm: Communicator, group: Group) -> None:
        """Join the parts.

        Args:
            local: sorts tokens by expert and adds up results, as without expert parallelism.
            comm: the communicator.
            group: the ranks that share the experts; rank i holds the i-th of as many equal parts.
        """
        super().__init__()
        self.local, self.comm, self.group = local, comm, group

    def construct(self, tokens: Tensor, ids: Tensor, *, weights: Tensor, experts: Experts) -> Tensor:
        """See `Dispatcher`; `experts` are those of this rank. Collective."""
        everywhere = _Everywhere(experts, self.comm, self.group)
        return self.local(tokens, ids, weights=weights, experts=everywhere)


@dataclass(frozen=True)
class _Everywhere:
    """The experts of all ranks of a group as one, for rows of this rank. A call is collective."""

    own: Experts
    comm: Communicator
    group: Group

    @property
    def num_experts(self) -> int:
        return self.own.num_experts * self.group.size

    def __call__(self, rows: Tensor, counts: tuple[int, ...]) -> Tensor:
        routes = Routes.agree(counts, self.comm, self.group)
        return _Home.apply(self.own(_Away.apply(rows, routes), routes.counts), routes)


@dataclass(frozen=True)
class Routes:
    """Where the rows of one pass of a layer go.

    A rank that gets no row computes one of zeros, which adds nothing to any gradient: so that what it records
    is like that of the others, and its backward takes part in the exchanges of theirs.

    Attributes:
        comm: the communicator.
        group: the ranks.
        sent: rows that this rank sends to each member.
        received: rows that it gets from each.
        order: int32, number among the rows that arrive -> by expert; None: they are in this order already.
        counts: rows of each expert of this rank.
    """

    comm: Communicator
    group: Group
    sent: tuple[int, ...]
    received: tuple[int, ...]
    order: np.ndarray | None
    counts: tuple[int, ...]

    @classmethod
    def agree(cls, counts: Sequence[int], comm: Communicator, group: Group) -> Routes:
        """Exchange how many rows each rank has for each of all experts. Collective."""
        num_own = len(counts) // group.size
        mine = np.array(counts, np.int32)
        theirs = comm.all_to_all(Tensor(mine), group).asnumpy().reshape(group.size, num_own)
        sent, received = mine.reshape(group.size, num_own).sum(1), theirs.sum(1)
        own = theirs.sum(0)
        if not own.any():
            own[0] = 1
        expert_of = np.repeat(np.tile(np.arange(num_own), group.size), theirs.reshape(-1))
        order = np.argsort(expert_of, kind="stable").astype(np.int32) if num_own > 1 else None
        return cls(comm, group, _ints(sent), _ints(received), order, _ints(own))

    def go(self, rows: Tensor) -> Tensor:
        """This rank's rows, by expert -> those for its experts, by expert."""
        arrived = self.comm.all_to_all(rows, self.group, self.sent, self.received)
        if not sum(self.received):
            return mint.zeros((1, rows.shape[1]), dtype=rows.dtype)
        return arrived if self.order is None else take_rows(arrived, self.order)

    def come_back(self, rows: Tensor) -> Tensor:
        """The way back."""
        if not sum(self.received):
            rows = mint.empty((0, rows.shape[1]), dtype=rows.dtype)
        elif self.order is not None:
            back = np.empty_like(self.order)
            back[self.order] = np.arange(len(back), dtype=np.int32)
            rows = take_rows(rows, back)
        return self.comm.all_to_all(rows, self.group, self.received, self.sent)


class _Away(function_class):
    """Rows to their experts; gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return routes.go(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.routes.come_back(grad), None


class _Home(function_class):
    """Results to where their tokens are; gradients to the experts."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return routes.come_back(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.routes.go(grad), None


def split_experts(
    model: nn.Cell,
    layers: Iterable[Layer],
    comm: Communicator,
    group: Group,
    *,
    placements: Placements | None = None,
) -> Placements:
    """Leave each rank of a group its part of the experts of some layers, in place.

    Parameters keep their names. Those without values (on the meta device) stay so, the others get the values
    of the first rank. Collective.

    Args:
        model: the model with the layers.
        layers: whose experts are split.
        comm: the communicator.
        group: ranks that see different data.
        placements: of the model's parameters so far; None: they are whole.

    Returns:
        Where the parameters lie now.

    Raises:
        UserError: there is no layer, or the ranks do not divide the experts of one.
    """
    placements, layers = placements or Placements(), list(layers)
    if group.size == 1:
        return placements
    if not layers:
        raise UserError(f"expert parallelism: {type(model).__name__} has no layer of experts")
    names = {id(param): name for name, param in model.parameters_and_names()}
    by_name = dict(placements.by_name)
    for layer in layers:
        layer.dispatcher = ExpertDispatcher(layer.dispatcher, comm, group)
        by_name |= _split(layer.experts, names, comm, group, placements)
        layer.experts.num_experts //= group.size
    return Placements(by_name, placements.groups)


def _split(
    experts: nn.Cell, names: Mapping[int, str], comm: Communicator, group: Group, placements: Placements
) -> dict[str, Placement]:
    """Cut the parameters of a cell along dim 0; returns where they lie by name."""
    found = {}
    for attribute, param in list(experts.parameters_and_names(expand=False)):
        name, shape = names[id(param)], tuple(param.shape)
        size = _share(name, shape[0], group.size)
        start, stop = group.index * size, (group.index + 1) * size
        setattr(experts, attribute, _part(param, comm, group, Box.whole(shape).cut(0, start, stop)))
        box = placements.box(name, shape).cut(0, start, stop)
        found[name] = Placement(box, placements.replicas(name), parts=group)
    return found


def _part(param: Parameter, comm: Communicator, group: Group, box: Box) -> Parameter:
    if param.is_meta:
        data = mint.empty(box.shape, dtype=param.dtype, device="meta")
    else:
        first = comm.broadcast(param.data, group.ranks[0], group) if param.dtype in DTYPES else param
        data = Tensor(box.take(first.asnumpy()).copy())
    return Parameter(data, name=param.name, requires_grad=param.requires_grad)


def _share(name: str, num_experts: int, num_ranks: int) -> int:
    """Experts of each rank."""
    if num_experts % num_ranks:
        raise UserError(
            f"expert parallelism: {name}: {num_ranks} ranks do not divide {num_experts} experts: use fewer"
        )
    return num_experts // num_ranks


def _ints(values: np.ndarray) -> tuple[int, ...]:
    return tuple(values.tolist())
