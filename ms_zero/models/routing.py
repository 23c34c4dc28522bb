"""Which experts a token visits and with what weight: the numbers of a router, by numpy.

A router has a score s_i of each expert i for each token. ``softmax`` (Mixtral, arXiv:2401.04088;
DeepSeek-V2, arXiv:2405.04434): s = softmax(logits). ``sigmoid`` (DeepSeek-V3, arXiv:2412.19437):
s_i = 1 / (1 + exp(-l_i)).

Choice: the k experts with the highest s_i + bias_i, in descending order; of equals the lowest number first.
With expert groups only the experts of the best groups count: the score of a group is the highest s_i + bias_i
in it (softmax) or the sum of the two highest (sigmoid). The bias has no part in weights and gradients.

Weight: the score of a chosen expert, divided by the sum of the chosen ones if `renormalise`, times `scaling`.

Capacity: of a sequence of T tokens an expert takes at most ceil(k T / E * capacity_factor) tokens: earlier
tokens come first, whatever their scores. Others are dropped: no expert computes for such a choice, its weight
is 0, and the weights of the token's other choices stay.

Auxiliary loss of a sequence (arXiv:2101.03961; arXiv:2412.19437, section 2.1.2; z-loss arXiv:2202.08906)::

    balance = sum_i f_i P_i      f_i = E / (k T) * tokens that chose i (dropped ones too)
                                 P_i = mean over tokens of s_i / sum_j s_j
    z = mean over tokens of logsumexp(logits)^2
    aux = balance_coefficient * balance + z_coefficient * z

balance is 1 when experts are visited evenly. Nothing reaches beyond a sequence, so every number is the same
in every layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ms_zero.errors import UserError

DROPPED = -1
#: Keeps what is divided by the sum of chosen scores finite.
SMALLEST_SUM = 1e-20


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How a router decides; see the module.

    Attributes:
        top_k: experts that a token visits.
        score: softmax or sigmoid.
        renormalise: whether weights are divided by their sum.
        scaling: factor on the weights.
        groups: equal groups of neighbouring experts.
        top_groups: groups whose experts can be chosen.
        capacity_factor: see the module; None: experts take every token.
        balance_coefficient: of the balance loss.
        z_coefficient: of the z-loss.
    """

    top_k: int
    score: str = "softmax"
    renormalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    top_groups: int = 1
    capacity_factor: float | None = None
    balance_coefficient: float = 0.0
    z_coefficient: float = 0.0

    def check(self, num_experts: int) -> None:
        """Raise UserError when the rules do not fit a number of experts."""
        if num_experts % self.groups or not 1 <= self.top_groups <= self.groups:
            raise UserError(
                f"model: {self.top_groups} of {self.groups} groups of {num_experts} experts: expected groups "
                f"of equal size, and at most all of them"
            )
        choices = num_experts // self.groups * self.top_groups
        if not 1 <= self.top_k <= choices:
            raise UserError(f"model: {self.top_k} experts a token, expected 1 to {choices}")

    @property
    def has_loss(self) -> bool:
        """Whether there is an auxiliary loss."""
        return self.balance_coefficient > 0 or self.z_coefficient > 0


class Choice(NamedTuple):
    """Experts of each token of a batch, int32 [B, T, k].

    Attributes:
        chosen: in descending order of preference.
        kept: the same with -1 for what was dropped.
    """

    chosen: np.ndarray
    kept: np.ndarray


def choose(logits: np.ndarray, bias: np.ndarray | None, rules: Rules) -> Choice:
    """Choose experts by logits [B, T, E] and the bias [E]."""
    preference = scores(logits, rules.score)
    if bias is not None:
        preference = preference + bias
    if rules.groups > 1:
        preference = _within_groups(preference, rules)
    chosen = np.argsort(-preference, axis=-1, kind="stable")[..., : rules.top_k].astype(np.int32)
    if rules.capacity_factor is None:
        return Choice(chosen, chosen)
    return Choice(chosen, _within_capacity(chosen, logits.shape[-1], rules))


def capacity(num_experts: int, length: int, rules: Rules) -> int | None:
    """Tokens of a sequence that an expert takes; None: all."""
    if rules.capacity_factor is None:
        return None
    return math.ceil(rules.top_k * length / num_experts * rules.capacity_factor)


def loads(chosen: np.ndarray, num_experts: int) -> np.ndarray:
    """Tokens that chose each expert, int64 [E]."""
    return np.bincount(chosen.reshape(-1), minlength=num_experts)


def scores(logits: np.ndarray, kind: str) -> np.ndarray:
    """softmax or sigmoid of logits over the last axis."""
    if kind == "sigmoid":
        # Of the two forms the one whose exponential does not overflow.
        small = np.exp(-np.abs(logits))
        return np.where(logits >= 0, 1 / (1 + small), small / (1 + small))
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)


def weigh(logits: np.ndarray, choice: Choice, rules: Rules) -> tuple[np.ndarray, np.ndarray]:
    """Weights [B, T, k] of the choices and the auxiliary loss [B], of the logits' dtype."""
    score = scores(logits, rules.score)
    picked = np.take_along_axis(score, choice.chosen, axis=-1)
    if rules.renormalise:
        picked = picked / (picked.sum(axis=-1, keepdims=True) + logits.dtype.type(SMALLEST_SUM))
    weights = np.where(choice.kept == DROPPED, 0, picked * logits.dtype.type(rules.scaling))
    return weights.astype(logits.dtype, copy=False), _auxiliary(logits, score, choice.chosen, rules)


def weigh_gradient(
    logits: np.ndarray, choice: Choice, rules: Rules, dweights: np.ndarray | None, daux: np.ndarray | None
) -> np.ndarray:
    """The gradient of the logits, given those of what `weigh` returns (None: zero)."""
    score = scores(logits, rules.score)
    dscore = np.zeros_like(score)
    if dweights is not None:
        given = np.where(choice.kept == DROPPED, 0, dweights) * logits.dtype.type(rules.scaling)
        np.put_along_axis(dscore, choice.chosen, _picked_gradient(score, choice.chosen, given, rules), -1)
    dlogits = np.zeros_like(logits)
    if daux is not None and rules.has_loss:
        length = logits.shape[1]
        each = (daux / logits.dtype.type(length))[:, None, None]
        dscore += each * _balance_gradient(score, choice.chosen, rules)
        if rules.z_coefficient:
            factor = 2 * rules.z_coefficient * _logsumexp(logits)[..., None]
            dlogits += each * factor.astype(logits.dtype) * scores(logits, "softmax")
    if rules.score == "sigmoid":
        return dlogits + dscore * score * (1 - score)
    return dlogits + score * (dscore - (dscore * score).sum(axis=-1, keepdims=True))


def updated_bias(bias: np.ndarray, load: np.ndarray, speed: float) -> np.ndarray:
    """The bias after a step, fp32 [E]: experts with less than the mean load gain `speed`, others lose it.

    Args:
        bias: before the step.
        load: tokens of the whole global batch that chose each expert.
        speed: of the update (arXiv:2408.15664).
    """
    step = np.sign(load.mean(dtype=np.float64) - load).astype(np.float32)
    return (bias + np.float32(speed) * step).astype(np.float32)


def _within_groups(preference: np.ndarray, rules: Rules) -> np.ndarray:
    grouped = preference.reshape(*preference.shape[:-1], rules.groups, -1)
    best = -np.sort(-grouped, axis=-1)[..., : 2 if rules.score == "sigmoid" else 1].sum(axis=-1)
    chosen = np.argsort(-best, axis=-1, kind="stable")[..., : rules.top_groups]
    allowed = np.zeros(best.shape, bool)
    np.put_along_axis(allowed, chosen, True, axis=-1)
    return np.where(allowed[..., None], grouped, -np.inf).reshape(preference.shape)


def _within_capacity(chosen: np.ndarray, num_experts: int, rules: Rules) -> np.ndarray:
    limit = capacity(num_experts, chosen.shape[1], rules)
    kept = chosen.copy()
    for sequence in kept.reshape(len(kept), -1):  # choices in the order of the tokens; a view
        order = np.argsort(sequence, kind="stable")
        counts = np.bincount(sequence, minlength=num_experts)
        ranks = np.arange(len(sequence)) - np.repeat(counts.cumsum() - counts, counts)
        sequence[order[ranks >= limit]] = DROPPED
    return kept


def _auxiliary(logits: np.ndarray, score: np.ndarray, chosen: np.ndarray, rules: Rules) -> np.ndarray:
    aux = np.zeros(len(logits), logits.dtype)
    if rules.balance_coefficient:
        mean = (score / score.sum(axis=-1, keepdims=True)).mean(axis=1)
        aux += rules.balance_coefficient * (_frequency(chosen, score) * mean).sum(axis=-1)
    if rules.z_coefficient:
        aux += rules.z_coefficient * np.square(_logsumexp(logits)).mean(axis=1)
    return aux


def _frequency(chosen: np.ndarray, score: np.ndarray) -> np.ndarray:
    """f of the module, [B, E]."""
    num_experts = score.shape[-1]
    counts = np.stack([loads(sequence, num_experts) for sequence in chosen])
    return (counts * (num_experts / chosen[0].size)).astype(score.dtype)


def _picked_gradient(
    score: np.ndarray, chosen: np.ndarray, dpicked: np.ndarray, rules: Rules
) -> np.ndarray:
    """From the gradient of the chosen scores as weights to that of the scores themselves."""
    if not rules.renormalise:
        return dpicked.astype(score.dtype, copy=False)
    picked = np.take_along_axis(score, chosen, axis=-1)
    total = picked.sum(axis=-1, keepdims=True) + score.dtype.type(SMALLEST_SUM)
    shared = (dpicked * picked).sum(axis=-1, keepdims=True) / total
    return ((dpicked - shared) / total).astype(score.dtype, copy=False)


def _balance_gradient(score: np.ndarray, chosen: np.ndarray, rules: Rules) -> np.ndarray:
    """Of the mean over tokens, times the number of tokens."""
    dmean = (rules.balance_coefficient * _frequency(chosen, score)).astype(score.dtype)[:, None, :]
    if rules.score == "softmax":  # adds up to 1 already
        return np.broadcast_to(dmean, score.shape)
    total = score.sum(axis=-1, keepdims=True)
    return (dmean - (dmean * score).sum(axis=-1, keepdims=True) / total) / total


def _logsumexp(logits: np.ndarray) -> np.ndarray:
    highest = logits.max(axis=-1)
    return highest + np.log(np.exp(logits - highest[..., None]).sum(axis=-1))
