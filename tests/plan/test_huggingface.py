"""Shapes from Hugging Face files. The counts were taken from transformers' own models of these configs."""

import json

import pytest

from ms_zero.errors import UserError
from ms_zero.plan.huggingface import TRAITS, from_huggingface
from ms_zero.plan.models import load_model
from ms_zero.plan.parameters import count_parameters

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "intermediate_size": 250,
    "max_position_embeddings": 128,
}
GQA = {**SMALL, "num_key_value_heads": 2}
GPT2 = {"vocab_size": 1000, "n_embd": 96, "n_layer": 5, "n_head": 6, "n_positions": 128}
OPT = {**SMALL, "ffn_dim": 250}
DEEPSEEK = {
    **SMALL,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 40,
    "q_lora_rank": 56,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "first_k_dense_replace": 2,
    "n_shared_experts": 2,
}
QWEN_MOE = {**GQA, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2}
HEAD = {"head_dim": 32}
COUNTS = [
    ("llama", GQA, 675_936),
    (
        "llama",
        {**GQA, **HEAD, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
        707_876,
    ),
    ("mistral", GQA, 675_936),
    ("qwen2", GQA, 676_736),
    ("qwen3", {**GQA, **HEAD}, 799_136),
    ("mixtral", {**GQA, "num_local_experts": 4, "num_experts_per_tok": 2}, 1_757_856),
    (
        "qwen2_moe",
        {**QWEN_MOE, "shared_expert_intermediate_size": 130, "mlp_only_layers": [1]},
        1_131_776,
    ),
    ("qwen3_moe", {**QWEN_MOE, **HEAD, "decoder_sparse_step": 2}, 951_584),
    ("deepseek_v2", DEEPSEEK, 1_100_160),
    ("deepseek_v2", {**DEEPSEEK, "q_lora_rank": None}, 1_101_800),
    ("deepseek_v3", DEEPSEEK, 1_100_184),
    ("gpt2", GPT2, 667_680),
    ("gpt_neox", SMALL, 622_082),
    ("opt", OPT, 538_562),
    ("phi3", GQA, 675_936),
    ("gemma", {**GQA, **HEAD}, 702_816),
    ("gemma2", {**GQA, **HEAD}, 703_776),
    ("gemma3_text", {**GQA, **HEAD}, 704_096),
    ("olmo", SMALL, 736_320),
    ("olmo2", GQA, 676_576),
    ("starcoder2", GQA, 464_002),
    ("granite", GQA, 675_936),
    ("smollm3", GQA, 579_936),
]


@pytest.mark.parametrize(("family", "config", "count"), COUNTS)
def test_counts_are_those_of_transformers(family, config, count):
    shape = from_huggingface({"model_type": family, **config})
    assert count_parameters(shape) == count
    assert (shape.note, shape.num_layers, shape.max_seq_len) == ("", 5, 128)


def test_every_known_architecture_was_counted():
    # kimi_k2 is the architecture of deepseek_v3 under another name.
    assert {family for family, _, _ in COUNTS} | {"kimi_k2"} == set(TRAITS)


def test_layers_that_differ_are_blocks_of_their_own():
    shape = from_huggingface({"model_type": "deepseek_v3", **DEEPSEEK})
    assert [(count, layer.experts is not None) for count, layer in shape.blocks] == [(2, False), (3, True)]
    kinds = ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"]
    windows = {"sliding_window": 64, "layer_types": kinds}
    shape = from_huggingface({"model_type": "gemma3_text", **GQA, **windows})
    assert [layer.attention.window for layer in shape.layers()] == [64, None, 64, None, 64]
    off = from_huggingface({"model_type": "qwen2", **GQA, "sliding_window": 64, "use_sliding_window": False})
    assert [layer.attention.window for layer in off.layers()] == [None] * 5


def test_files_and_folders_are_read(tmp_path):
    folder = tmp_path / "My-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **GQA}))
    shape = load_model(str(folder))
    assert (shape.name, count_parameters(shape)) == ("My-Llama", 675_936)
    assert load_model(str(folder / "config.json")) == shape


def test_the_text_part_of_a_multimodal_model_is_read():
    raw = {"model_type": "other", "text_config": {"model_type": "qwen2", **GQA}, "tie_word_embeddings": True}
    assert from_huggingface(raw).tie_embeddings
    assert count_parameters(from_huggingface(raw)) == 676_736 - 96_000


def test_an_unknown_architecture_is_read_as_llama_and_says_so():
    shape = from_huggingface({"model_type": "newllama", **GQA})
    assert count_parameters(shape) == 675_936
    assert shape.note.startswith("architecture newllama is not known and was read as Llama-like")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "model_type is missing"),
        ({"model_type": "llama"}, "vocab_size is missing"),
        ({"model_type": "llama", **GQA, "hidden_size": "96"}, "hidden_size is '96', not a positive integer"),
        ({"model_type": "gpt2", **GPT2, "n_embd": None}, "n_embd is missing"),
        ({"model_type": "t5", **GQA}, "model_type is t5; only decoder-only"),
        ({"model_type": "other", **GQA, "layer_types": ["linear_attention"]}, "layer_types has linear_att"),
    ],
)
def test_what_cannot_be_read_is_refused(raw, message):
    with pytest.raises(UserError, match=message):
        from_huggingface(raw)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected the JSON object"),
        ("{", "cannot read this model"),
        ("[" * 100_000, "cannot read this model"),
        ('{"model_type": "llama"}', "vocab_size is missing"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        load_model(str(path))
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
