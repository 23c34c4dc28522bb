"""Causal attention."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_zero.kernels.dispatch import select


class _CausalAttentionComposed(nn.Cell):
    """Attention by two batched products, with the [B, H, T, T] probabilities kept for backward."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.bias_add = ops.BiasAdd()
        self.softmax = ops.Softmax(-1)
        self.combine = ops.BatchMatMul()
        masks: dict[tuple[int, str], Tensor] = {}

        def causal_mask(length: int, half: bool) -> Tensor:
            if (length, half) not in masks:
                # exp() of a masked score is 0, and adding a real score does not overflow the dtype.
                dtype, value = (np.float16, -3e4) if half else (np.float32, -1e9)
                masks[length, half] = Tensor(np.triu(np.full((length, length), value, dtype), 1).reshape(-1))
            return masks[length, half]

        # constexpr: runs as Python in both modes (in graph mode at compile time), so a mask is built once.
        self.causal_mask = ms.constexpr(causal_mask)

    def construct(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        batch, heads, length, head_dim = q.shape
        kv_heads = k.shape[1]
        # The query heads of one key/value head are stacked along time: no repeated k and v.
        stacked = (q * self.scale).reshape(batch, kv_heads, -1, head_dim)
        scores = self.scores(stacked, k).reshape(batch * heads, length * length)
        # BiasAdd over rows of T*T is ten times as fast as a broadcast addition.
        scores = self.bias_add(scores, self.causal_mask(length, q.dtype == ms.float16))
        probs = self.softmax(scores.reshape(batch, kv_heads, -1, length))
        return self.combine(probs, v).reshape(q.shape)


class CausalAttention(nn.Cell):
    """softmax(scale q k^T, masked to the past and present) v.

    q [B, H, T, D], k and v [B, Hkv, T, D] with H a multiple of Hkv: query heads j*H/Hkv ... (j+1)*H/Hkv - 1
    read key/value head j. Returns [B, H, T, D].
    """

    def __init__(self, scale: float, target: str | None = None) -> None:
        super().__init__()
        implementations = {"CPU": _CausalAttentionComposed, "GPU": _CausalAttentionComposed}
        self.attention = select("CausalAttention", implementations, target)(scale)

    def construct(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attend."""
        return self.attention(q, k, v)
