"""What share of the hardware's peak rates a training step reaches: one set of constants for every model.

They were chosen once, together, against the public Ascend results that ``ms_zero.plan.published`` lists, and
are used unchanged for every device. Nothing is tuned by row, model or layout.
"""

from __future__ import annotations

from dataclasses import dataclass

from ms_zero.plan.memory import IMBALANCE


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of peaks, and what hides behind what.

    Args:
        matmul: of the matrix peak, by large dense multiplications.
        expert_matmul: of the matrix peak, by the grouped multiplications of experts.
        imbalance: tokens of the busiest expert-parallel rank over the mean; the others wait for it.
        attention: of the matrix peak, by fused attention on the keys that a causal mask leaves.
        memory: of the memory bandwidth, by vector operations and the optimizer.
        dp_overlap: of forward or backward time, that can hide gathers and reductions of data parallelism.
        cp_overlap: of attention time, that can hide the ring of context parallelism.
        offload_overlap: of forward or backward time, that can hide transfers to and from the host.
        layer_seconds: launching the operators of a layer's forward.
        step_seconds: what a step costs once: norm, scalars, logging.

    Tensor- and expert-parallel collectives hide behind nothing: the next operator needs their result.

    """

    matmul: float = 0.64
    expert_matmul: float = 0.40
    imbalance: float = IMBALANCE
    attention: float = 0.30
    memory: float = 0.70
    dp_overlap: float = 0.70
    cp_overlap: float = 0.80
    offload_overlap: float = 0.80
    layer_seconds: float = 1e-4
    step_seconds: float = 2e-2


EFFICIENCY = Efficiency()
"""The published set."""
