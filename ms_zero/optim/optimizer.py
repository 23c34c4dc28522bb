"""AdamW and SGD over flat fp32 tensors.

An optimizer updates a list of one-dimensional tensors in place. It does not know whether a tensor is a whole
bucket or the chunk that one rank owns; whoever built the list does.
"""

from collections.abc import Sequence

import numpy as np
from mindspore import Tensor

from ms_zero.kernels import adamw_update, sgd_update


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019), bias-corrected.

    ``p -= lr * weight_decay * p``, then ``p -= lr * m_hat / (sqrt(v_hat) + eps)``.

    Attributes:
        state: "exp_avg" and "exp_avg_sq", each a list parallel to the parameters.
        num_updates: updates applied so far; a skipped step does not count.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        decay: Sequence[bool],
        *,
        beta1: float = 0.9,
        beta2: float = 0.95,
        eps: float = 1e-8,
        weight_decay: float = 0.1,
    ) -> None:
        """Create zero moments.

        Args:
            params: flat fp32 tensors, updated in place.
            decay: for each tensor, whether weight decay applies to it.
            beta1: decay rate of the mean.
            beta2: decay rate of the mean square.
            eps: added to the root of the corrected mean square.
            weight_decay: decoupled decay coefficient.
        """
        self.params = list(params)
        self.num_updates = 0
        self.state = {"exp_avg": _zeros_like(self.params), "exp_avg_sq": _zeros_like(self.params)}
        self._weight_decay = [weight_decay if applies else 0.0 for applies in decay]
        self._betas_eps = {"beta1": beta1, "beta2": beta2, "eps": eps}

    def step(self, grads: Sequence[Tensor], *, lr: float, grad_scale: float = 1.0) -> None:
        """Apply one update with gradients multiplied by ``grad_scale``."""
        self.num_updates += 1
        moments = zip(self.state["exp_avg"], self.state["exp_avg_sq"], strict=True)
        for param, (exp_avg, exp_avg_sq), grad, weight_decay in zip(
            self.params, moments, grads, self._weight_decay, strict=True
        ):
            adamw_update(
                param,
                exp_avg,
                exp_avg_sq,
                grad,
                lr=lr,
                weight_decay=weight_decay,
                step=self.num_updates,
                grad_scale=grad_scale,
                **self._betas_eps,
            )


class SGD:
    """Plain gradient descent without momentum, for comparisons in which rounding must not be amplified."""

    def __init__(self, params: Sequence[Tensor], decay: Sequence[bool], *, weight_decay: float = 0.0) -> None:
        """Arguments as in :class:`AdamW`."""
        self.params = list(params)
        self.num_updates = 0
        self.state: dict[str, list[Tensor]] = {}
        self._weight_decay = [weight_decay if applies else 0.0 for applies in decay]

    def step(self, grads: Sequence[Tensor], *, lr: float, grad_scale: float = 1.0) -> None:
        """Apply one update with gradients multiplied by ``grad_scale``."""
        self.num_updates += 1
        for param, grad, weight_decay in zip(self.params, grads, self._weight_decay, strict=True):
            sgd_update(param, grad, lr=lr, weight_decay=weight_decay, grad_scale=grad_scale)


Optimizer = AdamW | SGD


def _zeros_like(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [Tensor(np.zeros(tensor.shape, np.float32)) for tensor in tensors]
