"""Causal attention.

Kept for backward by the native CPU kernel: q, k, v and the output (of their dtype), document_starts if given,
and the logarithm of each row's sum (B H T, fp32): linear in the sequence. At work, each thread has fp32
buffers of about 64 (5 D + 64) elements in forward and (5 D + 2) T H / Hkv in backward.
"""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_zero._compat import function_class
from ms_zero.errors import UserError
from ms_zero.kernels import cpu
from ms_zero.kernels.dispatch import resolve_target, select
from ms_zero.kernels.eager import EagerOrGraph
from ms_zero.kernels.saved import Saved


class _CausalAttentionFunction(function_class):
    """Online softmax over tiles; backward recomputes the tiles (ops/attention/cpu)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, scale: float) -> Tensor:
        q, k, v = cpu.packed(q), cpu.packed(k), cpu.packed(v)
        _check_attention(q, k, v, starts)
        batch, length, heads, _ = q.shape
        out, log_sums = cpu.like(q), cpu.floats(batch, heads, length)
        code = cpu.dtype_code(q)
        cpu.call("msz_attention", q, k, v, code, starts, out, log_sums, *_sizes(q, k), scale)
        ctx.save_for_backward(q, k, v, out, log_sums, *([] if starts is None else [starts]))
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, log_sums, *starts = ctx.saved_tensors
        grads = cpu.like(q), cpu.like(k), cpu.like(v)
        given = q, k, v, out, cpu.packed(grad), cpu.dtype_code(q), starts[0] if starts else None, log_sums
        cpu.call("msz_attention_grad", *given, *grads, *_sizes(q, k), ctx.scale)
        return (*grads, None, None)


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    batch, length, heads, head_dim = q.shape
    return batch, length, heads, k.shape[2], head_dim


def _check_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> None:
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    fits = k.shape == v.shape == (batch, length, kv_heads, head_dim) and heads % kv_heads == 0
    if not fits or not q.dtype == k.dtype == v.dtype:
        raise UserError(
            f"attention: q {q.dtype} {list(q.shape)}, k {k.dtype} {list(k.shape)} and v {v.dtype} "
            f"{list(v.shape)} do not fit: expected one dtype, [B, T, H, D] and twice [B, T, Hkv, D], "
            f"H a multiple of Hkv"
        )
    if starts is not None:
        assert starts.shape == (batch, length) and starts.dtype == ms.int32, (starts.shape, starts.dtype)
        assert starts.is_contiguous()


class _CausalAttentionComposed(nn.Cell):
    """Attention by two batched products, with the [B, H, T, T] probabilities kept for backward."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.gather = ops.Gather()
        self.scores = ops.BatchMatMul(transpose_b=True)
        self.bias_add = ops.BiasAdd()
        self.softmax = ops.Softmax(-1)
        self.combine = ops.BatchMatMul()
        constants: dict[tuple, Tensor] = {}

        def causal_mask(length: int, half: bool) -> Tensor:
            key = (length, half)
            if key not in constants:
                # exp() of a masked score is 0, and adding a real score does not overflow the dtype.
                dtype, value = (np.float16, -3e4) if half else (np.float32, -1e9)
                constants[key] = Tensor(np.triu(np.full((length, length), value, dtype), 1).reshape(-1))
            return constants[key]

        def swapped_rows(batch: int, first: int, second: int) -> Tensor:
            key = (batch, first, second)
            if key not in constants:
                rows = np.arange(batch * first * second, dtype=np.int32).reshape(batch, first, second)
                constants[key] = Tensor(rows.transpose(0, 2, 1).reshape(-1))
            return constants[key]

        def sample_of_rows(batch: int, heads: int) -> Tensor:
            key = ("samples", batch, heads)
            if key not in constants:
                constants[key] = Tensor(np.repeat(np.arange(batch, dtype=np.int32), heads))
            return constants[key]

        # constexpr: runs as Python in both modes (in graph mode at compile time), so each is built once.
        self.causal_mask = ms.constexpr(causal_mask)
        self.swapped_rows = ms.constexpr(swapped_rows)
        self.sample_of_rows = ms.constexpr(sample_of_rows)

    def swap(self, x: Tensor, batch: int, first: int, second: int) -> Tensor:
        """[B, first, second, D] -> rows [B * second * first, D]; ten times as fast as a transposed copy."""
        return self.gather(x.reshape(-1, x.shape[-1]), self.swapped_rows(batch, first, second), 0)

    def construct(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, heads, head_dim = q.shape
        kv_heads = k.shape[2]
        kv_shape = (batch, kv_heads, length, head_dim)
        k = self.swap(k, batch, length, kv_heads).reshape(kv_shape)
        v = self.swap(v, batch, length, kv_heads).reshape(kv_shape)
        # The query heads of one key/value head are stacked along time: no repeated k and v.
        q = self.swap(q * self.scale, batch, length, heads).reshape(batch, kv_heads, -1, head_dim)
        # BiasAdd over rows of T*T is ten times as fast as a broadcast addition, copied rows twice.
        scores = self.scores(q, k).reshape(batch * heads, length * length)
        if mask is None:
            scores = self.bias_add(scores, self.causal_mask(length, q.dtype == ms.float16))
        else:
            scores = scores + self.gather(mask, self.sample_of_rows(batch, heads), 0)
        out = self.combine(self.softmax(scores.reshape(batch, kv_heads, -1, length)), v)
        return self.swap(out, batch, heads, length).reshape(batch, length, heads, head_dim)


class _CausalAttentionByStarts(nn.Cell):
    """The composed form for the mask of the native one."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.mask = _DocumentMaskComposed()
        self.attention = _CausalAttentionComposed(scale)

    def construct(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None) -> Tensor:
        if starts is None:
            return self.attention(q, k, v)
        return self.attention(q, k, v, self.mask(starts, q))


def _attention_native(scale: float) -> nn.Cell:
    def apply(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> Tensor:
        return _CausalAttentionFunction.apply(q, k, v, starts, scale)

    return EagerOrGraph(apply, _CausalAttentionByStarts(scale))


# The compressed causal mask that FlashAttentionScore takes whatever the sequence length.
_FLASH_MASK_SIZE = 2048
_LEFT_UP_CAUSAL = 2
_GIVEN_MASK = 0


class _CausalAttentionAscend(nn.Cell):
    """FlashAttentionScore, which takes only half precision; fp32 goes through the batched products."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.composed = _CausalAttentionComposed(scale)

    def construct(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        if q.dtype == ms.float32:
            return self.composed(q, k, v, mask)
        # Built here because the number of heads is that of the call: tensor parallelism splits heads.
        flash = ops.auto_generate.FlashAttentionScore(
            head_num=q.shape[2],
            scale_value=self.scale,
            input_layout="BSND",
            sparse_mode=_LEFT_UP_CAUSAL if mask is None else _GIVEN_MASK,
        )
        if mask is None:
            mask = ops.triu(ops.ones((_FLASH_MASK_SIZE, _FLASH_MASK_SIZE), ms.uint8), 1)
        return flash(q, k, v, None, None, None, mask)[3]


class _Blocked(nn.Cell):
    """document_starts [B, T] -> bool [B, T, T]: query t must not see key s."""

    def __init__(self) -> None:
        super().__init__()
        cache: dict[tuple[int, bool], Tensor] = {}

        def constant(length: int, is_future: bool) -> Tensor:
            if (length, is_future) not in cache:
                keys = np.arange(length, dtype=np.int32)
                value = keys[None, None, :] > keys[None, :, None] if is_future else keys[None, None, :]
                cache[length, is_future] = Tensor(value)
            return cache[length, is_future]

        # constexpr: runs as Python in both modes (in graph mode at compile time), so each is built once.
        self.constant = ms.constexpr(constant)
        self.less, self.logical_or = ops.Less(), ops.LogicalOr()

    def construct(self, document_starts: Tensor) -> Tensor:
        batch, length = document_starts.shape
        earlier = self.less(self.constant(length, False), document_starts.reshape(batch, length, 1))
        return self.logical_or(earlier, self.constant(length, True))


class _DocumentMaskComposed(nn.Cell):
    """What the composed attention adds to the scores of each sample: [B, T * T]."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked = _Blocked()

    def construct(self, document_starts: Tensor, x: Tensor) -> Tensor:
        value = -3e4 if x.dtype == ms.float16 else -1e9
        return self.blocked(document_starts).astype(x.dtype).reshape(document_starts.shape[0], -1) * value


class _DocumentMaskAscend(nn.Cell):
    """uint8 [B, 1, T, T], 1: discard, for FlashAttentionScore; see _CausalAttentionAscend about fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocked = _Blocked()
        self.composed = _DocumentMaskComposed()

    def construct(self, document_starts: Tensor, x: Tensor) -> Tensor:
        if x.dtype == ms.float32:
            return self.composed(document_starts, x)
        batch, length = document_starts.shape
        return self.blocked(document_starts).astype(ms.uint8).reshape(batch, 1, length, length)


class _DocumentStarts(nn.Cell):
    """The native attention takes the starts as they are: nothing of [T, T] exists."""

    def construct(self, document_starts: Tensor, x: Tensor) -> Tensor:
        return document_starts


class DocumentMask(nn.Cell):
    """The mask that keeps CausalAttention within documents, built once and used by all layers.

    document_starts int32 [B, T]: for each position the first one that it may attend to. x: a tensor of the
    dtype that attention computes in. The result is in the form that CausalAttention of the same target takes.
    The Ascend form has not been run on an NPU.
    """

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        implementations = {
            "CPU": _DocumentStarts,
            "CPU-portable": _DocumentMaskComposed,
            "GPU": _DocumentMaskComposed,
            "Ascend": _DocumentMaskAscend,
        }
        self.mask = select("DocumentMask", implementations, target)()

    def construct(self, document_starts: Tensor, x: Tensor) -> Tensor:
        """Build the mask."""
        return self.mask(document_starts, x)


class CausalAttention(nn.Cell):
    """softmax(scale q k^T, masked to the past and present) v.

    mask: from DocumentMask, which narrows the past to the own document; None: all of it.
    q [B, T, H, D], k and v [B, T, Hkv, D] with H a multiple of Hkv: query heads j*H/Hkv ... (j+1)*H/Hkv - 1
    read key/value head j. Returns [B, T, H, D]. The heads come after the sequence, as the projections
    produce them, so that no implementation has to transpose for another one's sake.

    The Ascend implementation has not been run on an NPU: FlashAttentionScore for fp16 and bf16 (D a multiple
    of 16), batched products for fp32, which FlashAttentionScore does not take.

    Attributes:
        scale: factor on the scores.
        target: the device target whose implementation was chosen.
        attention: does the work; :func:`ms_zero.parallel.cut_context` puts another Cell there.
    """

    def __init__(self, scale: float, target: str | None = None) -> None:
        super().__init__()
        self.scale, self.target = scale, resolve_target(target)
        implementations = {
            "CPU": _attention_native,
            "CPU-portable": _CausalAttentionComposed,
            "GPU": _CausalAttentionComposed,
            "Ascend": _CausalAttentionAscend,
        }
        self.attention = select("CausalAttention", implementations, target)(scale)

    def construct(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend."""
        return self.attention(q, k, v, mask)

    @staticmethod
    def saved_elements(
        batch: int, length: int, heads: int, kv_heads: int, head_dim: int, *, documents: bool = False
    ) -> tuple[Saved, ...]:
        """What the native CPU kernel keeps for backward; `documents`: with a document mask."""
        tokens = batch * length
        return (
            Saved("q", tokens * heads * head_dim),
            Saved("k", tokens * kv_heads * head_dim),
            Saved("v", tokens * kv_heads * head_dim),
            Saved("out", tokens * heads * head_dim, role="output"),
            Saved("log_sums", tokens * heads, dtype="fp32", role="extra"),
            *([Saved("document_starts", tokens, dtype="int32")] if documents else []),
        )
