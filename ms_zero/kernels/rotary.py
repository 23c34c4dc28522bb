"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-rotation form.

The native CPU kernel keeps only the tables for backward, which all layers share.
"""

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_zero._compat import function_class
from ms_zero.kernels import cpu
from ms_zero.kernels.dispatch import select
from ms_zero.kernels.eager import EagerOrGraph
from ms_zero.kernels.saved import Saved


class _RotaryFunction(function_class):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cpu.packed(cos.astype(ms.float32)), cpu.packed(sin.astype(ms.float32))
        batch, length, _, head_dim = x.shape
        fitting = (length, head_dim), (1, length, head_dim), (batch, length, head_dim)
        assert cos.shape == sin.shape and cos.shape in fitting, (x.shape, cos.shape, sin.shape)
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, inverse=False)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _rotate(dy, *ctx.saved_tensors, inverse=True), None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    x = cpu.packed(x)
    y = cpu.like(x)
    tables = cos.shape[0] if cos.ndim == 3 else 1
    cpu.call("msz_rotary", x, y, cpu.dtype_code(x), cos, sin, tables, *x.shape, inverse)
    return y


class _RotaryComposed(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.Gather()
        self.matmul = ops.MatMul()
        constants: dict[tuple, Tensor] = {}

        def table_rows(batch: int, length: int, heads: int, own_tables: bool) -> Tensor:
            key = (batch, length, heads, own_tables)
            if key not in constants:
                rows = np.arange(batch * length if own_tables else length, dtype=np.int32)
                rows = rows.reshape(-1, length, 1)
                constants[key] = Tensor(np.broadcast_to(rows, key[:3]).reshape(-1))
            return constants[key]

        def half_rotation(head_dim: int) -> Tensor:
            if (head_dim,) not in constants:
                half = head_dim // 2
                # Row vector times this matrix: [a, b] -> [-b, a].
                matrix = np.eye(head_dim, k=half) - np.eye(head_dim, k=-half)
                constants[head_dim,] = Tensor(matrix.astype(np.float32))
            return constants[head_dim,]

        # constexpr: runs as Python in both modes (in graph mode at compile time), so each is built once.
        self.table_rows = ms.constexpr(table_rows)
        self.half_rotation = ms.constexpr(half_rotation)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, heads, head_dim = x.shape
        rows = x.reshape(-1, head_dim)
        # On CPU, spreading the tables by Gather and rotating by a product with a signed permutation is
        # several times as fast as broadcasting and concatenating halves, and as exact.
        table_rows = self.table_rows(batch, length, heads, cos.ndim == 3)
        if cos.ndim == 3:
            cos, sin = cos.reshape(-1, head_dim), sin.reshape(-1, head_dim)
        cos = self.gather(cos.astype(x.dtype), table_rows, 0)
        sin = self.gather(sin.astype(x.dtype), table_rows, 0)
        rotated = self.matmul(rows, self.half_rotation(head_dim).astype(x.dtype))
        return (rows * cos + rotated * sin).reshape(x.shape)


class _RotaryNative(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = ops.auto_generate.RotaryPositionEmbedding()

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        _, length, _, head_dim = x.shape
        shape = (-1, length, 1, head_dim)
        return self.rotary(x, cos.astype(x.dtype).reshape(shape), sin.astype(x.dtype).reshape(shape), 0)


def _rotary_native() -> nn.Cell:
    return EagerOrGraph(_RotaryFunction.apply, _RotaryComposed())


class RotaryEmbedding(nn.Cell):
    """x * cos + [-x2, x1] * sin with x = [x1, x2] halves of the last dim.

    x [B, T, H, D] with D even; cos and sin [T, D], or [B, T, D] when samples have positions of their own,
    constants (no gradient). Returns [B, T, H, D].
    The Ascend implementation (native RotaryPositionEmbedding) has not been run on an NPU.
    """

    def __init__(self, target: str | None = None) -> None:
        super().__init__()
        implementations = {
            "CPU": _rotary_native,
            "CPU-portable": _RotaryComposed,
            "GPU": _RotaryComposed,
            "Ascend": _RotaryNative,
        }
        self.rotary = select("RotaryEmbedding", implementations, target)()

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate x."""
        return self.rotary(x, cos, sin)

    @staticmethod
    def saved_elements(table_elements: int) -> tuple[Saved, ...]:
        """What the native CPU kernel keeps for backward: only the tables, which all layers share."""
        return (Saved("cos", table_elements, dtype="fp32"), Saved("sin", table_elements, dtype="fp32"))
