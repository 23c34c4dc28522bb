"""Compute kernels: one face an operation, the implementation chosen by device target at construction."""

from ms_zero.kernels.activation import GELU, SwiGLU
from ms_zero.kernels.attention import CausalAttention, DocumentMask
from ms_zero.kernels.block_attention import Attended, BlockAttention, BlockGradients, Where
from ms_zero.kernels.buffers import concat, copy_range, overwrite
from ms_zero.kernels.deferred import PutOff, put_off_to, putting_off
from ms_zero.kernels.dispatch import default_target
from ms_zero.kernels.embedding import Embedding
from ms_zero.kernels.experts import CombineRows, GroupedLinear
from ms_zero.kernels.graph_optimizer import require_built
from ms_zero.kernels.host import adamw_update_host, sgd_update_host, sum_of_squares_host
from ms_zero.kernels.linear import Linear
from ms_zero.kernels.loss import CrossEntropySum, softmax_gradient, softmax_stats
from ms_zero.kernels.norm import LayerNorm, RMSNorm
from ms_zero.kernels.optimizer import adamw_update, sgd_update, squares_in_parts, sum_of_squares
from ms_zero.kernels.rotary import RotaryEmbedding
from ms_zero.kernels.rounding import convert, round_to
from ms_zero.kernels.saved import Saved
from ms_zero.kernels.sorting import SortByExpert

__all__ = [
    "GELU",
    "Attended",
    "BlockAttention",
    "BlockGradients",
    "CausalAttention",
    "CombineRows",
    "CrossEntropySum",
    "DocumentMask",
    "Embedding",
    "GroupedLinear",
    "LayerNorm",
    "Linear",
    "PutOff",
    "RMSNorm",
    "RotaryEmbedding",
    "Saved",
    "SortByExpert",
    "SwiGLU",
    "Where",
    "adamw_update",
    "adamw_update_host",
    "concat",
    "convert",
    "copy_range",
    "default_target",
    "overwrite",
    "put_off_to",
    "putting_off",
    "require_built",
    "round_to",
    "sgd_update",
    "sgd_update_host",
    "softmax_gradient",
    "softmax_stats",
    "squares_in_parts",
    "sum_of_squares",
    "sum_of_squares_host",
]
