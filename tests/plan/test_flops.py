"""FLOPs against published formulas, figures and parameter counts. Needs neither mindspore nor numpy."""

from types import SimpleNamespace

import pytest

from ms_zero.plan.flops import forward_flops_per_token, model_flops_per_token, train_flops_per_token

# Narayanan et al., SC21, Table 1: parameters in billions, heads, h, L; V = 51200, s = 2048.
SC21 = [
    (1.7, 24, 2304, 24),
    (3.6, 32, 3072, 30),
    (7.5, 32, 4096, 36),
    (18.4, 48, 6144, 40),
    (39.1, 64, 8192, 48),
    (145.6, 96, 12288, 80),
    (529.6, 128, 20480, 105),
]
VOCAB, SEQ = 51200, 2048


def gpt(heads, hidden, layers, vocab=VOCAB, seq=SEQ):
    return forward_flops_per_token(
        vocab_size=vocab,
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        ffn_hidden_size=4 * hidden,
        gated_mlp=False,
        seq_len=seq,
    )


@pytest.mark.parametrize(("billions", "heads", "h", "layers"), SC21)
def test_gpt_equals_the_sc21_formulas(billions, heads, h, layers):
    flops = gpt(heads, h, layers)
    plain = 72 * layers * h**2 * (1 + SEQ / (6 * h) + VOCAB / (12 * layers * h))
    recompute = 96 * layers * h**2 * (1 + SEQ / (6 * h) + VOCAB / (16 * layers * h))
    assert flops.train == pytest.approx(plain, rel=1e-12)
    assert flops.train_with_full_recompute == pytest.approx(recompute, rel=1e-12)


@pytest.mark.parametrize(("billions", "heads", "h", "layers"), SC21)
def test_gpt_is_six_flops_per_matrix_parameter_plus_attention(billions, heads, h, layers):
    """Adding biases, norms (13Lh) and positions (sh) to the matrices counted gives the published size."""
    flops = gpt(heads, h, layers)
    matrices = 3 * (flops.projections + flops.mlp + flops.head) // 6
    assert round((matrices + 13 * layers * h + SEQ * h) / 1e9, 1) == billions


def test_recompute_share_of_gpt3_175b_gives_the_published_training_time():
    """300B tokens on 1024 A100s at 140 TFLOP/s: 34 days."""
    flops = gpt(96, 12288, 96).train_with_full_recompute
    days = flops * 300e9 / (1024 * 140e12) / 86400
    assert days == pytest.approx(34, abs=1.5)


def llama2_7b():
    return SimpleNamespace(
        family="llama",
        vocab_size=32000,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        ffn_hidden_size=11008,
    )


def llama2_70b():
    return SimpleNamespace(
        family="llama",
        vocab_size=32000,
        hidden_size=8192,
        num_layers=80,
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=28672,
    )


@pytest.mark.parametrize(
    ("model", "parameters"), [(llama2_7b(), 6_738_415_616), (llama2_70b(), 68_976_648_192)]
)
def test_llama_counts_every_matrix_once(model, parameters):
    """At sequence length 0 forward is 2 per matrix parameter: all but the embedding and the norms."""
    flops = model_flops_per_token(model, seq_len=0)
    h, layers = model.hidden_size, model.num_layers
    matrices = parameters - model.vocab_size * h - (2 * layers + 1) * h
    assert flops.layers + flops.head == 2 * matrices


def test_grouped_query_heads_do_not_change_the_attention_core():
    grouped, full = llama2_70b(), llama2_70b()
    full.num_kv_heads = full.num_heads
    assert model_flops_per_token(grouped, 4096).attention == model_flops_per_token(full, 4096).attention
    saved = model_flops_per_token(full, 4096).projections - model_flops_per_token(grouped, 4096).projections
    assert saved == 80 * 2 * 8192 * 2 * (64 - 8) * 128


def test_config_of_gpt_is_counted_like_the_explicit_numbers():
    model = SimpleNamespace(
        family="gpt", vocab_size=50257, hidden_size=768, num_layers=12, num_heads=12, ffn_hidden_size=3072
    )
    expected = gpt(12, 768, 12, vocab=50257, seq=1024).train
    assert train_flops_per_token(model, 1024) == expected
    assert isinstance(expected, int)


def test_counts_are_exact_integers_for_huge_models():
    h, layers = 20480 * 64, 100_000
    assert gpt(128, h, layers).train == 72 * layers * h**2 + 12 * layers * SEQ * h + 6 * h * VOCAB
