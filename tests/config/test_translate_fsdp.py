import pytest

from ms_zero.config.translate import translate_file
from ms_zero.errors import UserError


@pytest.fixture
def translate(write):
    def translate(text, workers=None):
        return translate_file("fsdp", write(text), workers)

    return translate


STAGES = [
    ("sharding_strategy: FULL_SHARD", {"zero_stage": 3}),
    ("sharding_strategy: 1", {"zero_stage": 3}),
    ("sharding_strategy: ShardingStrategy.SHARD_GRAD_OP", {"zero_stage": 3, "reshard_after_forward": False}),
    ("sharding_strategy: NO_SHARD", {"zero_stage": 0}),
    (
        "{sharding_strategy: HYBRID_SHARD, device_mesh: [2, 4]}",
        {"zero_stage": 3, "dp_replicate": 2, "dp_shard": 4},
    ),
    ("reshard_after_forward: true", {"zero_stage": 3}),
    (
        "{reshard_after_forward: false, mesh: [8]}",
        {"zero_stage": 3, "reshard_after_forward": False, "dp_shard": 8},
    ),
    ("reshard_after_forward: 4", {"zero_stage": 3}),
    ("fsdp: full_shard auto_wrap", {"zero_stage": 3, "wrap": "block"}),
    ("fsdp: [shard_grad_op]", {"zero_stage": 3, "reshard_after_forward": False}),
    ("fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: true}", {"zero_stage": 3}),
    (
        "{sharding_strategy: FULL_SHARD, auto_wrap_policy: SIZE_BASED_WRAP, min_num_params: 1e6}",
        {"zero_stage": 3, "wrap": "size", "wrap_elements": 1_000_000},
    ),
    ("{sharding_strategy: FULL_SHARD, backward_prefetch: NO_PREFETCH}", {"zero_stage": 3, "prefetch": 0}),
]


@pytest.mark.parametrize(("text", "parallel"), STAGES)
def test_how_weights_are_shared(translate, text, parallel):
    assert translate(text).values["parallel"] == parallel


PRECISIONS = [
    ("mixed_precision: 'no'", {"policy": "fp32"}),
    ("mixed_precision: bf16", {"policy": "bf16", "reduce": "bf16"}),
    ("mixed_precision: {param_dtype: torch.bfloat16}", {"policy": "bf16", "reduce": "bf16"}),
    ("mixed_precision: {param_dtype: bfloat16, reduce_dtype: float32}", {"policy": "bf16", "reduce": "fp32"}),
    ("mp_policy: {param_dtype: bfloat16, reduce_dtype: null}", {"policy": "bf16", "reduce": "bf16"}),
    ("mixed_precision: {reduce_dtype: bfloat16}", {"reduce": "bf16"}),
]


@pytest.mark.parametrize(("text", "precision"), PRECISIONS)
def test_dtypes(translate, text, precision):
    assert translate(text).values["precision"] == precision


def test_fp16_brings_the_rules_of_the_gradient_scaler(translate):
    precision = translate("mixed_precision: fp16").values["precision"]
    assert precision["loss_scale_convention"] == "torch" and precision["growth_interval"] == 2000


def test_offload_includes_the_update(translate):
    for text in (
        "cpu_offload: true",
        "cpu_offload: {offload_params: true}",
        "offload_policy: CPUOffloadPolicy()",
    ):
        assert translate(text).values["offload"] == {"params": "cpu", "optimizer": "cpu"}
    assert translate("fsdp_config: {fsdp_offload_params: 'False'}").values["offload"] == {"params": "none"}


def test_hybrid_sharding_follows_the_machines(translate):
    text = "{fsdp_config: {fsdp_sharding_strategy: HYBRID_SHARD}, num_machines: 4, num_processes: 32}"
    assert translate(text).values["parallel"] == {"zero_stage": 3, "dp_replicate": 4, "dp_shard": 8}
    notes = translate("sharding_strategy: HYBRID_SHARD").notes
    assert any("set parallel.dp_shard to the devices of a machine" in note.reason for note in notes)


IGNORED = [
    ("{auto_wrap_policy: TRANSFORMER_BASED_WRAP, min_num_params: 5}", "min_num_params"),
    ("{auto_wrap_policy: NO_WRAP, transformer_layer_cls_to_wrap: B}", "transformer_layer_cls_to_wrap"),
    ("{fsdp_version: 2, backward_prefetch: BACKWARD_PRE}", "backward_prefetch"),
    ("{fsdp_version: 2, use_orig_params: true}", "use_orig_params"),
    ("{fsdp_version: 2, reshard_after_forward: true, sharding_strategy: FULL_SHARD}", "sharding_strategy"),
    (
        "{fsdp_version: 1, reshard_after_forward: true, sharding_strategy: FULL_SHARD}",
        "reshard_after_forward",
    ),
]


@pytest.mark.parametrize(("text", "name"), IGNORED)
def test_what_fsdp_or_accelerate_does_not_read_is_pointed_out(translate, text, name):
    assert [note.source for note in translate(text).notes if note.fate == "ignored"] == [name]


def test_an_option_under_two_names_is_refused(translate):
    with pytest.raises(UserError, match="the same option as sharding_strategy"):
        translate("sharding_strategy: FULL_SHARD\nfsdp_config: {fsdp_sharding_strategy: NO_SHARD}\n")


def test_keys_keep_the_names_of_the_file(translate):
    translation = translate("fsdp_config: {fsdp_offload_params: true, fsdp_sharding_strategy: 2}")
    assert {note.source for note in translation.notes} == {
        "fsdp_config.fsdp_offload_params",
        "fsdp_config.fsdp_sharding_strategy",
    }


@pytest.mark.parametrize(
    "text",
    [
        "sharding_strategy: SOME",
        "mixed_precision: fp8",
        "mp_policy: {param_dtype: int8}",
        "offload_params: maybe",
    ],
)
def test_a_value_that_nobody_knows_is_told(translate, text):
    translation = translate(text)
    assert set(translation.values) <= {"parallel"}  # full sharding is what FSDP does by default
    assert [note.fate for note in translation.notes if note.fate != "default"] == ["untranslatable"]


def test_full_sharding_is_the_default_of_fsdp(translate):
    assert translate("backward_prefetch: BACKWARD_PRE").values["parallel"] == {"zero_stage": 3, "prefetch": 1}
    assert "parallel" not in translate("{distributed_type: MULTI_GPU, mixed_precision: bf16}").values
