"""What every native kernel promises, whatever it computes: see the cases in `calls`."""

from dataclasses import dataclass, replace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

from ms_zero import _compat, kernels
from ms_zero.errors import UserError

RNG = np.random.default_rng(3)


@dataclass(frozen=True)
class Call:
    """A kernel with arguments: activations (the batch comes first), weights, constants without gradient."""

    cell: nn.Cell
    portable: nn.Cell
    activations: list[np.ndarray]
    weights: list[np.ndarray]
    constants: list[np.ndarray]
    saved: tuple

    def arguments(self, activations, weights):
        return [*activations, *weights, *map(Tensor, self.constants)]


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def calls():
    """Sizes are off the vector width and large enough for several threads and tiles."""
    starts = np.sort(RNG.integers(0, 60, (3, 130)).astype(np.int32))
    starts = np.minimum(starts, np.arange(130, dtype=np.int32))
    labels = RNG.integers(0, 1001, 3 * 64).astype(np.int32).reshape(-1)
    labels[5] = -100
    linear = kernels.Linear.saved_elements(3 * 41, 37)
    norm = kernels.LayerNorm.saved_elements(3 * 41, 37)
    heads = kernels.CausalAttention.saved_elements(3, 130, 4, 2, 20)
    documents = kernels.CausalAttention.saved_elements(3, 130, 4, 2, 20, documents=True)
    loss = kernels.CrossEntropySum.saved_elements(192, 1001)
    x, qkv = normal(3, 41, 37), [normal(3, 130, h, 20) for h in (4, 2, 2)]

    def both(kernel, *args):
        return kernel(*args, "CPU"), kernel(*args, "CPU-portable")

    return {
        "linear": Call(*both(kernels.Linear), [x], [normal(29, 37), normal(29)], [], linear),
        "linear without bias": Call(*both(kernels.Linear), [x], [normal(29, 37)], [], linear),
        "layer norm": Call(*both(kernels.LayerNorm, 1e-5), [x], [normal(37), normal(37)], [], norm),
        "rms norm": Call(*both(kernels.RMSNorm, 1e-5), [x], [normal(37)], [], norm),
        "gelu": Call(*both(kernels.GELU), [x * 3], [], [], kernels.GELU.saved_elements(x.size)),
        "swiglu": Call(
            *both(kernels.SwiGLU), [x * 3, normal(*x.shape)], [], [], kernels.SwiGLU.saved_elements(x.size)
        ),
        "rotary": Call(
            *both(kernels.RotaryEmbedding),
            [qkv[0]],
            [],
            [normal(130, 20), normal(130, 20)],
            kernels.RotaryEmbedding.saved_elements(130 * 20),
        ),
        "attention": Call(*both(kernels.CausalAttention, 0.3), qkv, [], [], heads),
        "attention in documents": Call(
            kernels.CausalAttention(0.3, "CPU"), PortableDocuments(), qkv, [], [starts], documents
        ),
        "loss": Call(*both(kernels.CrossEntropySum, -100), [normal(192, 1001)], [], [labels], loss),
    }


class PortableDocuments(nn.Cell):
    def __init__(self):
        super().__init__()
        self.mask = kernels.DocumentMask("CPU-portable")
        self.attention = kernels.CausalAttention(0.3, "CPU-portable")

    def construct(self, q, k, v, starts):
        return self.attention(q, k, v, self.mask(starts, q))


CALLS = calls()
each_call = pytest.mark.parametrize("name", CALLS)


def leaves(arrays, dtype=ms.float32):
    found = [Tensor(array).astype(dtype) for array in arrays]
    for leaf in found:
        leaf.requires_grad_(True)
    return found


def parameters(arrays):
    return [Parameter(Tensor(array), name=f"p{number}") for number, array in enumerate(arrays)]


def output_gradient(out):
    values = np.random.default_rng(11).standard_normal(out.shape).astype(np.float32)
    return Tensor(np.asarray(values)).astype(out.dtype)


def run(cell, call, activations, weights):
    """The output and the gradients of activations and weights, as fp32 arrays."""
    with _compat.tape():
        out = cell(*call.arguments(activations, weights))
    _compat.backward(out, output_gradient(out))
    return [arrays_of(out)] + [arrays_of(each._grad) for each in (*activations, *weights)]


def arrays_of(tensor):
    return tensor.astype(ms.float32).asnumpy().copy()


@each_call
def test_agrees_with_mindspore(name):
    call = CALLS[name]
    native, portable = (
        run(cell, call, leaves(call.activations), parameters(call.weights))
        for cell in (call.cell, call.portable)
    )
    for left, right in zip(native, portable, strict=True):
        assert left.shape == right.shape
        assert np.abs(left - right).max() <= 2e-5 * np.abs(right).max()


@each_call
@pytest.mark.parametrize("dtype, digits", [(ms.float16, 2.0**-10), (ms.bfloat16, 2.0**-7)])
def test_16_bit_storage_is_computed_in_fp32_and_rounded(name, dtype, digits):
    call = CALLS[name]
    halves = [leaves(arrays, dtype) for arrays in (call.activations, call.weights)]
    wide = [leaves([arrays_of(each) for each in part]) for part in halves]
    found, expected = (run(call.cell, call, *tensors) for tensors in (halves, wide))
    for left, right in zip(found, expected, strict=True):
        assert np.abs(left - right).max() <= 1.5 * digits * np.abs(right).max()


@each_call
def test_the_same_bits_every_time_and_for_views(name):
    """Non-contiguous arguments give the bits of contiguous ones."""
    call = CALLS[name]
    first = run(call.cell, call, leaves(call.activations), parameters(call.weights))
    second = run(call.cell, call, leaves(call.activations), parameters(call.weights))
    spread = [Tensor(np.repeat(array, 2, -1)) for array in call.activations]
    views = [each[..., ::2] for each in spread]
    assert not any(view.is_contiguous() for view in views)
    for view in views:
        view.requires_grad_(True)
    third = call.cell(*call.arguments(views, parameters(call.weights)))
    for left, right in zip(first, second, strict=True):
        assert np.array_equal(left, right)
    assert np.array_equal(arrays_of(third), first[0])


@pytest.mark.parametrize("name", [name for name in CALLS if name != "loss"])
def test_a_sample_has_the_same_bits_in_any_batch(name):
    call = CALLS[name]

    def part(rows):
        constants = [c[rows] if name == "attention in documents" else c for c in call.constants]
        activations = [array[rows] for array in call.activations]
        return replace(call, activations=activations, constants=constants)

    weights = parameters(call.weights)
    with _compat.tape():
        activations = leaves(call.activations)
        out = call.cell(*call.arguments(activations, weights))
    grad = output_gradient(out)
    _compat.backward(out, grad)
    for sample in range(3):
        alone, rows = leaves([a[sample : sample + 1] for a in call.activations]), slice(sample, sample + 1)
        with _compat.tape():
            single = call.cell(*part(rows).arguments(alone, weights))
        _compat.backward(single, Tensor(grad.asnumpy()[rows]))
        assert np.array_equal(arrays_of(single), arrays_of(out)[rows])
        for left, right in zip(alone, activations, strict=True):
            assert np.array_equal(arrays_of(left._grad), arrays_of(right._grad)[rows])


@each_call
def test_keeps_what_it_says_and_no_copy_of_a_weight(name):
    call, kept = CALLS[name], []
    weights = parameters(call.weights)

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with ms.saved_tensors_hooks(pack, lambda tensor: tensor), _compat.tape():
        out = call.cell(*call.arguments(leaves(call.activations), weights))
    assert out.size
    addresses = {weight.data_ptr() for weight in weights}
    others = [tensor for tensor in kept if tensor.data_ptr() not in addresses]
    dtypes = {"input": ms.float32, "fp32": ms.float32, "int32": ms.int32}
    assert sorted((t.size, str(t.dtype)) for t in others) == sorted(
        (saved.elements, str(dtypes[saved.dtype])) for saved in call.saved
    )


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.weights])
def test_backward_reads_the_current_data_of_the_parameter(name):
    """Between forward and backward the data is a placeholder; backward gets other values than forward had."""
    call = CALLS[name]
    ordinary = run(call.cell, call, leaves(call.activations), parameters([2 * w for w in call.weights]))
    activations, weights = leaves(call.activations), parameters(call.weights)
    with _compat.tape():
        out = call.cell(*call.arguments(activations, weights))
    for weight in weights:
        weight.data = mint.zeros((1,))
    for weight, values in zip(weights, call.weights, strict=True):
        weight.data = Tensor(2 * values)
    _compat.backward(out, output_gradient(out))
    assert np.array_equal(arrays_of(activations[0]._grad), ordinary[1])


@each_call
def test_backward_inside_of_a_backward(name):
    """Recomputing the kernel in the backward of another function gives the same bits."""
    call = CALLS[name]

    class Again(_compat.function_class):
        @staticmethod
        def forward(ctx, *tensors):
            ctx.save_for_backward(*tensors)
            return call.cell(*call.arguments(tensors[:count], tensors[count:]))

        @staticmethod
        def backward(ctx, grad):
            fresh = [_compat.leaf(tensor, requires_grad=True) for tensor in ctx.saved_tensors]
            with _compat.tape():
                out = call.cell(*call.arguments(fresh[:count], fresh[count:]))
            _compat.backward(out, grad)
            return tuple(tensor._grad for tensor in fresh)

    count = len(call.activations)
    plain = run(call.cell, call, leaves(call.activations), leaves(call.weights))
    activations, weights = leaves(call.activations), leaves(call.weights)
    with _compat.tape():
        out = Again.apply(*activations, *weights)
    _compat.backward(out, output_gradient(out))
    for left, right in zip((out, *(t._grad for t in (*activations, *weights))), plain, strict=True):
        assert np.array_equal(arrays_of(left), right)


@pytest.mark.parametrize("name", [name for name, call in CALLS.items() if call.weights])
def test_frozen_arguments_get_no_gradient(name):
    call = CALLS[name]
    expected = run(call.cell, call, leaves(call.activations), parameters(call.weights))
    activations, weights = leaves(call.activations), parameters(call.weights)
    for weight in weights:
        weight.requires_grad = False
    with _compat.tape():
        out = call.cell(*call.arguments(activations, weights))
    _compat.backward(out, output_gradient(out))
    assert np.array_equal(arrays_of(activations[0]._grad), expected[1])
    assert all(weight._grad is None for weight in weights)


def test_other_dtypes_are_refused():
    with pytest.raises(UserError, match="kernels: expected float32, float16 or bfloat16, got Int32"):
        kernels.GELU()(Tensor(np.zeros(3, np.int32)))


class Compiled(nn.Cell):
    def __init__(self, cell):
        super().__init__()
        self.cell = cell

    @ms.jit
    def construct(self, *args):
        return self.cell(*args)


def test_inside_of_jit_the_operators_stand_in():
    call = CALLS["layer norm"]
    arguments = call.arguments(map(Tensor, call.activations), parameters(call.weights))

    compiled = Compiled(call.cell)(*arguments)
    assert np.abs(compiled.asnumpy() - call.cell(*arguments).asnumpy()).max() < 1e-5


def test_gelu_far_from_zero():
    x = np.array([-np.inf, -1e30, -30, -20, 20, 30, 1e30, np.inf], np.float32)
    value, slope = ms.value_and_grad(lambda t: kernels.GELU()(t[1:-1]).sum())(Tensor(x))
    assert value.asnumpy() == np.float32(1e30)
    assert slope.asnumpy()[1:-1].tolist() == [0, 0, 0, 1, 1, 1]
