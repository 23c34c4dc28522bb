"""Mixture of experts: a router, stacked experts, and what carries tokens between them.

The weights of all experts are stacked in three parameters; each expert computes
down(silu(gate(x)) * up(x)). Tokens go to experts and come back by a dispatcher, which parallelism replaces.
On CPU routers decide and tokens are sorted by numpy, on a device by its operators. PyNative only: how many
tokens an expert gets decides about shapes, so these numbers come to the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_zero import kernels
from ms_zero._compat import finish_queued, function_class, is_recording
from ms_zero.errors import UserError
from ms_zero.kernels.dispatch import select
from ms_zero.models import device_routing
from ms_zero.models.init import Normal, ParameterRule, Zeros
from ms_zero.models.layers import Linear, empty_parameter
from ms_zero.models.llama import LlamaMLP
from ms_zero.models.routing import Choice, Rules, choose, loads, weigh, weigh_gradient


class Routing(NamedTuple):
    """What a router decides about B sequences of T tokens.

    Attributes:
        ids: experts of each token, int32 [B T, k]; -1 for a choice that was dropped.
        weights: of the choices, fp32 [B T, k]; 0 for a dropped one.
        aux: auxiliary loss of each sequence, fp32 [B].
    """

    ids: Tensor
    weights: Tensor
    aux: Tensor


class Sequences(Protocol):
    """Joins sequences of which each rank of a group has some tokens. Arrays are [B, T, ...] or such parts.

    Arrays are joined on the host, tensors on the device.
    """

    def gather(self, part: Tensor) -> np.ndarray:
        """The whole, outside of autograd. Collective."""

    def own(self, whole: np.ndarray) -> np.ndarray:
        """This rank's tokens."""

    def place(self, part: np.ndarray) -> np.ndarray:
        """The whole, with zeros for the tokens of other ranks."""

    def total(self, numbers: np.ndarray) -> np.ndarray:
        """The sum over the ranks. Collective."""

    def whole(self, part: Tensor) -> Tensor:
        """The whole; its gradient reaches this rank's tokens as it is here. Collective."""

    def mine(self, whole: Tensor) -> Tensor:
        """This rank's tokens."""

    def shared(self, x: Tensor) -> Tensor:
        """`x`, which all ranks have alike; its gradients add up. Collective in backward."""


class Router(nn.Cell):
    """Chooses the experts of each token; computes in fp32 under every policy. See `ms_zero.models.routing`.

    weight [E, H]. With `balance_by_bias` also bias [E], which is added to the scores for the choice alone: it
    has no gradient, and `updated_bias` of `ms_zero.models.routing` says how it follows the load.

    Attributes:
        sequences: where ranks have parts of sequences, what joins them: capacity and auxiliary loss are those
            of whole sequences. Each rank returns the whole auxiliary loss, and uses it in its part of the
            loss: the gradients of all parts add up.
    """

    keeps_fp32 = True  # read by ms_zero.precision
    fp32_outputs = (1, 2)

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        rules: Rules,
        *,
        balance_by_bias: bool,
        init_std: float,
        target: str | None = None,
    ) -> None:
        super().__init__()
        self.rules = rules
        on_device = device_routing.route_by(target)
        self.route = select("Router", {"CPU": None, "GPU": on_device, "Ascend": on_device}, target)
        self.weight = empty_parameter(num_experts, hidden_size)
        self.bias = empty_parameter(num_experts) if balance_by_bias else None
        if balance_by_bias:
            self.bias.requires_grad = False
        self.linear = kernels.Linear()
        self.parameter_rules = {
            "weight": ParameterRule(Normal(init_std), decay=True),
            "bias": ParameterRule(Zeros(), decay=False),
        }
        self.sequences: Sequences | None = None
        self.num_experts = num_experts
        vars(self)["loads"] = None  # of recorded forwards, on the host or on the device

    def construct(self, x: Tensor) -> Routing:
        """Route x [B, T, H]."""
        logits = self.linear(x.astype(ms.float32), self.weight)
        route = self._route_on_host if self.route is None else self._route_on_device
        ids, weights, aux, load = route(logits)
        # Recorded once: evaluation records nothing, and of a recomputed forward only the second run does.
        if self.bias is not None and is_recording():
            vars(self)["loads"] = load() if self.loads is None else self.loads + load()
        top_k = self.rules.top_k
        return Routing(ids.reshape(-1, top_k), weights.reshape(-1, top_k), aux)

    def _route_on_device(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Callable[[], Tensor]]:
        joined = self.sequences
        whole = logits if joined is None else joined.whole(logits)
        kept, weights, aux, chosen = self.route(whole, self.bias, self.rules)
        if joined is not None:
            kept, weights, chosen = (joined.mine(each) for each in (kept, weights, chosen))
            aux = joined.shared(aux)
        return kept, weights, aux, lambda: device_routing.loads(chosen, self.num_experts)

    def _route_on_host(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Callable[[], np.ndarray]]:
        finish_queued()
        bias = None if self.bias is None else self.bias.asnumpy()
        joined = self.sequences
        whole = logits if joined is None else Tensor.from_numpy(joined.gather(logits))
        choice = choose(whole.asnumpy(), bias, self.rules)
        own = choice if joined is None else Choice(*map(joined.own, choice))
        chosen, kept = (Tensor.from_numpy(part) for part in choice)
        weights, aux = _Weighed.apply(logits, whole, chosen, kept, self.rules, joined)
        return Tensor.from_numpy(own.kept), weights, aux, lambda: loads(own.chosen, self.num_experts)

    def take_loads(self) -> np.ndarray:
        """Tokens that chose each expert in recorded forwards since the last call, int64 [E]."""
        taken, vars(self)["loads"] = self.loads, None
        if taken is None:
            return np.zeros(self.num_experts, np.int64)
        return taken.asnumpy() if isinstance(taken, Tensor) else taken


class _Weighed(function_class):
    """Weights and auxiliary loss of choices; keeps the logits of whole sequences and the choices."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        whole: Tensor,
        chosen: Tensor,
        kept: Tensor,
        rules: Rules,
        joined: Sequences | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(whole, chosen, kept)
        ctx.set_materialize_grads(False)
        ctx.rules, ctx.joined = rules, joined
        weights, aux = weigh(whole.asnumpy(), Choice(chosen.asnumpy(), kept.asnumpy()), rules)
        own = weights if joined is None else joined.own(weights)
        return Tensor.from_numpy(own), Tensor.from_numpy(aux)

    @staticmethod
    def backward(ctx: Any, dweights: Tensor | None, daux: Tensor | None) -> tuple[Tensor | None, ...]:
        whole, chosen, kept = (tensor.asnumpy() for tensor in ctx.saved_tensors)
        dweights, daux = (None if grad is None else grad.asnumpy() for grad in (dweights, daux))
        if ctx.joined is not None:
            dweights = None if dweights is None else ctx.joined.place(dweights)
            daux = None if daux is None else ctx.joined.total(daux)
        grad = weigh_gradient(whole, Choice(chosen, kept), ctx.rules, dweights, daux)
        if ctx.joined is not None:
            grad = ctx.joined.own(grad)
        return Tensor.from_numpy(grad), None, None, None, None, None


class Experts(nn.Cell):
    """The routed experts: gate_proj and up_proj [E, F, H], down_proj [E, H, F]."""

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        ffn_size: int,
        *,
        init_std: float,
        residual_std: float,
        target: str | None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts  # those that are held here
        self.gate_proj = empty_parameter(num_experts, ffn_size, hidden_size)
        self.up_proj = empty_parameter(num_experts, ffn_size, hidden_size)
        self.down_proj = empty_parameter(num_experts, hidden_size, ffn_size)
        self.linear = kernels.GroupedLinear(target)
        self.act = kernels.SwiGLU(target)
        inner = ParameterRule(Normal(init_std), decay=True)
        outer = ParameterRule(Normal(residual_std), decay=True)
        self.parameter_rules = {"gate_proj": inner, "up_proj": inner, "down_proj": outer}

    def construct(self, rows: Tensor, counts: tuple[int, ...]) -> Tensor:
        """Map rows [M, H], sorted by expert, to [M, H]; counts: rows of each expert that is held here."""
        gate = self.linear(rows, self.gate_proj, counts)
        up = self.linear(rows, self.up_proj, counts)
        return self.linear(self.act(gate, up), self.down_proj, counts)


class LocalDispatcher(nn.Cell):
    """Brings tokens to experts that are all on this rank.

    What takes its place is called alike; ``fp32_arguments`` keeps the weights in fp32 under every policy.
    """

    fp32_arguments = ("weights",)  # read by ms_zero.precision

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        self.sort = kernels.SortByExpert(target)
        self.rows = kernels.Embedding(target)
        self.combine = kernels.CombineRows(target)

    def construct(self, tokens: Tensor, ids: Tensor, weights: Tensor, experts: Any) -> Tensor:
        """Sum what the experts of each token compute, by weight.

        Args:
            tokens: [N, H].
            ids: int32 [N, k], -1: dropped.
            weights: fp32 [N, k].
            experts: `Experts`, or what else has `num_experts` and is called like it.

        Returns:
            [N, H] of the tokens' dtype, summed in fp32 in the order of the choices.
        """
        order, places, counts = self.sort(ids, experts.num_experts)
        return self.combine(experts(self.rows(tokens, order), counts), places, weights=weights)


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """What a mixture of experts is made of.

    Attributes:
        num_experts: routed experts.
        ffn_hidden_size: inner width of one of them.
        rules: how the router decides.
        shared_ffn_hidden_size: inner width of the MLP that every token visits; 0: there is none.
        shared_gate: whether sigmoid(w x), a number for each token, multiplies that MLP (Qwen2-MoE).
        bias_speed: how much the routers' biases change in a step to balance the load; None: they have none.
    """

    num_experts: int
    ffn_hidden_size: int
    rules: Rules
    shared_ffn_hidden_size: int = 0
    shared_gate: bool = False
    bias_speed: float | None = None

    def __post_init__(self) -> None:
        self.rules.check(self.num_experts)
        if self.shared_gate and not self.shared_ffn_hidden_size:
            raise UserError("model: shared_gate without shared_ffn_hidden_size: there is nothing to gate")


class MoE(nn.Cell):
    """A router, routed experts, and optionally an MLP that every token visits; see `Mixture`."""

    fp32_outputs = (1,)  # read by ms_zero.precision

    def __init__(
        self, hidden_size: int, mixture: Mixture, *, init_std: float, residual_std: float, target: str | None
    ) -> None:
        super().__init__()
        stds = {"init_std": init_std, "residual_std": residual_std}
        num_experts, shared_size = mixture.num_experts, mixture.shared_ffn_hidden_size
        has_bias = mixture.bias_speed is not None
        self.router = Router(
            hidden_size,
            num_experts,
            mixture.rules,
            balance_by_bias=has_bias,
            init_std=init_std,
            target=target,
        )
        self.experts = Experts(num_experts, hidden_size, mixture.ffn_hidden_size, target=target, **stds)
        self.dispatcher = LocalDispatcher(target)
        self.shared = LlamaMLP(hidden_size, shared_size, target=target, **stds) if shared_size else None
        self.shared_gate = None
        if mixture.shared_gate:
            self.shared_gate = Linear(hidden_size, 1, bias=False, init_std=init_std)
        self.sigmoid = ops.Sigmoid()

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map x [B, T, H] to [B, T, H] and the auxiliary loss of each sequence, fp32 [B]."""
        ids, weights, aux = self.router(x)  # hooks make a plain tuple of it
        tokens = x.reshape(-1, x.shape[-1])
        y = self.dispatcher(tokens, ids, weights=weights, experts=self.experts)
        y = y.reshape(x.shape)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = self.sigmoid(self.shared_gate(x)) * shared
            y = y + shared
        return y, aux


def routers(model: nn.Cell) -> Iterator[tuple[str, Router]]:
    """The routers of a model by path, in order."""
    for path, cell in model.cells_and_names():
        if isinstance(cell, Router):
            yield path, cell


def take_loads(model: nn.Cell) -> dict[str, np.ndarray]:
    """Loads of the routers that balance by bias since the last call: name of the bias -> int64 [E].

    They are those of this rank: add them up over all that share a global batch. Recomputed forwards count
    once, forwards without gradients not at all.
    """
    return {f"{path}.bias": cell.take_loads() for path, cell in routers(model) if cell.bias is not None}

