"""The compute functions of the C++ library on MindSpore tensors (CPU, PyNative).

Tensors are passed by address. Every queued operation is waited for first, and a function has done its work
when it returns, so this is right with and without blocking launch. fp32, fp16 and bf16 tensors are taken;
arithmetic is fp32 inside. Bits depend on the inputs and on the processor's instruction set, not on the number
of threads.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import mindspore as ms
from mindspore import Tensor, mint

from ms_zero._compat import finish_queued
from ms_zero.errors import UserError
from ms_zero.native import load_library

_CODES = {ms.float32: 0, ms.float16: 1, ms.bfloat16: 2}
_POINTER, _CODE, _COUNT, _REAL = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float
_TYPES = {"p": _POINTER, "c": _CODE, "n": _COUNT, "f": _REAL}
# Arguments of each function: p pointer, c code (dtype, flag or int32), n count, f float; then the threads.
_ARGUMENTS = {
    "msz_gelu": "ppcn",
    "msz_gelu_grad": "pppcn",
    "msz_swiglu": "pppcn",
    "msz_swiglu_grad": "pppppcn",
    "msz_norm": "pcppcppnnf",
    "msz_norm_grad": "ppcpcpcpppnn",
    "msz_rotary": "ppcppnnnnnc",
    "msz_cross_entropy": "pcpcnnpp",
    "msz_cross_entropy_grad": "pcpcnnnppnp",
    "msz_softmax_stats": "pcpnnnppp",
    "msz_attention": "pppcpppnnnnnf",
    "msz_attention_grad": "pppppcpppppnnnnnf",
    "msz_attention_block": "pppcpppppnnnnnnf",
    "msz_attention_block_grad": "pppppcpppppppnnnnnnf",
    "msz_linear": "ppppcnnn",
    "msz_linear_grad_input": "pppcnnn",
    "msz_linear_grad_weight": "pppcnnn",
    "msz_sum_rows": "ppcnn",
    "msz_rows": "pppcnn",
    "msz_sum_by_index": "pcppnnn",
    "msz_cast": "pcpcn",
    "msz_round_to": "ppcn",
}
_ALL_THREADS = 0


@cache  # a library is loaded once a process
def _function(name: str) -> Callable[..., int]:
    function = getattr(load_library(), name)
    function.argtypes = [*(_TYPES[kind] for kind in _ARGUMENTS[name]), _CODE]
    function.restype = ctypes.c_int
    return function


def call(name: str, *arguments: Tensor | float | None) -> int:
    """Call a function of the library with contiguous tensors, numbers and None (a null pointer).

    Returns its status: 0, or a code that the function documents. What no caller can mend fails an assertion.
    Raises UserError for a parameter without storage.
    """
    finish_queued()
    values = [_address(each) if isinstance(each, Tensor) else each for each in arguments]
    status = _function(name)(*values, _ALL_THREADS)
    assert status == 0 or status <= -5, f"{name} returned {status}"
    return status


def _address(tensor: Tensor) -> int:
    if tensor.is_meta:
        raise UserError(
            f"kernels: a parameter of shape {list(tensor.shape)} has no values yet: call "
            f"ms_zero.models.initialise(model, seed) or load some before the model is used"
        )
    return tensor.data_ptr()


def dtype_code(tensor: Tensor) -> int:
    """The library's code of a tensor's dtype; raises UserError for what is not fp32, fp16 or bf16."""
    code = _CODES.get(tensor.dtype)
    if code is None:
        raise UserError(f"kernels: expected float32, float16 or bfloat16, got {tensor.dtype}: cast it")
    return code


def packed(tensor: Tensor) -> Tensor:
    """The tensor itself when it is contiguous, else a contiguous copy."""
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def like(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and dtype, not initialised."""
    return mint.empty(tensor.shape, dtype=tensor.dtype)


def floats(*shape: int) -> Tensor:
    """An fp32 tensor, not initialised."""
    return mint.empty(shape, dtype=ms.float32)
