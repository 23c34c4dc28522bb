"""Token losses over the vocabulary."""

import mindspore as ms
from mindspore import Tensor, nn, ops


class CrossEntropySum(nn.Cell):
    """Sum of -log softmax(logits)[label] over the labels that are not `ignore_index`.

    logits [N, V] of any float dtype, labels int32 [N], each in [0, V) or equal to `ignore_index`; returns an
    fp32 0-d tensor, computed in fp32. Without a single valid label the sum and its gradient are exactly 0.
    """

    def __init__(self, ignore_index: int = -100) -> None:
        super().__init__()
        self.ignore_index = ignore_index
        self.log_softmax = ops.LogSoftmax(-1)
        self.gather = ops.GatherD()
        self.not_equal = ops.NotEqual()
        self.sum = ops.ReduceSum()

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the sum."""
        log_probs = self.log_softmax(logits.astype(ms.float32))
        valid = self.not_equal(labels, self.ignore_index)
        # An ignored label is read at column 0; multiplying by 0 removes its value and its gradient.
        columns = (labels * valid.astype(labels.dtype)).reshape(-1, 1)
        picked = self.gather(log_probs, 1, columns).reshape(-1)
        return self.sum(-picked * valid.astype(ms.float32))
