"""ZeRO by the book: what a rank holds and sends, per parameter (Rajbhandari et al. 2020, arXiv:1910.02054).

Psi is the number of parameters, N the ranks that shard, R the replicas of that group (HSDP), k the
microbatches of a step.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class HeldBytes:
    """Bytes per parameter that a rank holds between the last backward and the update."""

    weights: float
    gradients: float
    master: float
    moments: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.weights + self.gradients + self.master + self.moments


def held_bytes(
    stage: int,
    degree: int,
    *,
    weight: int,
    gradient: int,
    master: int,
    moments: int = 8,
    synchronise: bool | None = None,
) -> HeldBytes:
    """Bytes per parameter by stage.

    Mixed precision with 2-byte gradients (weight 2, gradient 2, master 4): 16, 4 + 12/N, 2 + 14/N, 16/N. With
    4-byte gradients 18, 6 + 12/N, 2 + 16/N, 18/N. In fp32 (4, 4, 0) 16, 8 + 8/N, 4 + 12/N, 16/N.

    Args:
        stage: 0 to 3.
        degree: N.
        weight: bytes of a stored weight.
        gradient: bytes of a gradient that is kept until the update.
        master: bytes of the master copy of a weight, 0 without.
        moments: bytes of the optimizer's moments.
        synchronise: whether every microbatch is reduced, so that whole gradients never add up; None: in
            stages 2 and 3. Without, stages 2 and 3 keep whole gradients over the microbatches of a step.
    """
    optimizer_share = degree if stage >= 1 else 1
    whole_gradients = not (stage >= 2 if synchronise is None else synchronise)
    return HeldBytes(
        weights=weight / (degree if stage == 3 else 1),
        gradients=gradient / (1 if whole_gradients else degree),
        master=master / optimizer_share,
        moments=moments / optimizer_share,
    )


@dataclass(frozen=True)
class StepTraffic:
    """How often all parameters or gradients pass through a collective in one step.

    Attributes:
        weight_gathers: all-gathers of weights over the N ranks.
        gradient_scatters: reduce-scatters of gradients over the N ranks.
        gradient_gathers: all-gathers of reduced gradients over the N ranks.
        replica_reduces: all-reduces of 1/N of the gradients over the R replicas.
    """

    weight_gathers: int
    gradient_scatters: int
    gradient_gathers: int
    replica_reduces: int

    def sent_bytes(
        self, psi: float, degree: int, replicas: int, *, weight: int, wire: int, kept: int
    ) -> float:
        """Bytes that a rank sends, as ring collectives count: (N - 1)/N of what passes.

        Args:
            psi: parameters of a rank's model.
            degree: N.
            replicas: R.
            weight: bytes of a stored weight.
            wire: bytes of a gradient on the wire of a reduction.
            kept: bytes of a reduced gradient.
        """
        share = psi * (degree - 1) / degree
        within = weight * self.weight_gathers + wire * self.gradient_scatters + kept * self.gradient_gathers
        across = 2 * (replicas - 1) / replicas * psi / degree * wire * self.replica_reduces
        return share * within + across


def step_traffic(
    stage: int,
    microbatches: int,
    *,
    synchronise: bool | None = None,
    reshard_after_forward: bool = True,
    replicas: int = 1,
) -> StepTraffic:
    """Collectives of a step: with k = 1 and R = 1 the 2, 2, 2 and 3 Psi of the paper.

    In general, in units of Psi (N - 1)/N: stage 0 r + 1, stages 1 and 2 r + 1, stage 3 r + 2 k, or r + k when
    weights stay whole between forward and backward; r is k with ``synchronise``, else 1. Replicas add
    2 (R - 1)/R Psi/N.
    """
    reduces = microbatches if (stage >= 2 if synchronise is None else synchronise) else 1
    gathers = {0: 0, 1: 1, 2: 1, 3: microbatches * (2 if reshard_after_forward else 1)}[stage]
    return StepTraffic(gathers, reduces, int(stage == 0), int(replicas > 1))


def hsdp_traffic(level: int, microbatches: int, *, gathers_again: bool) -> StepTraffic:
    """Collectives of a step with MindSpore's hsdp of level 1, 2 or 3; replicas are not counted.

    Levels 1 and 2 keep what they gathered for all microbatches; level 3 gathers for every forward and, with
    ``gathers_again``, for every backward. Gradients are scattered once a step, from level 2 on in every
    microbatch.
    """
    gathers = microbatches * (2 if gathers_again else 1) if level == 3 else 1
    return StepTraffic(gathers, microbatches if level >= 2 else 1, 0, 0)
