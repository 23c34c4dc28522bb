import subprocess
import sys
from types import SimpleNamespace

import pytest

from ms_zero.errors import UserError
from ms_zero.plan.flops import shape_flops, train_flops_per_token
from ms_zero.plan.models import load_model, model_names
from ms_zero.plan.shapes import Attention, Experts, LayerShape, Mlp

MOE = """model:
  family: moe
  vocab_size: 100
  hidden_size: 64
  num_layers: 4
  num_heads: 4
  max_seq_len: 128
  num_experts: 8
  experts_per_token: 2
  expert_ffn_hidden_size: 32
"""
ASKED = ("gpt3-125m", "gpt3-1.5b", "gpt3-13b", "gpt3-175b", "megatron-529.6b", "llama2-7b", "llama-70b")
ASKED += ("llama3-8b", "llama3.1-405b", "qwen2.5-72b", "qwen3-32b", "qwen3-30b-a3b", "mixtral-8x7b")
ASKED += ("deepseek-v2", "deepseek-v3")


def test_the_families_are_there():
    assert set(ASKED) <= set(model_names())
    mixtures = {name for name in model_names() if load_model(name).family == "moe"}
    assert {"mixtral-8x7b", "deepseek-v2", "deepseek-v3", "qwen3-30b-a3b"} <= mixtures
    assert mixtures == {name for name in model_names() if load_model(name).is_moe}


def test_gpt3_1_5b_has_the_shape_of_gpt2_xl_and_the_sequence_of_gpt3():
    shape = load_model("gpt3-1.5b")
    assert (shape.num_layers, shape.hidden_size, shape.max_seq_len) == (48, 1600, 2048)
    assert shape.blocks[0][1].attention.num_heads == 25


def test_names_of_presets_and_their_folder_are_both_understood():
    assert load_model("models/llama-70b") == load_model("llama-70b")
    assert load_model("gpt-tiny").vocab_size == 257  # `auto` is the byte tokenizer, as in training


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UserError, match=r"no preset 'models/llama-71b'; did you mean llama2-7b or llama-70b"):
        load_model("llama-71b")


def test_a_run_file_is_a_model_too(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("include: [models/llama2-7b]\nmodel: {num_layers: 3}\ntrain: {steps: 5}\n")
    shape = load_model(str(path))
    assert (shape.name, shape.num_layers, shape.hidden_size) == ("mine", 3, 4096)


def test_mixtures_are_read(tmp_path):
    path = tmp_path / "moe.yaml"
    path.write_text(MOE + "  dense_layers: 1\n  ffn_hidden_size: 256\n  shared_ffn_hidden_size: 16\n")
    shape = load_model(str(path))
    attention = Attention(num_heads=4, num_kv_heads=4, head_dim=16, value_head_dim=16)
    experts = Experts(num_experts=8, top_k=2, ffn_hidden_size=32, shared_ffn_hidden_size=16)
    assert shape.blocks == (
        (1, LayerShape(attention=attention, mlp=Mlp(ffn_hidden_size=256, gated=True))),
        (3, LayerShape(attention=attention, experts=experts)),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MOE + "  hiden_size: 3\n", r"model\.hiden_size: unknown key; did you mean model\.hidden_size\?"),
        (MOE.replace("num_experts: 8", "num_experts: 0"), r"model\.num_experts: 0"),
        (MOE.replace("  num_experts: 8\n", ""), r"model\.num_experts: missing"),
        (MOE + "  dense_layers: 1\n", "1 dense_layers need the width of their MLP"),
        (MOE + "  dense_layers: 5\n  ffn_hidden_size: 8\n", "5 is more than num_layers 4"),
        (MOE.replace("num_heads: 4", "num_heads: 5"), "5 does not divide hidden_size 64"),
        (MOE + "  latent: {kv_rank: 8}\n", r"model\.latent\.nope_head_dim: missing"),
        ("model: {family: llama, hidden_size: 4}\n", r"model\.num_layers: missing"),
        ("model: {family: bert}\n", "'bert' is not a model family"),
        ("train: {steps: 1}\n", r"model\.family: missing"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, message):
    path = tmp_path / "model.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_model(str(path))


@pytest.mark.parametrize("name", ["gpt2-small", "gpt3-175b", "llama2-70b", "qwen3-8b"])
def test_flops_of_a_shape_are_those_of_its_config(name):
    shape = load_model(name)
    layer = shape.blocks[0][1]
    model = SimpleNamespace(
        family=shape.family,
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_layers=shape.num_layers,
        num_heads=layer.attention.num_heads,
        num_kv_heads=layer.attention.num_kv_heads,
        head_dim=layer.attention.head_dim,
        ffn_hidden_size=layer.mlp.ffn_hidden_size,
    )
    assert shape_flops(shape, 1024).train == train_flops_per_token(model, 1024)


def test_flops_of_mixtures_are_two_for_each_active_matrix_element():
    """At sequence length 0: all active parameters but embedding, norms and biases."""
    for name in ("mixtral-8x7b", "deepseek-v3", "qwen2-57b-a14b"):
        shape = load_model(name)
        h, matrices = shape.hidden_size, 0
        for layer in shape.layers():
            attention, experts = layer.attention, layer.experts
            if attention.latent:
                latent = attention.latent
                matrices += h * latent.q_rank + latent.q_rank * attention.q_size
                matrices += h * (latent.kv_rank + latent.rope_head_dim)
                matrices += latent.kv_rank * attention.num_heads * (latent.nope_head_dim + 128)
            else:
                matrices += h * (attention.q_size + attention.k_size + attention.v_size)
            matrices += attention.context_size * h
            if experts is None:
                matrices += 3 * h * layer.mlp.ffn_hidden_size
                continue
            width = experts.top_k * experts.ffn_hidden_size + experts.shared_ffn_hidden_size
            matrices += 3 * h * width + h * experts.num_experts + h * experts.shared_gate
        flops = shape_flops(shape, 0)
        assert flops.layers == 2 * matrices
        assert flops.head == 2 * h * shape.vocab_size


def test_causal_attention_counts_the_keys_that_are_seen():
    shape = load_model("llama3-8b")
    full, causal = shape_flops(shape, 4096), shape_flops(shape, 4096, causal=True)
    assert causal.attention / full.attention == pytest.approx(4097 / 8192)
    assert (causal.projections, causal.mlp) == (full.projections, full.mlp)


def test_a_window_bounds_the_keys():
    from ms_zero.plan.flops import layer_flops

    attention = Attention(num_heads=2, num_kv_heads=2, head_dim=4, value_head_dim=4, window=3)
    layer = LayerShape(attention=attention, mlp=Mlp(ffn_hidden_size=4, gated=False))
    assert layer_flops(layer, 8, 100).attention == 4 * 8 * 3
    # 5 queries see 1, 2, 3, 3 and 3 keys.
    assert layer_flops(layer, 8, 5, causal=True).attention == pytest.approx(4 * 8 * 12 / 5)


def test_planning_needs_neither_mindspore_nor_numpy():
    code = (
        "import sys; from ms_zero.plan.models import load_model; from ms_zero.plan.memory import MemoryModel;"
        "from ms_zero.plan.layout import Layout;"
        "MemoryModel(load_model('llama-70b')).peak(Layout(seq_len=4096));"
        "print(sorted({'mindspore', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
