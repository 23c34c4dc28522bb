"""Training steps of any network in compiled graphs, over data-parallel ranks.

Three graphs are compiled once and called from the host: a microbatch (forward, backward, gradients added up),
the end of the step (sums over ranks, loss, lengths), and the update. The number of microbatches may differ
from step to step. The decision between the last two is the host's and equal on all ranks, because the reduced
gradients are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import mindspore as ms
import numpy as np
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops

from ms_zero.comm import Communicator, Group
from ms_zero.errors import UserError
from ms_zero.graph.network import loss_factor
from ms_zero.graph.reduce import SumOverRanks
from ms_zero.graph.update import Update, step_scalars
from ms_zero.kernels.dispatch import resolve_target
from ms_zero.kernels.graph_optimizer import SumOfSquares
from ms_zero.optim.clip import GradientDecision, decide
from ms_zero.precision.scaler import LossScaler, StaticLossScaler

_FP32_BYTES = 4
_OWN_SUM = ("CPU", "GPU-custom", "Ascend-custom")


@dataclass(frozen=True)
class Summary:
    """Global facts about one step, equal on all ranks.

    Attributes:
        loss: sum over microbatches and ranks of loss times weight.
        sum_of_squares: of the summed gradient; not finite when any element is not.
    """

    loss: float
    sum_of_squares: float


@contextmanager
def graph_mode() -> Iterator[None]:
    """Cells called inside are compiled."""
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=before)


class _Microbatch(nn.Cell):
    """Adds the gradients of one microbatch, and its loss, to those of the step."""

    def __init__(
        self, network: nn.Cell, params: ParameterTuple, sums: ParameterTuple, total: Parameter
    ) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.sums, self.total = network, sums, total
        self.factor = loss_factor()
        self.add = ops.AssignAdd()
        self.loss_and_gradients = ops.value_and_grad(self.scaled, None, params, has_aux=True)

    def scaled(self, *batch: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.network(*batch).astype(ms.float32)
        return loss * self.factor, loss

    def construct(self, *batch: Tensor) -> Tensor:
        (_, loss), grads = self.loss_and_gradients(*batch)
        done = self.add(self.total, loss.astype(ms.float32).reshape((1,)))
        for index in range(len(self.sums)):
            done = ops.depend(self.add(self.sums[index], grads[index].astype(ms.float32)), done)
        return loss


class _End(nn.Cell):
    """Sums over ranks; returns the loss of all, fp32 [1], and the sum of squares of each gradient, [n]."""

    def __init__(
        self, sums: ParameterTuple, total: Parameter, over_ranks: nn.Cell | None, target: str | None
    ) -> None:
        super().__init__(auto_prefix=False)
        self.sums, self.total, self.over_ranks = sums, total, over_ranks
        self.squares = SumOfSquares(target) if resolve_target(target) in _OWN_SUM else _Squares()
        self.assign, self.concat = ops.Assign(), ops.Concat()

    def construct(self) -> tuple[Tensor, Tensor]:
        tensors = (*self.sums, self.total)
        if self.over_ranks is not None:
            tensors = self.over_ranks(tensors)
        squares = ()
        for index in range(len(self.sums)):
            if self.over_ranks is not None:
                self.assign(self.sums[index], tensors[index])
            squares = (*squares, self.squares(tensors[index].reshape((-1,))).reshape((1,)))
        return tensors[len(self.sums)] * 1.0, self.concat(squares)


class _Squares(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.sum, self.square = ops.ReduceSum(), ops.Square()

    def construct(self, x: Tensor) -> Tensor:
        return self.sum(self.square(x))


class _Apply(nn.Cell):
    """Updates and sets the sums back to zero."""

    def __init__(self, update: Update, sums: ParameterTuple, total: Parameter) -> None:
        super().__init__(auto_prefix=False)
        self.update, self.sums, self.total = update, sums, total
        self.assign, self.zeros_like = ops.Assign(), ops.ZerosLike()

    def construct(self, decayed: Tensor, plain: Tensor) -> Tensor:
        done = self.update(self.sums, decayed, plain)
        for kept in (*self.sums, self.total):
            done = ops.depend(done, self.assign(kept, self.zeros_like(ops.depend(kept, done))))
        return done


class GraphStep:
    """A network, its optimizer and the gradients of a step.

    One step: :meth:`forward_backward` for each microbatch; :meth:`reduce`; :meth:`update` or :meth:`discard`.
    :meth:`finish` does the last two.

    Attributes:
        params: trained, in order.
        update_cell: the optimizer.
        scaler: of the loss.
        num_updates: updates applied so far.
    """

    def __init__(
        self,
        network: nn.Cell,
        update: Update,
        *,
        weight_decay: float,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        scaler: LossScaler | None = None,
        group: Group | None = None,
        bucket_bytes: int = 25 * 2**20,
        target: str | None = None,
    ) -> None:
        """Join the parts; nothing is compiled before the first call.

        Args:
            network: maps the tensors of a microbatch to its summed loss, a 0-d float; with values.
            update: of the parameters that are trained.
            weight_decay: decoupled decay coefficient.
            beta1: decay rate of the mean (adamw).
            beta2: decay rate of the mean square (adamw).
            eps: added to the root (adamw).
            scaler: of the loss; None: a fixed scale of 1.
            group: ranks that see different data; None: this one only.
            bucket_bytes: gradients that are summed over ranks together.
            target: see `ms_zero.kernels.dispatch`.

        Raises:
            UserError: a trained parameter is not fp32.
        """
        self.network, self.update_cell, self.params = network, update, update.params
        wrong = next((param for param in self.params if param.dtype != ms.float32), None)
        if wrong is not None:
            raise UserError(f"graph: parameter {wrong.name} is {wrong.dtype}: expected float32")
        self.scaler = StaticLossScaler() if scaler is None else scaler
        self.loss_scale, self.num_updates = self.scaler.scale, 0
        self._rates = {"beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
        self.sums = self.params.clone(prefix="grad_sum", init="zeros")
        total = Parameter(Tensor(np.zeros(1, np.float32)), name="loss_sum", requires_grad=False)
        self._microbatch = _Microbatch(network, self.params, self.sums, total).set_train()
        shapes = [*(param.shape for param in self.params), (1,)]
        over_ranks = None
        if group is not None and group.size > 1:
            over_ranks = SumOverRanks(group.handle, shapes, max(1, bucket_bytes // _FP32_BYTES))
        self._end = _End(self.sums, total, over_ranks, target)
        self._apply = _Apply(update, self.sums, total)
        self._factor, self._weight = 1.0, 0.0

    def forward_backward(self, *batch: Tensor, weight: float) -> None:
        """Add one microbatch: its loss times ``weight``, which is that of all ranks and of the whole step."""
        factor = float(np.float32(weight * self.loss_scale))
        if factor != self._factor:
            self._microbatch.factor.set_data(Tensor(np.float32(factor)))
            self._factor = factor
        self._weight = weight
        with graph_mode():
            self._microbatch(*batch)

    def reduce(self) -> Summary:
        """Sum loss and gradients over the ranks."""
        with graph_mode():
            loss, squares = self._end()
        with np.errstate(over="ignore", invalid="ignore"):
            squared = np.float32(squares.asnumpy().sum(dtype=np.float64))
        loss = float(loss.asnumpy()[0]) * self._weight
        return Summary(loss, float(squared) / self.loss_scale**2)

    def update(self, *, lr: float, grad_scale: float = 1.0) -> None:
        """Apply the gradients times ``grad_scale``; the loss scale is taken out, and follows."""
        self.num_updates += 1
        self._run_update(lr, grad_scale / self.loss_scale, self.num_updates)
        self.loss_scale = self.scaler.update(True)

    def discard(self) -> None:
        """Drop the gradients of a step that is skipped; the loss scale follows."""
        self._run_update(0.0, 0.0, max(1, self.num_updates), skip=True)
        self.loss_scale = self.scaler.update(False)

    def finish(self, *, lr: float, clip_norm: float = 0.0) -> tuple[Summary, GradientDecision]:
        """Reduce, decide once for all ranks, and update or discard.

        Args:
            lr: learning rate.
            clip_norm: largest gradient norm; 0: no clipping.
        """
        summary = self.reduce()
        decision = decide(summary.sum_of_squares, clip_norm)
        if decision.finite:
            self.update(lr=lr, grad_scale=decision.scale)
        else:
            self.discard()
        return summary, decision

    def load_scale(self, state: dict) -> None:
        """Continue with a saved state of the loss scale; that of another kind of scaler says nothing here."""
        if state.get("kind") == self.scaler.state()["kind"]:
            self.scaler.load_state(state)
        self.loss_scale = self.scaler.scale

    def gradients(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and value of each gradient of the step, loss scale taken out; after :meth:`reduce`, of all."""
        for param, kept in zip(self.params, self.sums, strict=True):
            with np.errstate(over="ignore", invalid="ignore"):
                yield param.name, kept.asnumpy() / np.float32(self.loss_scale)

    def graphs(self) -> dict[str, nn.Cell]:
        """What is compiled, for inspection: "microbatch", "end" and "update".

        The first takes the tensors of a microbatch, the second nothing, the third twice fp32 [16].
        """
        return {"microbatch": self._microbatch, "end": self._end, "update": self._apply}

    def held_bytes(self) -> dict[str, int]:
        """Bytes on this rank: "weights" that are trained, "gradients", "optimizer"."""
        size = sum(prod(param.shape) for param in self.params) * _FP32_BYTES
        return {"weights": size, "gradients": size, "optimizer": size * len(self.update_cell.state())}

    def _run_update(self, lr: float, grad_scale: float, step: int, *, skip: bool = False) -> None:
        kind = self.update_cell.kind
        scalars = step_scalars(kind, lr=lr, step=step, grad_scale=grad_scale, skip=skip, **self._rates)
        with graph_mode():
            self._apply(*map(Tensor, scalars))


def build_step(
    network: nn.Cell,
    *,
    optimizer: str = "adamw",
    decays: Callable[[Parameter], bool] = lambda param: param.ndim > 1,
    weight_decay: float = 0.1,
    scaler: LossScaler | None = None,
    comm: Communicator | None = None,
    target: str | None = None,
    **rates: float,
) -> GraphStep:
    """Train any Cell in compiled graphs.

    Args:
        network: maps the tensors of a microbatch to its summed loss, a 0-d float. All its parameters that
            want a gradient are trained; they need values, in fp32, and different names.
        optimizer: "adamw" or "sgd".
        decays: whether weight decay applies to a parameter; by default to those of two or more dims.
        weight_decay: its coefficient.
        scaler: of the loss; see `ms_zero.precision.scaler`.
        comm: of the job whose ranks see different data, and start from the values of rank 0; None: this
            process only.
        target: see `ms_zero.kernels.dispatch`.
        rates: ``beta1``, ``beta2``, ``eps``.

    Raises:
        UserError: no parameter wants a gradient, one has no values or is not fp32, or two share a name.

    Collective when there is a ``comm``.
    """
    params = [param for _, param in network.parameters_and_names() if param.requires_grad]
    check_parameters(params)
    if comm is not None and comm.world_size > 1:
        for _, param in network.parameters_and_names():
            param.set_data(comm.broadcast(Tensor(param.asnumpy()), 0, comm.world))
    parameters = ParameterTuple(params)
    update = Update(parameters, [decays(param) for param in params], kind=optimizer, target=target)
    return GraphStep(
        network,
        update,
        weight_decay=weight_decay,
        scaler=scaler,
        group=None if comm is None else comm.world,
        target=target,
        **rates,
    )


def check_parameters(params: Sequence[Parameter]) -> None:
    """Raise UserError when parameters cannot be trained in a graph."""
    if not params:
        raise UserError("graph: the network has no parameter that wants a gradient")
    names = [param.name for param in params]
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise UserError(f"graph: two parameters are named {double}: give each a name of its own")
    empty = next((param.name for param in params if param.is_meta), None)
    if empty is not None:
        raise UserError(f"graph: parameter {empty} has no values: initialise the model first")
