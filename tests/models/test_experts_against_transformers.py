"""Mixtral, Qwen-MoE and DeepSeek against Hugging Face transformers (skipped where it is not installed).

Logits, token loss and every gradient, with the same weights. transformers computes in float64 but for routers
and softmax, which it computes in float32.
"""

import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import _compat, kernels
from ms_zero.config import LatentConfig
from ms_zero.models import Mixture, MoEDecoder, Rules, initialise

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

BATCH, LENGTH, VOCAB = 2, 19, 101
OURS = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8,
    "max_seq_len": 64, "norm_eps": 1e-6, "rope_theta": 5000.0,
}  # fmt: skip
THEIRS = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "attn_implementation": "eager", "experts_implementation": "eager",
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
    "rope_parameters": {"rope_theta": 5000.0, "rope_type": "default"},
}  # fmt: skip
LATENT = LatentConfig(q_rank=12, kv_rank=14, nope_head_dim=6, rope_head_dim=4, value_head_dim=8)
LATENT_THERE = {
    "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 14, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 8, "moe_intermediate_size": 20, "intermediate_size": 40,
    "first_k_dense_replace": 1, "n_shared_experts": 2, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "head_dim": 4,
}  # fmt: skip
DEEPSEEK = {**OURS, "num_kv_heads": 4, "latent": LATENT, "dense_layers": 1, "ffn_hidden_size": 40}


def model_of(name, **options):
    config = getattr(transformers, f"{name}Config")(**{**THEIRS, **options})
    return getattr(transformers, f"{name}ForCausalLM")(config)


def mixtral():
    mixture = Mixture(num_experts=6, ffn_hidden_size=20, rules=Rules(top_k=2))
    sizes = {"intermediate_size": 20, "num_local_experts": 6, "num_experts_per_tok": 2}
    return MoEDecoder(mixture=mixture, **OURS), model_of("Mixtral", **sizes)


def qwen2():
    rules = Rules(top_k=3, renormalise=False)
    shared = {"shared_ffn_hidden_size": 24, "shared_gate": True}
    mixture = Mixture(num_experts=6, ffn_hidden_size=20, rules=rules, **shared)
    sizes = {
        "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24, "num_experts": 6,
        "num_experts_per_tok": 3, "norm_topk_prob": False, "decoder_sparse_step": 1, "qkv_bias": True,
    }  # fmt: skip
    return MoEDecoder(mixture=mixture, qkv_bias=True, **OURS), model_of("Qwen2Moe", **sizes)


def qwen3():
    mixture = Mixture(num_experts=6, ffn_hidden_size=20, rules=Rules(top_k=3))
    sizes = {
        "moe_intermediate_size": 20, "num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "head_dim": 8,
    }  # fmt: skip
    return MoEDecoder(mixture=mixture, qk_norm=True, **OURS), model_of("Qwen3Moe", **sizes)


def deepseek_v2():
    rules = Rules(top_k=2, renormalise=False, scaling=1.5, groups=4, top_groups=2)
    mixture = Mixture(num_experts=8, ffn_hidden_size=20, rules=rules, shared_ffn_hidden_size=40)
    method = {"topk_method": "group_limited_greedy", "norm_topk_prob": False}
    return MoEDecoder(mixture=mixture, **DEEPSEEK), model_of("DeepseekV2", **LATENT_THERE, **method)


def deepseek_v3():
    rules = Rules(top_k=2, score="sigmoid", scaling=1.5, groups=4, top_groups=2)
    mixture = Mixture(
        num_experts=8, ffn_hidden_size=20, rules=rules, shared_ffn_hidden_size=40, bias_speed=0.001
    )
    return MoEDecoder(mixture=mixture, **DEEPSEEK), model_of("DeepseekV3", **LATENT_THERE)


CASES = {"mixtral": mixtral, "qwen2": qwen2, "qwen3": qwen3, "v2": deepseek_v2, "v3": deepseek_v3}
NAMES = (
    ("mlp.gate.e_score_correction_bias", "mlp.router.bias"),
    ("mlp.gate.weight", "mlp.router.weight"),
    ("mlp.shared_experts.", "mlp.shared."),
    ("mlp.shared_expert.", "mlp.shared."),
    ("mlp.shared_expert_gate.", "mlp.shared_gate."),
)


def renamed(named, is_latent):
    """Their tensors under our names: gate and up apart, rotary rows with halves in place of pairs."""
    found = {}
    for name, value in named.items():
        for theirs, ours in NAMES:
            name = name.replace(theirs, ours)
        if name.endswith("experts.gate_up_proj"):
            gate, up = np.split(value, 2, axis=1)
            found |= {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
            continue
        if is_latent and ("q_b_proj" in name or "kv_a_proj" in name):
            value = with_halves(value, 10 if "q_b_proj" in name else len(value))
        found[name] = value
    return found


def with_halves(weight, width):
    """The last 4 of each `width` rows, which are two pairs, as firsts and seconds."""
    rows = weight.reshape(-1, width, weight.shape[1]).copy()
    rows[:, -4:] = rows[:, [-4, -2, -3, -1]]
    return rows.reshape(weight.shape)


@pytest.fixture(params=CASES)
def pair(request):
    """(our model, theirs in float64) with equal weights."""
    ours, theirs = CASES[request.param]()
    initialise(ours, seed=5)
    torch.manual_seed(3)
    theirs = theirs.double().eval()
    biases = {name: value for name, value in theirs.named_buffers() if "correction_bias" in name}
    tensors = {**dict(theirs.named_parameters()), **biases}
    with torch.no_grad():
        for name, value in tensors.items():
            spread = 1.0 if "mlp.gate" in name else 0.2
            center = float(value.ndim == 1 and "bias" not in name)
            value.copy_((spread * torch.randn(value.shape) + center).float().double())
    found = {name: value.detach().numpy().astype(np.float32) for name, value in tensors.items()}
    weights = renamed(found, request.param in ("v2", "v3"))
    parameters = dict(ours.parameters_and_names())
    assert weights.keys() == parameters.keys()
    for name, parameter in parameters.items():
        assert weights[name].shape == tuple(parameter.shape), name
        parameter.set_data(Tensor(np.ascontiguousarray(weights[name])))
    return ours, theirs, request.param in ("v2", "v3")


def batch():
    rng = np.random.default_rng(0)
    ids, labels = (rng.integers(0, VOCAB, (BATCH, LENGTH)).astype(np.int32) for _ in range(2))
    labels[rng.random(labels.shape) < 0.3] = -100
    return ids, labels


def test_logits_loss_and_gradients_agree(pair):
    ours, theirs, is_latent = pair
    ids, labels = batch()
    expected = theirs(input_ids=torch.tensor(ids, dtype=torch.int64)).logits
    expected_loss = torch.nn.functional.cross_entropy(
        expected.reshape(-1, VOCAB), torch.tensor(labels.reshape(-1), dtype=torch.int64), reduction="sum"
    )
    expected_loss.backward()
    gradients = renamed({name: p.grad.numpy() for name, p in theirs.named_parameters()}, is_latent)

    with _compat.tape():
        logits, _ = ours(Tensor(ids))
        loss = kernels.CrossEntropySum()(logits.reshape(-1, VOCAB), Tensor(labels.reshape(-1)))
    _compat.backward(loss)
    assert relative(logits.asnumpy(), expected.detach().numpy()) < 2e-5
    assert relative(loss.asnumpy(), expected_loss.detach().numpy()) < 1e-5
    largest = max(float(np.abs(gradient).max()) for gradient in gradients.values())
    trained = {name: p for name, p in ours.parameters_and_names() if p.requires_grad}
    assert trained.keys() == gradients.keys()
    for name, parameter in trained.items():
        assert relative(parameter._grad.asnumpy(), gradients[name], floor=1e-3 * largest) < 1e-4, name


def relative(value, reference, floor=0.0):
    return float(np.abs(value - reference).max() / max(np.abs(reference).max(), floor))
