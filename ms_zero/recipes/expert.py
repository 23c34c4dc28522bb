"""Models with experts: which layers expert parallelism splits, whole sequences, biases that follow the load.

A router may balance its experts by a bias that has no gradient: after a step it rises for experts with less
than the mean load and falls for the others (Wang et al. 2024, arXiv:2408.15664). The load is that of the
whole global batch, so the ranks that share it add theirs up; all that hold a bias come to the same one.
"""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, nn

from ms_zero.comm import Communicator, Group, ProcessMesh
from ms_zero.models.moe import MoE, routers, take_loads
from ms_zero.models.routing import updated_bias
from ms_zero.parallel import Placements
from ms_zero.parallel.context import ContextPart, JoinedSamples
from ms_zero.parallel.expert import split_experts
from ms_zero.zero.sharded import Sharded


def cut_experts(model: nn.Cell, pmesh: ProcessMesh, placements: Placements) -> Placements:
    """Split the experts of a model over the mesh's ``ep`` axis; with one rank there nothing changes.

    Raises:
        UserError: the model has no experts, or the ranks do not divide them.
    """
    layers = [cell for _, cell in model.cells_and_names() if isinstance(cell, MoE)]
    return split_experts(model, layers, pmesh.comm, pmesh.group("ep"), placements=placements)


def join_sequences(model: nn.Cell, pmesh: ProcessMesh, method: str) -> None:
    """Let routers see whole sequences where the mesh's ``cp`` ranks have parts of them."""
    part = ContextPart(pmesh.comm, pmesh.group("cp"), method)
    if part.group.size > 1:
        for _, router in routers(model):
            router.sequences = JoinedSamples(part)


def bias_names(model: nn.Cell) -> frozenset[str]:
    """The parameters that `Balancer` writes: fp32, whole on every rank, outside of buckets."""
    return frozenset(f"{path}.bias" for path, router in routers(model) if router.bias is not None)


class Balancer:
    """Moves the biases of a model's routers after each applied step."""

    def __init__(
        self, model: nn.Cell, sharded: Sharded, comm: Communicator, group: Group, *, speed: float
    ) -> None:
        """Join the parts.

        Args:
            model: with routers.
            sharded: keeps their biases.
            comm: the communicator.
            group: the ranks that share a global batch.
            speed: what a bias moves by in a step.
        """
        self._model, self._sharded, self._comm, self._group, self._speed = model, sharded, comm, group, speed

    def apply(self) -> None:
        """Move each bias by the load since the last step. Collective over the group."""
        own = take_loads(self._model)
        if not own:
            return
        flat = Tensor(np.concatenate(list(own.values())).astype(np.int32))
        total, start = self._comm.all_reduce(flat, self._group).asnumpy(), 0
        for name, load in own.items():
            bias = self._sharded.kept[name].asnumpy()
            moved = updated_bias(bias, total[start : start + load.size], self._speed)
            self._sharded.write_kept(name, moved)
            start += load.size

    def discard(self) -> None:
        """Forget the load of a step that was not applied."""
        take_loads(self._model)
