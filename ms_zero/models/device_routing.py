"""The numbers of a router by MindSpore's operators, where the logits are: see `ms_zero.models.routing`.

Nothing comes to the host, and gradients are those of the operators.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import mindspore as ms
from mindspore import Tensor, mint, ops

from ms_zero.kernels import sorting
from ms_zero.models.routing import DROPPED, SMALLEST_SUM, Rules, capacity


class Routed(NamedTuple):
    """What a router decides about B sequences of T tokens.

    Attributes:
        kept: experts of each token, int32 [B, T, k]; -1 for a choice that was dropped.
        weights: of the choices, fp32 [B, T, k].
        aux: auxiliary loss of each sequence, fp32 [B].
        chosen: like `kept`, dropped ones too.
    """

    kept: Tensor
    weights: Tensor
    aux: Tensor
    chosen: Tensor


def route_by(target: str | None) -> Callable[[Tensor, Tensor | None, Rules], Routed]:
    """A function that chooses and weighs experts by fp32 logits [B, T, E] and the bias [E] on a device."""
    ascending = sorting.ascending_of(target)

    def route(logits: Tensor, bias: Tensor | None, rules: Rules) -> Routed:
        score = _scores(logits, rules.score)
        chosen = _choose(ops.stop_gradient(score), bias, rules, ascending)
        counts, kept = _fill(chosen, logits.shape[-1], rules, ascending)
        aux = _auxiliary(logits, score, counts, rules)
        return Routed(kept, _weigh(score, chosen, kept, rules), aux, chosen)

    return route


def loads(chosen: Tensor, num_experts: int) -> Tensor:
    """Tokens that chose each expert, int64 [E]."""
    experts = ops.arange(0, num_experts, dtype=ms.int32)
    return (chosen.reshape(-1, 1) == experts).astype(ms.int64).sum(0)


def _scores(logits: Tensor, kind: str) -> Tensor:
    return ops.Sigmoid()(logits) if kind == "sigmoid" else ops.Softmax(-1)(logits)


def _choose(score: Tensor, bias: Tensor | None, rules: Rules, ascending: sorting.Ascending) -> Tensor:
    """int32 [B, T, k]."""
    preference = score if bias is None else score + bias
    if rules.groups > 1:
        preference = _within_groups(preference, rules, ascending)
    return _best(preference, rules.top_k, ascending).astype(ms.int32)


def _best(values: Tensor, count: int, ascending: sorting.Ascending) -> Tensor:
    """Places of the highest values in descending order, of equals the lowest first."""
    return ascending(-values)[1][..., :count]


def _within_groups(preference: Tensor, rules: Rules, ascending: sorting.Ascending) -> Tensor:
    grouped = preference.reshape(*preference.shape[:-1], rules.groups, -1)
    num_counted = 2 if rules.score == "sigmoid" else 1
    best = -ascending(-grouped)[0][..., :num_counted].sum(-1)
    chosen = _best(best, rules.top_groups, ascending).astype(ms.int32)
    allowed = chosen.expand_dims(-1) == ops.arange(0, rules.groups, dtype=ms.int32)
    is_allowed = allowed.astype(ms.float32).sum(-2) > 0
    return mint.where(is_allowed.expand_dims(-1), grouped, float("-inf")).reshape(preference.shape)


def _fill(
    chosen: Tensor, num_experts: int, rules: Rules, ascending: sorting.Ascending
) -> tuple[Tensor, Tensor]:
    """Tokens of each sequence that chose each expert, int64 [B, E], and the choices without dropped ones."""
    batch, length, _ = chosen.shape
    ids = chosen.reshape(batch, -1)  # in the order of the tokens
    experts, order = ascending(ids)
    stops = sorting.stops_of(experts, num_experts)
    starts = mint.cat((stops[:, :1] * 0, stops[:, :-1]), -1)
    limit = capacity(num_experts, length, rules)
    if limit is None:
        return stops - starts, chosen
    ranks = sorting.inverse(order, ascending) - mint.gather(starts, -1, ids.astype(ms.int64))
    kept = mint.where(ranks < limit, ids, DROPPED).astype(ms.int32)
    return stops - starts, kept.reshape(chosen.shape)


def _weigh(score: Tensor, chosen: Tensor, kept: Tensor, rules: Rules) -> Tensor:
    picked = mint.gather(score, -1, chosen.astype(ms.int64))
    if rules.renormalise:
        picked = picked / (picked.sum(-1, keepdims=True) + SMALLEST_SUM)
    return picked * ((kept != DROPPED).astype(score.dtype) * rules.scaling)


def _auxiliary(logits: Tensor, score: Tensor, counts: Tensor, rules: Rules) -> Tensor:
    batch, length, num_experts = logits.shape
    aux = mint.zeros((batch,), dtype=logits.dtype)
    if rules.balance_coefficient:
        frequency = counts.astype(score.dtype) * (num_experts / (rules.top_k * length))
        mean = (score / score.sum(-1, keepdims=True)).mean(1)
        aux = aux + rules.balance_coefficient * (frequency * mean).sum(-1)
    if rules.z_coefficient:
        aux = aux + rules.z_coefficient * ops.square(_logsumexp(logits)).mean(1)
    return aux


def _logsumexp(logits: Tensor) -> Tensor:
    highest = ops.stop_gradient(ops.ReduceMax()(logits, -1))
    return highest + ops.log(ops.exp(logits - highest.expand_dims(-1)).sum(-1))
