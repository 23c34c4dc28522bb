import pytest

from ms_zero.config import load_config
from ms_zero.plan.models import load_model, model_names
from ms_zero.plan.parameters import (
    active_parameters,
    count_parameters,
    device_embedding_parameters,
    device_head_parameters,
    device_layer_parameters,
    layer_parameters,
    parameter_table,
)

REST = "data: {seq_len: 64}\ntrain: {steps: 1, micro_batch_size: 1, accumulation_steps: 1, output_dir: o}\n"


def built_parameters(path):
    """Elements of the parameters of the model that training would build, without their storage."""
    from ms_zero.recipes.build import build_model

    model = build_model(load_config(path).config.model)
    return sum(param.size for param in model.get_parameters())


@pytest.mark.parametrize("name", model_names())
def test_counts_equal_the_built_models(tmp_path, name):
    """Of every preset with few layers (the time to build grows with them), plus the others' layers."""
    path, shape = tmp_path / "run.yaml", load_model(name)
    dense = shape.blocks[0][0] if len(shape.blocks) > 1 else 0
    path.write_text(f"include: [models/{name}]\nmodel: {{num_layers: {dense + 2}}}\n{REST}")
    built = built_parameters(path)
    assert count_parameters(load_model(str(path))) == built
    each = layer_parameters(shape.blocks[-1][1], shape.hidden_size, shape.norm).total
    assert count_parameters(shape) == built + (shape.num_layers - dense - 2) * each


def test_counts_equal_a_built_model_of_many_layers(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"include: [models/qwen2.5-0.5b]\n{REST}")
    assert count_parameters(load_model("qwen2.5-0.5b")) == built_parameters(path)


@pytest.mark.parametrize(
    "model",
    [
        "{family: gpt, vocab_size: 263, hidden_size: 24, num_layers: 3, num_heads: 3, max_seq_len: 70, "
        "ffn_hidden_size: 50, tie_embeddings: false}",
        "{family: llama, vocab_size: 263, hidden_size: 24, num_layers: 3, num_heads: 6, num_kv_heads: 2, "
        "head_dim: 10, ffn_hidden_size: 50, max_seq_len: 70, qkv_bias: true, qk_norm: true}",
        "{family: llama, vocab_size: 263, hidden_size: 24, num_layers: 1, num_heads: 6, ffn_hidden_size: 50, "
        "max_seq_len: 70, tie_embeddings: true}",
        "{family: moe, vocab_size: 263, hidden_size: 24, num_layers: 3, num_heads: 6, num_kv_heads: 2, "
        "head_dim: 10, max_seq_len: 70, qkv_bias: true, qk_norm: true, num_experts: 6, experts_per_token: 3, "
        "expert_ffn_hidden_size: 14, shared_ffn_hidden_size: 22, shared_gate: true, tie_embeddings: true}",
        "{family: moe, vocab_size: 263, hidden_size: 24, num_layers: 3, num_heads: 5, max_seq_len: 70, "
        "latent: {kv_rank: 9, nope_head_dim: 7, rope_head_dim: 4, value_head_dim: 5}, dense_layers: 2, "
        "ffn_hidden_size: 50, num_experts: 6, experts_per_token: 3, expert_ffn_hidden_size: 14, "
        "router: sigmoid, router_bias: true}",
    ],
)
def test_counts_equal_unusual_built_models(tmp_path, model):
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {model}\n{REST}")
    assert count_parameters(load_model(str(path))) == built_parameters(path)


@pytest.mark.parametrize("name", model_names())
def test_the_table_and_the_devices_add_up(name):
    shape = load_model(name)
    assert sum(row.total for row in parameter_table(shape)) == count_parameters(shape)
    assert sum(row.count for row in parameter_table(shape)) == shape.num_layers + 2
    assert active_parameters(shape) <= count_parameters(shape)
    assert (active_parameters(shape) < count_parameters(shape)) == shape.is_moe
    whole = device_embedding_parameters(shape, tp=1)
    whole += device_head_parameters(shape, tp=1, has_embedding=True)
    for layer in shape.layers():
        device = device_layer_parameters(layer, shape.hidden_size, shape.norm, tp=1, ep=1)
        assert device.total == layer_parameters(layer, shape.hidden_size, shape.norm).total
        whole += device.total
    assert whole == count_parameters(shape)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("mixtral-8x7b", 12.88), ("deepseek-v3", 37.55), ("deepseek-v2", 21.38), ("qwen3-235b-a22b", 22.19)],
)
def test_active_parameters_of_mixtures(name, billions):
    assert active_parameters(load_model(name)) / 1e9 == pytest.approx(billions, abs=0.005)


def test_tensor_parallel_ranks_hold_all_matrices_and_repeat_the_rest():
    shape = load_model("llama3-8b")
    layer = shape.blocks[0][1]
    counts = layer_parameters(layer, shape.hidden_size, shape.norm)
    for tp in (2, 4, 8):
        device = device_layer_parameters(layer, shape.hidden_size, shape.norm, tp=tp, ep=1)
        assert tp * device.total == counts.total + (tp - 1) * counts.norms
    # More ranks than key-value heads: each still has one head.
    device = device_layer_parameters(layer, shape.hidden_size, shape.norm, tp=16, ep=1)
    extra = 8 * 2 * 128 * shape.hidden_size
    assert 16 * device.total == counts.total + 15 * counts.norms + extra


def test_expert_parallel_ranks_share_experts_alone():
    shape = load_model("mixtral-8x7b")
    layer = shape.blocks[0][1]
    one = device_layer_parameters(layer, shape.hidden_size, shape.norm, tp=1, ep=1)
    split = device_layer_parameters(layer, shape.hidden_size, shape.norm, tp=1, ep=4)
    assert (split.dense, 4 * split.experts) == (one.dense, one.experts)


def test_a_tied_head_on_another_stage_is_a_second_copy():
    shape = load_model("gpt3-175b")
    alone = device_head_parameters(shape, tp=8, has_embedding=False)
    together = device_head_parameters(shape, tp=8, has_embedding=True)
    assert alone - together == -(-50257 // 8) * 12288
