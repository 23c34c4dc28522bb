"""One decision about the gradient of a step, inside the graph: how long is it, is it finite."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops


class GlobalSquares(nn.Cell):
    """The sum of squares of all gradients, fp32 0-d; over all ranks where AutoParallel compiles it.

    The compiler adds the sums of ranks that hold parts of a parameter after the operator marked "grad_scale",
    as it does for MindSpore's own clipping by global norm, and those of pipeline stages before the root.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sum, self.square = ops.ReduceSum(False), ops.Square()
        self.add, self.sqrt = ops.AddN(), ops.Sqrt()
        self.expand = ops.ExpandDims().add_prim_attr("grad_scale", True)

    def construct(self, grads: tuple[Tensor, ...]) -> Tensor:
        """Return the sum."""
        squares = ()
        for grad in grads:
            squares = (*squares, self.expand(self.sum(self.square(grad.astype(ms.float32)), ()), 0))
        norm = self.sqrt(self.add(squares))
        return (norm * norm).reshape(())


class ClipDecision(nn.Cell):
    """From the sum of squares of scaled gradients to the factor on them; see `ms_zero.optim.clip`.

    Args:
        clip_norm: largest norm; 0 turns clipping off.
    """

    def __init__(self, clip_norm: float) -> None:
        super().__init__()
        self.clip_norm = float(clip_norm)
        self.is_finite, self.sqrt, self.select = ops.IsFinite(), ops.Sqrt(), ops.Select()
        self.one, self.zero = Tensor(np.float32(1)), Tensor(np.float32(0))

    def construct(self, sum_of_squares: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return (norm of the unscaled gradient, whether it is finite, factor on the scaled gradient), 0-d.

        Args:
            sum_of_squares: of the scaled gradient, over all parameters and ranks.
            scale: the loss scale that is in it.
        """
        finite = self.is_finite(sum_of_squares)
        norm = self.sqrt(sum_of_squares) / scale
        factor = self.one
        if self.clip_norm > 0:
            clipped = self.clip_norm / self.select(norm > self.clip_norm, norm, self.one)
            factor = self.select(norm > self.clip_norm, clipped, self.one)
        return norm, finite, self.select(finite, factor / scale, self.zero)


class WithDecision(nn.Cell):
    """Put a decision into the scalars of an update: a factor on what scales gradients, and whether to skip.

    Args:
        grad_scale_at: position of what scales gradients.
        found_inf_at: position of the flag to skip.
        num_scalars: how many there are.
    """

    def __init__(self, grad_scale_at: int, found_inf_at: int, num_scalars: int) -> None:
        super().__init__()
        one_hot = np.eye(num_scalars, dtype=np.float32)
        self.at_scale, self.at_inf = Tensor(one_hot[grad_scale_at]), Tensor(one_hot[found_inf_at])
        self.others = Tensor(1 - one_hot[grad_scale_at])

    def construct(self, scalars: Tensor, factor: Tensor, finite: Tensor) -> Tensor:
        """Return the scalars, fp32 [16]; in ``scalars`` nothing is skipped."""
        found_inf = 1.0 - finite.astype(ms.float32)
        return scalars * (self.others + self.at_scale * factor) + self.at_inf * found_inf
