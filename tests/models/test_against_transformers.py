"""GPT, Llama, Qwen2 and Qwen3 against Hugging Face transformers (skipped where it is not installed).

Logits, loss and every gradient, with the same weights. transformers computes in float64, so what is left is
the float32 rounding of MindSpore's CPU operators.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import kernels
from ms_zero.config import RopeScaling
from ms_zero.models import GPT, Llama, initialise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 101, "hidden_size": 48, "num_layers": 2, "num_heads": 6, "max_seq_len": 64}
BATCH, LENGTH = 2, 33
SCALING = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=16)
SCALING_THERE = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def gpt2(tied):
    ours = GPT(ffn_hidden_size=192, tie_embeddings=tied, **SIZES)
    config = transformers.GPT2Config(
        vocab_size=101, n_embd=48, n_layer=2, n_head=6, n_positions=64, n_inner=192,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu_new",
        tie_word_embeddings=tied, attn_implementation="eager",
    )  # fmt: skip
    return ours, transformers.GPT2LMHeadModel(config)


def llama_family(model, *, tied=False, head_dim=8, scaled=False, **ours):
    theirs = {
        "vocab_size": 101, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6,
        "num_key_value_heads": 2, "head_dim": head_dim, "intermediate_size": 80,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "tie_word_embeddings": tied,
        "attn_implementation": "eager", "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        "rope_parameters": {"rope_theta": 5000.0, **(SCALING_THERE if scaled else {"rope_type": "default"})},
    }  # fmt: skip
    config = getattr(transformers, f"{model}Config")(**theirs)
    mine = Llama(
        num_kv_heads=2, head_dim=head_dim, ffn_hidden_size=80, tie_embeddings=tied, rope_theta=5000.0,
        rope_scaling=SCALING if scaled else None, **SIZES, **ours,
    )  # fmt: skip
    return mine, getattr(transformers, f"{model}ForCausalLM")(config)


CASES = {
    "gpt2 tied": lambda: gpt2(True),
    "gpt2 untied": lambda: gpt2(False),
    "llama": lambda: llama_family("Llama"),
    "llama tied, scaled rope, wide heads": lambda: llama_family("Llama", tied=True, head_dim=16, scaled=True),
    "qwen2": lambda: llama_family("Qwen2", qkv_bias=True),
    "qwen3": lambda: llama_family("Qwen3", head_dim=16, qk_norm=True),
}


def gpt2_to_ours(named):
    """GPT2LMHeadModel stores its projections [in, out] and query, key and value as one."""
    renamed = {}
    for name, value in named.items():
        if value.ndim == 2 and ".h." in name:
            value = value.T
        if ".c_attn." in name:
            for part, block in zip("qkv", np.split(value, 3, axis=0)):
                renamed[name.replace("c_attn", f"{part}_proj")] = block
        else:
            renamed[name] = value
    return renamed


def renamed(model, named):
    return gpt2_to_ours(named) if isinstance(model, GPT) else named


@pytest.fixture(params=CASES)
def pair(request):
    """(our model, theirs in float64) with equal weights; norms and biases are not at their initial values."""
    ours, theirs = CASES[request.param]()
    initialise(ours, seed=5)
    torch.manual_seed(3)
    theirs = theirs.double().eval()
    with torch.no_grad():
        for value in theirs.parameters():
            value.copy_((0.2 * torch.randn(value.shape) + (value.ndim == 1)).float().double())
    weights = renamed(ours, {n: p.detach().numpy().astype(np.float32) for n, p in theirs.named_parameters()})
    parameters = dict(ours.parameters_and_names())
    assert weights.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert weights[name].shape == tuple(parameter.shape), name
        parameter.set_data(Tensor(np.ascontiguousarray(weights[name])))
    return ours, theirs


def batch():
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 101, (BATCH, LENGTH)).astype(np.int32)
    labels = rng.integers(0, 101, (BATCH, LENGTH)).astype(np.int32)
    labels[rng.random(labels.shape) < 0.3] = -100
    return ids, labels


def test_logits_loss_and_gradients_agree(pair):
    ours, theirs = pair
    ids, labels = batch()
    expected = theirs(input_ids=torch.tensor(ids, dtype=torch.int64)).logits
    expected_loss = torch.nn.functional.cross_entropy(
        expected.reshape(-1, 101), torch.tensor(labels.reshape(-1), dtype=torch.int64), reduction="sum"
    )
    expected_loss.backward()
    gradients = renamed(ours, {name: p.grad.numpy() for name, p in theirs.named_parameters()})

    loss_sum = kernels.CrossEntropySum()
    parameters = dict(ours.parameters_and_names())
    loss, grads = ms.value_and_grad(
        lambda x, y: loss_sum(ours(x).reshape(-1, 101), y), None, list(parameters.values())
    )(Tensor(ids), Tensor(labels.reshape(-1)))

    assert relative(ours(Tensor(ids)).asnumpy(), expected.detach().numpy()) < 2e-5
    assert relative(loss.asnumpy(), expected_loss.detach().numpy()) < 1e-5
    largest = max(float(np.abs(gradient).max()) for gradient in gradients.values())
    for name, grad in zip(parameters, grads, strict=True):
        # A key bias has no effect through the softmax: its gradient is noise around zero.
        assert relative(grad.asnumpy(), gradients[name], floor=1e-3 * largest) < 1e-4, name


def relative(value, reference, floor=0.0):
    return float(np.abs(value - reference).max() / max(np.abs(reference).max(), floor))
