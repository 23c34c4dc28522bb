"""Which primitive, with which arguments, each kernel issues on Ascend; a stand-in records it."""

import inspect

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ms_zero import _compat, kernels
from ms_zero.kernels import optimizer

RNG = np.random.default_rng(0)


class Recorder:
    """Stands for a primitive class: records constructor arguments and calls, returns what `answer` gives.

    Arguments that the primitive itself would not take are refused.
    """

    def __init__(self, primitive, answer):
        self.primitive = primitive
        self.answer, self.built, self.calls = answer, [], []

    def __call__(self, *args, **kwargs):
        inspect.signature(self.primitive.__init__).bind(None, *args, **kwargs)
        self.built.append((args, kwargs))
        recorder = self

        class StandIn(nn.Cell):
            def construct(self, *args):
                inspect.signature(recorder.primitive.__call__).bind(None, *args)
                recorder.calls.append(args)
                return recorder.answer(*args)

        return StandIn()


@pytest.fixture
def record(monkeypatch):
    def install(owner, name, answer):
        recorder = Recorder(getattr(owner, name), answer)
        monkeypatch.setattr(owner, name, recorder)
        return recorder

    return install


def tensor(*shape, dtype=np.float32):
    return Tensor(RNG.standard_normal(shape).astype(dtype))


def test_gelu_is_the_native_gelu(record):
    recorder = record(ops, "GeLU", lambda x: x)
    x = tensor(2, 3)
    kernels.GELU("Ascend")(x)
    assert recorder.built == [((), {})]
    assert recorder.calls == [(x,)]


def test_swiglu_concatenates_gate_and_up(record):
    recorder = record(ops.auto_generate, "Swiglu", lambda both, dim: both)
    gate, up = tensor(2, 3), tensor(2, 3)
    kernels.SwiGLU("Ascend")(gate, up)
    ((both, dim),) = recorder.calls
    assert dim == -1
    assert np.array_equal(both.asnumpy(), np.concatenate([gate.asnumpy(), up.asnumpy()], -1))


def test_rms_norm_passes_eps_and_returns_the_first_output(record):
    recorder = record(ops.auto_generate, "RmsNorm", lambda x, weight: (x, None))
    x, weight = tensor(2, 3), tensor(3)
    assert kernels.RMSNorm(1e-6, "Ascend")(x, weight) is x
    assert recorder.built == [((1e-6,), {})]
    assert recorder.calls[0][0] is x
    assert recorder.calls[0][1] is weight


def test_layer_norm_is_the_native_layer_norm(record):
    recorder = record(ops, "LayerNorm", lambda x, weight, bias: (x, None, None))
    x, weight, bias = tensor(2, 3), tensor(3), tensor(3)
    assert kernels.LayerNorm(1e-6, "Ascend")(x, weight, bias) is x
    assert recorder.built == [((), {"begin_norm_axis": -1, "begin_params_axis": -1, "epsilon": 1e-6})]


def test_rotary_takes_tables_as_1s1d_in_the_dtype_of_x(record):
    recorder = record(ops.auto_generate, "RotaryPositionEmbedding", lambda x, cos, sin, mode: x)
    kernels.RotaryEmbedding("Ascend")(tensor(2, 5, 3, 4), tensor(2, 5, 4), tensor(2, 5, 4))
    assert recorder.calls.pop()[1].shape == (2, 5, 1, 4)  # positions of their own
    x, cos, sin = tensor(2, 5, 3, 4, dtype=np.float16), tensor(5, 4), tensor(5, 4)
    kernels.RotaryEmbedding("Ascend")(x, cos, sin)
    ((given, cos_given, sin_given, mode),) = recorder.calls
    assert given is x
    assert mode == 0  # rotate half
    assert cos_given.shape == sin_given.shape == (1, 5, 1, 4)
    assert cos_given.dtype == sin_given.dtype == ms.float16
    assert np.array_equal(cos_given.asnumpy().reshape(5, 4), cos.asnumpy().astype(np.float16))
    assert np.array_equal(sin_given.asnumpy().reshape(5, 4), sin.asnumpy().astype(np.float16))


def test_half_precision_attention_is_flash_attention(record):
    recorder = record(ops.auto_generate, "FlashAttentionScore", lambda *args: (None, None, None, "out"))
    q, k, v = (tensor(2, 5, heads, 16, dtype=np.float16) for heads in (4, 2, 2))
    assert kernels.CausalAttention(0.25, "Ascend")(q, k, v) == "out"
    settings = {"head_num": 4, "scale_value": 0.25, "input_layout": "BSND", "sparse_mode": 2}
    assert recorder.built == [((), settings)]
    ((*tensors, shift, drop, padding, mask),) = recorder.calls
    assert [id(t) for t in tensors] == [id(q), id(k), id(v)]
    assert (shift, drop, padding) == (None, None, None)
    assert mask.dtype == ms.uint8
    assert np.array_equal(mask.asnumpy(), np.triu(np.ones((2048, 2048)), 1))  # 1: discard


def test_fp32_attention_on_ascend_is_the_composed_one(record):
    recorder = record(ops.auto_generate, "FlashAttentionScore", lambda *args: args)
    q, k, v = (tensor(2, 5, heads, 16) for heads in (4, 2, 2))
    out = kernels.CausalAttention(0.25, "Ascend")(q, k, v).asnumpy()
    assert np.array_equal(out, kernels.CausalAttention(0.25, "CPU-portable")(q, k, v).asnumpy())
    assert recorder.calls == []


STARTS = Tensor(np.array([[0, 0, 2, 2, 4], [0, 0, 0, 3, 3]], np.int32))


def test_documents_are_the_given_mask_of_flash_attention(record):
    recorder = record(ops.auto_generate, "FlashAttentionScore", lambda *args: (None, None, None, "out"))
    q, k, v = (tensor(2, 5, heads, 16, dtype=np.float16) for heads in (4, 2, 2))
    mask = kernels.DocumentMask("Ascend")(STARTS, q)
    assert kernels.CausalAttention(0.25, "Ascend")(q, k, v, mask) == "out"
    settings = {"head_num": 4, "scale_value": 0.25, "input_layout": "BSND", "sparse_mode": 0}
    assert recorder.built == [((), settings)]
    assert recorder.calls[0][-1] is mask
    assert (mask.shape, mask.dtype) == ((2, 1, 5, 5), ms.uint8)
    discarded = [[0, 1, 1, 1, 1], [0, 0, 1, 1, 1], [1, 1, 0, 1, 1], [1, 1, 0, 0, 1], [1, 1, 1, 1, 0]]
    assert mask.asnumpy()[0, 0].tolist() == discarded


def test_documents_in_fp32_on_ascend_are_the_composed_mask(record):
    record(ops.auto_generate, "FlashAttentionScore", lambda *args: args)
    q, k, v = (tensor(2, 5, heads, 16) for heads in (4, 2, 2))
    outputs = [
        kernels.CausalAttention(0.25, target)(q, k, v, kernels.DocumentMask(target)(STARTS, q)).asnumpy()
        for target in ("Ascend", "CPU-portable")
    ]
    assert np.array_equal(*outputs)


def test_adamw_is_the_native_adamw_counting_steps_from_zero(monkeypatch):
    calls = []
    signature = inspect.signature(optimizer._ADAMW_NATIVE.__call__)

    def record_call(*args):
        signature.bind(*args)
        calls.append(args)

    monkeypatch.setattr(optimizer, "_ADAMW_NATIVE", record_call)
    param, exp_avg, exp_avg_sq, grad = (tensor(7) for _ in range(4))
    hyper = {"lr": 0.5, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    kernels.adamw_update(
        param, exp_avg, exp_avg_sq, grad, **hyper, step=3, grad_scale=0.5, target="Ascend"
    )
    ((p, m, v, max_v, g, step, *scalars),) = calls
    assert [id(t) for t in (p, m, v, max_v)] == [id(t) for t in (param, exp_avg, exp_avg_sq, exp_avg_sq)]
    assert np.array_equal(g.asnumpy(), grad.asnumpy() * np.float32(0.5))
    assert step.asnumpy().tolist() == [2.0]
    rates = [float(np.float32(0.9)), float(np.float32(0.95))]
    assert scalars == [0.5, *rates, 0.1, 1e-8, False, False]


def grouped_product(first, second, bias, stops, group_type, group_list_type):
    """What `GmmV2` says it computes: groups of rows of the first factor, or of rows of the second."""
    (first,), (second,), stops = first, second, stops.asnumpy()
    assert bias is None and group_list_type == 0 and stops.dtype == np.int64
    groups = np.repeat(np.arange(len(stops)), np.diff(stops, prepend=0))
    assert len(groups) == stops[-1] == (first.shape[0] if group_type == 0 else first.shape[1])
    a, b = first.asnumpy(), second.asnumpy()
    if group_type == 0:
        return (Tensor(np.einsum("ri,rio->ro", a, b[groups])),)
    assert group_type == 2 and not first.is_contiguous()  # "tensors that have been transposed"
    out = np.zeros((len(stops), a.shape[0], b.shape[1]), a.dtype)
    np.add.at(out, groups, np.einsum("or,ri->roi", a, b))
    return (Tensor(out),)


@pytest.mark.parametrize("counts", [(3, 0, 5, 1), (0, 0, 0, 9), (0, 0, 0, 0)], ids=str)
def test_experts_are_three_grouped_products(record, counts):
    recorder = record(ops.auto_generate, "GmmV2", grouped_product)
    rows = sum(counts)
    x, weight, upstream = RNG.standard_normal((rows, 5)), RNG.standard_normal((4, 3, 5)), np.ones((rows, 3))
    found = []
    for target in ("CPU-portable", "Ascend"):
        leaves = [_compat.leaf(Tensor(a.astype(np.float32)), requires_grad=True) for a in (x, weight)]
        with _compat.tape():
            out = kernels.GroupedLinear(target)(*leaves, counts)
        _compat.backward(out, Tensor(upstream.astype(np.float32)))
        found.append([out.asnumpy(), *(leaf._grad.asnumpy() for leaf in leaves)])
    for mine, theirs in zip(*found, strict=True):
        np.testing.assert_allclose(theirs, mine, rtol=1e-5, atol=1e-6)
    assert [call[4] for call in recorder.calls] == ([0, 0, 2] if rows else [])


def test_the_wheel_has_the_grouped_product_and_cpus_have_no_kernel_of_it():
    x, weight = Tensor(np.ones((3, 2), np.float32)), Tensor(np.ones((2, 4, 2), np.float32))
    with pytest.raises(RuntimeError, match="GmmV2"):
        kernels.GroupedLinear("Ascend")(x, weight, (1, 2)).asnumpy()
