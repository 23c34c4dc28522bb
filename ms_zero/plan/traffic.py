"""How many elements leave a rank, by mesh axis: the published formulas, forward and backward together.

With b s tokens of width h, t = tp, c = cp, e = ep, N = dp:

- tensor parallelism 8 b s h (t - 1)/t a layer, as all-reduces or as reduce-scatters and all-gathers;
- context parallelism (ring) K and V forward, K, V and their gradients backward, (c - 1)/c of each;
- expert parallelism two all-to-alls forward and two backward of k copies of a token, (e - 1)/e of which leave;
- a pipeline b s h at every border, each way;
- data parallelism 2 (N - 1)/N of the parameters, 3 (N - 1)/N at stage 3 (ZeRO paper).
"""

from __future__ import annotations


def tensor_parallel(tokens: float, hidden_size: int, degree: int) -> float:
    """Elements of one layer; ``tokens`` are those of the whole tensor-parallel group."""
    return 8 * tokens * hidden_size * (degree - 1) / degree


def context_parallel(tokens: float, key_value_size: int, degree: int) -> float:
    """Elements of one layer; ``tokens`` of the whole sequence, ``key_value_size`` of K and V together."""
    return 3 * tokens * key_value_size * (degree - 1) / degree


def expert_parallel(tokens: float, hidden_size: int, top_k: int, degree: int) -> float:
    """Elements of one layer; ``tokens`` are those that a rank routes."""
    return 4 * tokens * hidden_size * top_k * (degree - 1) / degree


def pipeline(tokens: float, hidden_size: int, tensor_degree: int = 1) -> float:
    """Elements over one border in one direction; split where tensor-parallel ranks scatter and gather."""
    return tokens * hidden_size / tensor_degree


def data_parallel(
    parameters: float, degree: int, stage: int, microbatches: int = 1, reshard: bool = True
) -> float:
    """Elements of an optimizer step; ``parameters`` are those of a rank before sharding.

    Stages 0 and 1 reduce once a step, stages 2 and 3 in every microbatch. Stage 0 sends gradients twice
    (all-reduce); stages 1 and 2 gather the updated weights once; stage 3 gathers in every microbatch for
    forward, and again for backward when it reshards in between.
    """
    share = parameters * (degree - 1) / degree
    reduces = microbatches if stage >= 2 else 1
    if stage == 0:
        return 2 * share
    if stage < 3:
        return share * (reduces + 1)
    return share * microbatches * (3 if reshard else 2)
