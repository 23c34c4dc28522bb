"""What is differentiated: a model with its loss, for compiled graphs."""

from collections.abc import Sequence

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, lazy_inline, nn

from ms_zero import kernels

# Arguments of a model besides input_ids, in the order in which a batch has them.
EXTRA_ARGUMENTS = ("position_ids", "document_starts")


class LossNetwork(nn.Cell):
    """A language model and the summed loss of its predictions: tensors of a batch -> fp32 0-d.

    Args:
        model: maps input_ids int32 [B, T], position_ids and document_starts (int32 [B, T] or None) to logits
            [B, T, V], or to these and an auxiliary loss of each sequence [B] (or None).
        extras: which of EXTRA_ARGUMENTS follow input_ids and labels in a batch, in that order.
        loss_sum: maps logits [B T, V] and labels int32 [B T] to the summed loss; None:
            `ms_zero.kernels.CrossEntropySum`.
        aux_sum: maps auxiliary losses and labels [B, T] to what is added; None: nothing is.
    """

    def __init__(
        self,
        model: nn.Cell,
        extras: Sequence[str] = (),
        *,
        loss_sum: nn.Cell | None = None,
        aux_sum: nn.Cell | None = None,
    ) -> None:
        super().__init__(auto_prefix=False)  # parameters keep their names
        self.model = model
        self.loss_sum = kernels.CrossEntropySum() if loss_sum is None else loss_sum
        self.aux_sum = aux_sum
        self.position_at, self.starts_at = (
            extras.index(name) if name in extras else -1 for name in EXTRA_ARGUMENTS
        )

    def construct(self, input_ids: Tensor, labels: Tensor, *extras: Tensor) -> Tensor:
        """Return the sum over the labels that are not ignored."""
        positions = extras[self.position_at] if self.position_at >= 0 else None
        starts = extras[self.starts_at] if self.starts_at >= 0 else None
        logits, aux = self.model(input_ids, positions, starts), None
        if isinstance(logits, tuple):
            logits, aux = logits
        loss = self.loss_sum(logits.reshape((-1, logits.shape[-1])), labels.reshape((-1,)))
        if aux is None or self.aux_sum is None:
            return loss
        return loss + self.aux_sum(aux, labels)


def loss_factor() -> Parameter:
    """What the summed loss is multiplied by before it is differentiated: token weight times loss scale."""
    return Parameter(Tensor(np.float32(1.0)), name="loss_factor", requires_grad=False)


class ScaledLoss(nn.Cell):
    """The loss of a microbatch times a factor, for wrappers that add up microbatches inside the graph."""

    def __init__(self, network: nn.Cell, factor: Parameter) -> None:
        super().__init__(auto_prefix=False)
        self.network, self.factor = network, factor

    def construct(self, *batch: Tensor) -> Tensor:
        """Return the scaled loss, fp32 0-d."""
        return self.network(*batch).astype(ms.float32) * self.factor


class ReusedScaledLoss(ScaledLoss):
    """The same, compiled once for all microbatches, as MindSpore's Pipeline asks for; not for CPU."""

    @lazy_inline
    def __init__(self, network: nn.Cell, factor: Parameter) -> None:
        super().__init__(network, factor)
