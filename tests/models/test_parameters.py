"""Names, shapes, counts, rules and initial values."""

import math
import subprocess
import sys

import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import models, rng
from ms_zero.errors import UserError
from ms_zero.models.init import Normal, Ones, Zeros

TINY_GPT = {
    "vocab_size": 11,
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "ffn_hidden_size": 12,
    "max_seq_len": 6,
}
TINY_LLAMA = {**TINY_GPT, "num_kv_heads": 1, "head_dim": 4}


def gpt(hidden_size, num_layers, num_heads, max_seq_len):
    return models.GPT(
        vocab_size=50257,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        ffn_hidden_size=4 * hidden_size,
        max_seq_len=max_seq_len,
    )


def llama(vocab_size, hidden_size, num_layers, num_heads, num_kv_heads, ffn_hidden_size):
    return models.Llama(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden_size // num_heads,
        ffn_hidden_size=ffn_hidden_size,
        max_seq_len=4096,
    )


PUBLISHED = {
    "GPT-2 small": (lambda: gpt(768, 12, 12, 1024), 124_439_808),
    "GPT-3": (lambda: gpt(12288, 96, 96, 2048), 174_604_259_328),
    "Llama-2-7B": (lambda: llama(32000, 4096, 32, 32, 32, 11008), 6_738_415_616),
    "Llama-3.1-8B": (lambda: llama(128256, 4096, 32, 32, 8, 14336), 8_030_261_248),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_parameter_counts(name):
    build, expected = PUBLISHED[name]
    assert models.count_parameters(build()) == expected


def test_qwen_counts():
    """Qwen2.5-0.5B and Qwen3-0.6B, both with tied embeddings, as on their model cards."""
    shared = {"vocab_size": 151936, "max_seq_len": 4096, "tie_embeddings": True}
    qwen2 = models.Llama(
        **shared,
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        head_dim=64,
        ffn_hidden_size=4864,
        qkv_bias=True,
    )
    qwen3 = models.Llama(
        **shared,
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
        ffn_hidden_size=3072,
        qk_norm=True,
    )
    assert models.count_parameters(qwen2) == 494_032_768
    assert models.count_parameters(qwen3) == 596_049_920


def test_building_allocates_no_weights():
    """A fresh process builds Llama-2-70B within 100 MB of the peak of the import."""
    program = """
import resource
from ms_zero import models
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
model = models.Llama(vocab_size=32000, hidden_size=8192, num_layers=80, num_heads=64, num_kv_heads=8,
                     head_dim=128, ffn_hidden_size=28672, max_seq_len=4096)
assert models.count_parameters(model) == 68976648192
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-1]) < 100 * 1024


def test_gpt_names_and_shapes():
    shapes = {name: tuple(p.shape) for name, p in models.GPT(**TINY_GPT).parameters_and_names()}
    block = {
        "ln_1.weight": (8,),
        "ln_1.bias": (8,),
        **{f"attn.{part}.weight": (8, 8) for part in ("q_proj", "k_proj", "v_proj", "c_proj")},
        **{f"attn.{part}.bias": (8,) for part in ("q_proj", "k_proj", "v_proj", "c_proj")},
        "ln_2.weight": (8,),
        "ln_2.bias": (8,),
        "mlp.c_fc.weight": (12, 8),
        "mlp.c_fc.bias": (12,),
        "mlp.c_proj.weight": (8, 12),
        "mlp.c_proj.bias": (8,),
    }
    assert shapes == {
        "transformer.wte.weight": (11, 8),
        "transformer.wpe.weight": (6, 8),
        **{f"transformer.h.{layer}.{name}": shape for layer in (0, 1) for name, shape in block.items()},
        "transformer.ln_f.weight": (8,),
        "transformer.ln_f.bias": (8,),
    }


def test_llama_names_and_shapes_are_those_of_hugging_face():
    model = models.Llama(**TINY_LLAMA, qkv_bias=True, qk_norm=True)
    shapes = {name: tuple(p.shape) for name, p in model.parameters_and_names()}
    layer = {
        "input_layernorm.weight": (8,),
        "self_attn.q_proj.weight": (8, 8),
        "self_attn.q_proj.bias": (8,),
        "self_attn.k_proj.weight": (4, 8),
        "self_attn.k_proj.bias": (4,),
        "self_attn.v_proj.weight": (4, 8),
        "self_attn.v_proj.bias": (4,),
        "self_attn.o_proj.weight": (8, 8),
        "self_attn.q_norm.weight": (4,),
        "self_attn.k_norm.weight": (4,),
        "post_attention_layernorm.weight": (8,),
        "mlp.gate_proj.weight": (12, 8),
        "mlp.up_proj.weight": (12, 8),
        "mlp.down_proj.weight": (8, 12),
    }
    assert shapes == {
        "model.embed_tokens.weight": (11, 8),
        **{f"model.layers.{i}.{name}": shape for i in (0, 1) for name, shape in layer.items()},
        "model.norm.weight": (8,),
        "lm_head.weight": (11, 8),
    }


@pytest.mark.parametrize("build", [lambda: models.GPT(**TINY_GPT), lambda: models.Llama(**TINY_LLAMA)])
def test_a_parameter_is_named_by_its_path(build):
    for path, parameter in build().parameters_and_names():
        assert parameter.name == path


def test_a_tied_head_is_one_parameter():
    for model, path in (
        (models.GPT(**TINY_GPT), "transformer.wte.weight"),
        (models.Llama(**TINY_LLAMA, tie_embeddings=True), "model.embed_tokens.weight"),
    ):
        parameters = dict(model.parameters_and_names())
        assert "lm_head.weight" not in parameters
        assert model.lm_head.weight is parameters[path]


def test_using_a_parameter_before_it_is_initialised_is_an_error():
    model = models.GPT(**TINY_GPT)
    with pytest.raises(UserError, match="no values"):
        model(Tensor(np.zeros((1, 3), np.int32))).asnumpy()


def test_rules_of_gpt():
    rules = models.init_rules(models.GPT(**TINY_GPT, init_std=0.5))
    residual = Normal(0.5 / math.sqrt(4))
    assert rules["transformer.wte.weight"] == rules["transformer.wpe.weight"] == Normal(0.5)
    assert rules["transformer.h.1.attn.q_proj.weight"] == Normal(0.5)
    assert rules["transformer.h.1.mlp.c_fc.weight"] == Normal(0.5)
    assert rules["transformer.h.1.attn.c_proj.weight"] == residual
    assert rules["transformer.h.0.mlp.c_proj.weight"] == residual
    assert rules["transformer.h.0.attn.q_proj.bias"] == rules["transformer.ln_f.bias"] == Zeros()
    assert rules["transformer.h.0.ln_1.weight"] == rules["transformer.ln_f.weight"] == Ones()


def test_rules_of_llama():
    rules = models.init_rules(models.Llama(**TINY_LLAMA, init_std=0.5, qk_norm=True))
    residual = Normal(0.5 / math.sqrt(4))
    assert rules["model.embed_tokens.weight"] == rules["lm_head.weight"] == Normal(0.5)
    assert rules["model.layers.0.self_attn.o_proj.weight"] == residual
    assert rules["model.layers.0.mlp.down_proj.weight"] == residual
    assert rules["model.layers.0.mlp.gate_proj.weight"] == Normal(0.5)
    assert rules["model.layers.1.self_attn.q_norm.weight"] == rules["model.norm.weight"] == Ones()


@pytest.mark.parametrize(
    "model, kept",
    [
        (models.GPT(**TINY_GPT), ("wte", "wpe")),
        (models.GPT(**TINY_GPT, tie_embeddings=False), ("wte", "wpe")),
        (models.Llama(**TINY_LLAMA, qkv_bias=True, qk_norm=True), ("embed_tokens",)),
    ],
)
def test_decay_applies_to_the_matrices_of_products_only(model, kept):
    expected = {
        name
        for name, p in model.parameters_and_names()
        if len(p.shape) == 2 and not any(part in name for part in kept)
    }
    assert models.decay_names(model) == expected
    assert expected


def test_initial_values_of_a_slice_are_the_slice_of_the_whole():
    whole = models.initial_values(Normal(0.02), "w", (7, 9), 5, 0, 63)
    assert whole.dtype == np.float32
    assert np.array_equal(whole, rng.normal(5, "w", 0, 63) * np.float32(0.02))
    assert np.array_equal(models.initial_values(Normal(0.02), "w", (7, 9), 5, 13, 41), whole[13:41])
    assert np.array_equal(models.initial_values(Ones(), "w", (3,), 5, 1, 3), [1, 1])
    assert np.array_equal(models.initial_values(Zeros(), "w", (3,), 5, 1, 1), [])


@pytest.mark.parametrize("times", [1, 2])
def test_initialise_fills_every_parameter_by_its_rule(times):
    model = models.Llama(**TINY_LLAMA, qkv_bias=True)
    for seed in (8, 9)[-times:]:
        models.initialise(model, seed)
    rules = models.init_rules(model)
    for name, parameter in model.parameters_and_names():
        values = models.initial_values(rules[name], name, parameter.shape, 9, 0, parameter.size)
        assert np.array_equal(parameter.asnumpy().reshape(-1), values), name


@pytest.mark.parametrize(
    "build, message",
    [
        (lambda: models.GPT(**TINY_GPT | {"num_heads": 3}), "num_heads 3 does not divide hidden_size 8"),
        (lambda: models.Llama(**TINY_LLAMA | {"num_kv_heads": 3}), "num_kv_heads 3 does not divide"),
        (lambda: models.Llama(**TINY_LLAMA | {"head_dim": 3}), "head_dim 3 is odd"),
    ],
)
def test_impossible_shapes_are_refused(build, message):
    with pytest.raises(UserError, match=message):
        build()


@pytest.mark.parametrize("build", [lambda: models.GPT(**TINY_GPT), lambda: models.Llama(**TINY_LLAMA)])
def test_too_long_a_sequence_is_refused(build):
    model = build()
    models.initialise(model, 1)
    with pytest.raises(UserError, match="7 tokens exceeds max_seq_len 6"):
        model(Tensor(np.zeros((1, 7), np.int32)))
