"""Sequence parallelism: what tensor parallelism leaves whole is cut along the sequence.

Norms, dropout and residual sums lie between regions of cut weights. Each tensor-parallel rank keeps a part of
the tokens there: T / tp consecutive ones, in rank order. Entering a region gathers the sequence, leaving it
sums the partial results and scatters them (g and g-bar of Korthikanti et al. 2022, arXiv:2205.05198): the
volume of the all-reduces that this replaces, and 1 / tp of the activations.

Parameters that are used out there see only a part of the tokens: their gradients are partial sums.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspore import Tensor

from ms_zero.comm import Communicator, Group
from ms_zero.comm.autograd import all_gather, reduce_scatter
from ms_zero.errors import UserError

_SEQUENCE_DIM = 1


@dataclass(frozen=True)
class SplitSequence:
    """The border of regions of cut weights, with the sequence cut outside of them.

    Attributes:
        comm: the communicator.
        group: the tensor-parallel ranks.
    """

    comm: Communicator
    group: Group

    splits_sequence = True

    def enter(self, x: Tensor) -> Tensor:
        """[B, T / tp, ...] of each rank -> the whole sequence, [B, T, ...]."""
        return all_gather(x, self.comm, self.group, _SEQUENCE_DIM)

    def leave(self, x: Tensor) -> Tensor:
        """Partial results of the whole sequence, [B, T, ...] -> this rank's part of their sum."""
        self.span(x.shape[_SEQUENCE_DIM])
        return reduce_scatter(x, self.comm, self.group, _SEQUENCE_DIM)

    def span(self, length: int) -> tuple[int, int]:
        """The tokens [start, stop) of a sequence that this rank keeps.

        Raises:
            UserError: the number of ranks does not divide the length.
        """
        part, rest = divmod(length, self.group.size)
        if rest:
            raise UserError(
                f"sequence parallelism: {self.group.size} tensor-parallel ranks do not divide a sequence of "
                f"{length} tokens: pad it to a multiple"
            )
        return self.group.index * part, (self.group.index + 1) * part

    def own_tokens(self, x: Tensor) -> Tensor:
        """[..., T], one number for each token and the same on all ranks -> this rank's part."""
        start, stop = self.span(x.shape[-1])
        return x[..., start:stop]
