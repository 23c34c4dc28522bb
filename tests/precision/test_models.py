"""GPT and Llama under every policy on CPU: finite, close to fp32, norms and loss in fp32, logits fp32."""

import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_zero import kernels, models
from ms_zero.memory.recompute import recompute
from ms_zero.precision.autocast import apply, fp32_parameters
from ms_zero.precision.cast import round_array
from ms_zero.precision.policy import policy

VOCAB = 61
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, VOCAB, (2, 16)).astype(np.int32)
LABELS = RNG.integers(0, VOCAB, 32).astype(np.int32)
STARTS = np.repeat(np.array([[0, 5]], np.int32), [5, 11], axis=1).repeat(2, axis=0)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_hidden_size": 48,
    "max_seq_len": 16,
    "init_std": 0.1,
}
FAMILIES = {
    "gpt": lambda: models.GPT(**SIZES),
    "llama": lambda: models.Llama(**SIZES, num_kv_heads=2, head_dim=8),
    "qwen": lambda: models.Llama(**SIZES, num_kv_heads=2, head_dim=8, qk_norm=True, qkv_bias=True),
}
# Largest difference from fp32 over the largest value, logits and each gradient: a few units of the format's
# 2^-8 or 2^-11 that add up over the layers.
TOLERANCE = {"bf16": 0.1, "fp16": 0.015}
SCALE = {"bf16": 1.0, "fp16": 1024.0}


class WithLoss(nn.Cell):
    def __init__(self, model):
        super().__init__(auto_prefix=False)
        self.model, self.cross_entropy = model, kernels.CrossEntropySum()

    def construct(self, ids, labels, document_starts=None):
        self.logits = self.model(ids, document_starts=document_starts)
        return self.cross_entropy(self.logits.reshape(-1, VOCAB), labels)


def run(family, name, gradients, make_working, starts=None, prepare=lambda model: None):
    """Logits, loss and unscaled fp32 gradients by name."""
    model, chosen = FAMILIES[family](), policy(name)
    models.initialise(model, seed=1)
    prepare(model)
    net = WithLoss(model)
    make_working(net, chosen)
    handle = apply(model, chosen, "CPU")
    scale = SCALE.get(name, 1.0)
    starts = None if starts is None else Tensor(starts)
    loss, grads = gradients(net, Tensor(IDS), Tensor(LABELS), starts, seed=Tensor(np.float32(scale)))
    handle.remove()
    assert net.logits.dtype == loss.dtype == ms.float32
    found = {key: grad.asnumpy().astype(np.float32) / scale for key, grad in grads.items()}
    return net, loss, found


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_close_to_fp32(family, name, gradients, make_working):
    for starts in (None, STARTS):
        exact, exact_loss, exact_grads = run(family, "fp32", gradients, make_working, starts)
        net, loss, grads = run(family, name, gradients, make_working, starts)
        tolerance, logits = TOLERANCE[name], exact.logits.asnumpy()
        assert np.abs(net.logits.asnumpy() - logits).max() < tolerance * np.abs(logits).max()
        assert abs(float(loss.asnumpy()) / float(exact_loss.asnumpy()) - 1) < tolerance / 10
        for key, grad in exact_grads.items():
            # The key's bias has no effect, its true gradient is 0: measure it by that of the query.
            size = np.abs(exact_grads[key.replace("k_proj.bias", "q_proj.bias")]).max()
            assert np.abs(grads[key] - grad).max() < tolerance * size, key
        assert not np.array_equal(net.logits.asnumpy(), logits)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_recomputed_blocks_give_the_same_bits(family, name, gradients, make_working):
    def recompute_blocks(model):
        for block in model.transformer.h if family == "gpt" else model.model.layers:
            recompute(block)

    _, loss, expected = run(family, name, gradients, make_working)
    _, again, found = run(family, name, gradients, make_working, prepare=recompute_blocks)
    assert float(loss.asnumpy()) == float(again.asnumpy())
    for key, grad in expected.items():
        np.testing.assert_array_equal(found[key], grad, err_msg=key)


@pytest.mark.parametrize("family", FAMILIES)
def test_norms_have_fp32_weights_and_gradients_in_fp16(family, gradients, make_working):
    model, chosen = FAMILIES[family](), policy("fp16")
    models.initialise(model, seed=1)
    make_working(model, chosen)
    apply(model, chosen, "CPU")
    wide = fp32_parameters(model)
    assert wide == {name for name, _ in model.parameters_and_names() if "norm" in name or ".ln_" in name}
    _, grads = gradients(model, Tensor(IDS), seed=Tensor(RNG.standard_normal((2, 16, VOCAB), np.float32)))
    for name, grad in grads.items():
        # Whatever its dtype: MindSpore converts it to the one the Parameter was created with.
        values = grad.asnumpy().astype(np.float32)
        in_fp16 = np.array_equal(values, values.astype(np.float16))
        tied = name == "transformer.wte.weight"  # the sum of two gradients
        assert tied or in_fp16 is (name not in wide), name


def test_norms_keep_16_bit_activations_for_backward():
    """An fp32 copy of the input of each norm would cost 2 bytes an element."""
    from ms_zero.models.layers import LayerNorm, RMSNorm

    for make in (LayerNorm, RMSNorm):
        norm = make(64, eps=1e-5, target="CPU")
        models.initialise(norm, seed=0)
        apply(norm, policy("fp16"), "CPU")
        dtypes = []
        (kernel,) = norm.cells()
        kernel.register_forward_pre_hook(lambda cell, args, seen=dtypes: seen.append(args[0].dtype))
        assert norm(Tensor(np.ones((2, 64), np.float32))).dtype == ms.float16
        assert dtypes == [ms.float16]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_emulated_bf16_are_bf16_values(family, gradients, make_working):
    net, _, _ = run(family, "bf16", gradients, make_working)
    logits = net.logits.asnumpy()
    np.testing.assert_array_equal(logits, round_array(logits))


def test_norm_of_large_fp16_activations_does_not_overflow(make_working):
    """The sum of 64 squares of 1000 is beyond fp16, their root mean square is not."""
    from ms_zero.models.layers import LayerNorm, RMSNorm

    for make, target in itertools.product((LayerNorm, RMSNorm), ("CPU", "CPU-portable")):
        norm = make(64, eps=1e-5, target=target)
        models.initialise(norm, seed=0)
        make_working(norm, policy("fp16"))
        apply(norm, policy("fp16"), "CPU")
        x = (1000 * np.resize([1.0, -1.0], (2, 64))).astype(np.float16)
        out = norm(Tensor(x))
        assert out.dtype == ms.float16
        np.testing.assert_allclose(out.asnumpy(), np.resize([1.0, -1.0], (2, 64)), atol=2e-3)


def test_loss_of_fp16_logits_is_exact_in_fp32():
    logits = RNG.standard_normal((50, VOCAB)).astype(np.float16) * 20
    labels = RNG.integers(0, VOCAB, 50).astype(np.int32)
    wide = logits.astype(np.float64)
    expected = (np.log(np.exp(wide).sum(-1)) - wide[np.arange(50), labels]).sum()
    found = float(kernels.CrossEntropySum()(Tensor(logits), Tensor(labels)).asnumpy())
    assert found == pytest.approx(expected, rel=1e-5)


def test_attention_softmax_of_large_fp16_scores_is_finite():
    """Scores of 3e4 are within fp16: the maximum has to come off before exp."""
    q = np.full((1, 4, 2, 16), 43.0, np.float16)
    out = kernels.CausalAttention(1.0)(Tensor(q), Tensor(q), Tensor(q))
    assert out.dtype == ms.float16
    np.testing.assert_allclose(out.asnumpy(), q, rtol=2e-3)
