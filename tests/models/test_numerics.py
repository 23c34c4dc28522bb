"""GPT and Llama against independent float64 models in numpy: loss, logits and every gradient element.

Gradients of the reference are complex-step derivatives, exact to machine precision. Tolerances: 1e-5 of the
largest value for logits and 5e-5 for gradients (fp32 models; MindSpore's exp is off by up to 1e-5 on CPU).
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor, nn, ops

from ms_zero import _compat, kernels, models

VOCAB, LENGTH = 7, 5
SMALL = {"vocab_size": VOCAB, "hidden_size": 8, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 6}
LLAMA = {**SMALL, "num_kv_heads": 2, "head_dim": 4, "max_seq_len": 8, "norm_eps": 1e-3, "init_std": 0.4}
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, VOCAB, (2, LENGTH)).astype(np.int32)
LABELS = RNG.integers(0, VOCAB, 2 * LENGTH).astype(np.int32)
LABELS[[2, 7]] = -100


class Scaling:
    """Wavelengths of head_dim 4 and theta 100 are 6.3 and 63: one is interpolated, one stretched."""

    factor, low_freq_factor, high_freq_factor, original_max_seq_len = 8.0, 1.0, 4.0, 16


CASES = {
    "gpt-tied": (models.GPT, {**SMALL, "max_seq_len": 8, "norm_eps": 1e-3, "init_std": 0.4}),
    "gpt-untied": (
        models.GPT,
        {
            **SMALL,
            "num_layers": 1,
            "max_seq_len": 8,
            "norm_eps": 1e-3,
            "init_std": 0.4,
            "tie_embeddings": False,
        },
    ),
    "llama-grouped": (models.Llama, LLAMA),
    "llama-tied-scaled": (
        models.Llama,
        {
            **LLAMA,
            "num_layers": 1,
            "tie_embeddings": True,
            "rope_theta": 100.0,
            "rope_scaling": Scaling(),
        },
    ),
    "qwen": (
        models.Llama,
        {
            **LLAMA,
            "num_layers": 1,
            "num_heads": 3,
            "num_kv_heads": 1,
            "qkv_bias": True,
            "qk_norm": True,
        },
    ),
}


def softmax(x):
    powers = np.exp(x - x.real.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def layer_norm(x, weight, bias, eps):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + eps) * weight + bias


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def attend(q, k, v):
    """[B, T, heads, D]; every query head is given its own copy of its key/value head."""
    k, v = (np.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
    future = np.arange(q.shape[1])[None, :] > np.arange(q.shape[1])[:, None]
    return np.einsum("bhts,bshd->bthd", softmax(np.where(future, -1e30, scores)), v)


def gpt(w, ids, *, num_layers, num_heads, norm_eps, tie_embeddings=True, **_):
    def linear(x, path):
        return x @ w[f"{path}.weight"].T + w[f"{path}.bias"]

    def norm(x, path):
        return layer_norm(x, w[f"{path}.weight"], w[f"{path}.bias"], norm_eps)

    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][: ids.shape[1]]
    for layer in range(num_layers):
        block = f"transformer.h.{layer}"
        normed = norm(x, f"{block}.ln_1")
        shape = (*ids.shape, num_heads, -1)
        q, k, v = (linear(normed, f"{block}.attn.{part}_proj").reshape(shape) for part in "qkv")
        x = x + linear(attend(q, k, v).reshape(x.shape), f"{block}.attn.c_proj")
        h = linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc")
        h = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"{block}.mlp.c_proj")
    head = "transformer.wte.weight" if tie_embeddings else "lm_head.weight"
    return norm(x, "transformer.ln_f") @ w[head].T


def llama3_frequency(frequency, scaling):
    """The published three-case rule, one frequency at a time."""
    wavelength = 2 * np.pi / frequency
    if wavelength < scaling.original_max_seq_len / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_seq_len / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def rotate(x, theta, scaling):
    """Pairs (i, i + D/2) as complex numbers turned by position x frequency."""
    half = x.shape[-1] // 2
    out = np.empty(x.shape, x.dtype)
    for i in range(half):
        frequency = theta ** (-2 * i / x.shape[-1])
        if scaling is not None:
            frequency = llama3_frequency(frequency, scaling)
        angle = (np.arange(x.shape[1]) * frequency)[:, None]
        first, second = x[..., i], x[..., i + half]
        out[..., i] = first * np.cos(angle) - second * np.sin(angle)
        out[..., i + half] = second * np.cos(angle) + first * np.sin(angle)
    return out


def llama(w, ids, *, num_layers, head_dim, norm_eps, **options):
    def linear(x, path):
        y = x @ w[f"{path}.weight"].T
        return y + w[f"{path}.bias"] if f"{path}.bias" in w else y

    x = w["model.embed_tokens.weight"][ids]
    for layer in range(num_layers):
        block = f"model.layers.{layer}"
        normed = rms_norm(x, w[f"{block}.input_layernorm.weight"], norm_eps)
        shape = (*ids.shape, -1, head_dim)
        q, k, v = (linear(normed, f"{block}.self_attn.{part}_proj").reshape(shape) for part in "qkv")
        if options.get("qk_norm"):
            q = rms_norm(q, w[f"{block}.self_attn.q_norm.weight"], norm_eps)
            k = rms_norm(k, w[f"{block}.self_attn.k_norm.weight"], norm_eps)
        q, k = (
            rotate(part, options.get("rope_theta", 1e4), options.get("rope_scaling")) for part in (q, k)
        )
        x = x + linear(attend(q, k, v).reshape(*ids.shape, -1), f"{block}.self_attn.o_proj")
        normed = rms_norm(x, w[f"{block}.post_attention_layernorm.weight"], norm_eps)
        gate = linear(normed, f"{block}.mlp.gate_proj")
        gated = gate / (1 + np.exp(-gate)) * linear(normed, f"{block}.mlp.up_proj")
        x = x + linear(gated, f"{block}.mlp.down_proj")
    head = "model.embed_tokens.weight" if options.get("tie_embeddings") else "lm_head.weight"
    return rms_norm(x, w["model.norm.weight"], norm_eps) @ w[head].T


def loss_of(logits):
    rows = logits.reshape(-1, VOCAB)
    valid = np.flatnonzero(LABELS >= 0)
    top = rows.real.max(-1)
    return (top + np.log(np.exp(rows - top[:, None]).sum(-1)))[valid].sum() - rows[valid, LABELS[valid]].sum()


def reference_gradients(forward, weights):
    """Complex-step derivative of the loss with respect to every element of every weight."""
    moved = {name: value.astype(np.complex128) for name, value in weights.items()}
    gradients = {name: np.zeros(value.shape) for name, value in weights.items()}
    for name, value in weights.items():
        for index in np.ndindex(value.shape):
            moved[name][index] += 1e-30j
            gradients[name][index] = loss_of(forward(moved)).imag / 1e-30
            moved[name][index] = value[index]
    return gradients


class Case:
    """A model with weights that leave no gradient at zero, and what its logits and gradients must be."""

    def __init__(self, family, options):
        self.model = family(**options)
        models.initialise(self.model, seed=3)
        self.parameters = dict(self.model.parameters_and_names())
        noise = np.random.default_rng(4)
        for parameter in self.parameters.values():
            jitter = 0.1 * noise.standard_normal(parameter.shape)
            parameter.set_data(Tensor((parameter.asnumpy() + jitter).astype(np.float32)))
        weights = {name: p.asnumpy().astype(np.float64) for name, p in self.parameters.items()}
        numpy_model = gpt if family is models.GPT else llama

        def forward(w):
            return numpy_model(w, IDS, **options)

        self.logits = forward(weights)
        self.gradients = reference_gradients(forward, weights)


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return Case(*CASES[request.param])


class Loss(nn.Cell):
    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model, self.cross_entropy = model, kernels.CrossEntropySum()

    def construct(self, ids, labels):
        return self.cross_entropy(self.model(ids).reshape(-1, VOCAB), labels)


def loss_and_gradients(how, case):
    net, ids, labels = Loss(case.model), Tensor(IDS), Tensor(LABELS)
    if how == "tape":
        with _compat.tape():
            loss = net(ids, labels)
        _compat.backward(loss)
        found = [parameter._grad for parameter in case.parameters.values()]
        for parameter in case.parameters.values():
            parameter._grad = None
        return loss, found
    ms.set_context(mode=ms.GRAPH_MODE if how == "graph" else ms.PYNATIVE_MODE)
    try:
        weights = ParameterTuple(case.parameters.values())
        return ms.value_and_grad(net, None, weights)(ids, labels)
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.mark.parametrize("how", ["tape", "value_and_grad", "graph"])
def test_loss_and_gradients(case, how):
    loss, gradients = loss_and_gradients(how, case)
    assert abs(float(loss.asnumpy()) - loss_of(case.logits)) < 1e-5 * loss_of(case.logits)
    for name, found in zip(case.parameters, gradients, strict=True):
        expected = case.gradients[name]
        assert found.shape == expected.shape, name
        # A key's bias does not change the softmax. Its gradient, truly 0, is measured by that of the query.
        size = np.abs(case.gradients[name.replace("k_proj.bias", "q_proj.bias")]).max()
        assert np.abs(found.asnumpy() - expected).max() < 5e-5 * size, name


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
def test_logits(case, mode):
    ms.set_context(mode=mode)
    try:
        logits = case.model(Tensor(IDS))
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert logits.dtype == ms.float32
    assert logits.shape == (2, LENGTH, VOCAB)
    assert np.abs(logits.asnumpy() - case.logits).max() < 1e-5 * np.abs(case.logits).max()


def test_given_positions_equal_the_default_ones_and_matter(case):
    default = case.model(Tensor(IDS)).asnumpy()
    same = case.model(Tensor(IDS), Tensor(np.arange(LENGTH, dtype=np.int32))).asnumpy()
    assert np.array_equal(default, same)
    other = case.model(Tensor(IDS), Tensor(np.arange(LENGTH, dtype=np.int32)[::-1].copy())).asnumpy()
    assert np.abs(other - default).max() > 1e-3


def test_no_token_sees_the_future(case):
    changed = IDS.copy()
    changed[:, 3:] = (changed[:, 3:] + 1) % VOCAB
    before, after = case.model(Tensor(IDS)).asnumpy(), case.model(Tensor(changed)).asnumpy()
    assert np.abs(before[:, :3] - after[:, :3]).max() < 1e-6
    assert np.abs(before[:, 3:] - after[:, 3:]).max() > 1e-3


def test_sequence_length_may_change_between_calls(case):
    for length in (1, LENGTH, 3):
        logits = case.model(Tensor(IDS[:, :length].copy())).asnumpy()
        assert np.abs(logits - case.logits[:, :length]).max() < 1e-5 * np.abs(case.logits).max()


def test_rotary_logits_depend_on_relative_positions_only():
    model = models.Llama(**LLAMA)
    models.initialise(model, seed=3)
    shifted = Tensor(np.arange(LENGTH, dtype=np.int32) + 3)
    difference = model(Tensor(IDS), shifted).asnumpy() - model(Tensor(IDS)).asnumpy()
    assert np.abs(difference).max() < 1e-5


def test_models_of_one_process_do_not_share_constants_in_graph_mode():
    ids = Tensor(IDS)
    options = {**LLAMA, "num_layers": 1}
    first, second = (models.Llama(**options, rope_theta=theta) for theta in (1e4, 3.0))
    for model in (first, second):
        models.initialise(model, seed=3)
    eager = [model(ids).asnumpy() for model in (first, second)]
    assert np.abs(eager[0] - eager[1]).max() > 1e-3
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        compiled = [model(ids).asnumpy() for model in (first, second)]
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    for left, right in zip(eager, compiled, strict=True):
        assert np.abs(left - right).max() < 1e-5


@pytest.mark.parametrize("name", ["gpt-tied", "qwen"])
def test_half_precision_weights_give_fp32_logits(name):
    family, options = CASES[name]
    exact, half = family(**options), family(**options)
    for model in (exact, half):
        models.initialise(model, seed=3)
    # Before the first use: afterwards MindSpore's Gather still infers the old dtype of a parameter.
    for parameter in half.trainable_params():
        parameter.data = ops.cast(parameter, ms.float16)
    expected, logits = exact(Tensor(IDS)).asnumpy(), half(Tensor(IDS))
    assert logits.dtype == ms.float32
    assert np.abs(logits.asnumpy() - expected).max() < 2e-2 * np.abs(expected).max()
