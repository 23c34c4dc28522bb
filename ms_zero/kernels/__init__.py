"""Compute kernels: one face an operation, the implementation chosen by device target at construction."""

from ms_zero.kernels.activation import GELU, SwiGLU
from ms_zero.kernels.attention import CausalAttention, DocumentMask
from ms_zero.kernels.dispatch import default_target
from ms_zero.kernels.host import adamw_update_host, sgd_update_host, sum_of_squares_host
from ms_zero.kernels.linear import Linear
from ms_zero.kernels.loss import CrossEntropySum
from ms_zero.kernels.norm import LayerNorm, RMSNorm
from ms_zero.kernels.optimizer import adamw_update, sgd_update, sum_of_squares
from ms_zero.kernels.rotary import RotaryEmbedding

__all__ = [
    "GELU",
    "CausalAttention",
    "CrossEntropySum",
    "DocumentMask",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "RotaryEmbedding",
    "SwiGLU",
    "adamw_update",
    "adamw_update_host",
    "default_target",
    "sgd_update",
    "sgd_update_host",
    "sum_of_squares",
    "sum_of_squares_host",
]
