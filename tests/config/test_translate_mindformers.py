import pytest

from ms_zero.config.translate import translate_file


@pytest.fixture
def translate(write):
    def translate(text, workers=None):
        return translate_file("mindformers", write(text), workers)

    return translate


def ignored(translation):
    return [note.source for note in translation.notes if note.fate == "ignored"]


BATCHES = [
    # stages, pieces, accumulation steps, interleave, what they make, the key that is not read
    (1, 8, 4, 1, 4, "parallel_config.micro_batch_num"),
    (2, 8, 4, 1, 8, "runner_config.gradient_accumulation_steps"),
    (4, 8, 4, 2, 16, "runner_config.gradient_accumulation_steps"),
    (1, 8, 4, 2, 8, "parallel_config.micro_batch_num"),
]


@pytest.mark.parametrize(("stages", "pieces", "steps", "interleave", "expected", "unread"), BATCHES)
def test_the_accumulation_of_graph_mode(translate, stages, pieces, steps, interleave, expected, unread):
    translation = translate(
        f"parallel_config: {{data_parallel: 2, pipeline_stage: {stages}, micro_batch_num: {pieces}}}\n"
        f"runner_config: {{batch_size: 3, gradient_accumulation_steps: {steps}}}\n"
        f"micro_batch_interleave_num: {interleave}\n"
    )
    assert translation.values["train"] == {"micro_batch_size": 3, "accumulation_steps": expected}
    assert translation.values["parallel"] == {"dp_shard": 2, "pp": stages}
    assert ignored(translation) == [unread]


@pytest.mark.parametrize(
    ("section", "degree", "key", "ring", "ulysses"),
    [
        ("parallel_config", "context_parallel", "context_parallel_algo", "colossalai_cp", "ulysses_cp"),
        ("parallelism", "context_parallel", "context_parallel_method", "colossal", "ulysses"),
    ],
)
def test_the_kind_of_context_parallelism(translate, section, degree, key, ring, ulysses):
    for name, expected in ((ring, "ring"), (ulysses, "ulysses")):
        found = translate(f"{section}: {{{degree}: 2, {key}: {name}}}").values["parallel"]
        assert (found["cp"], found["context"]) == (2, expected)
    unread = translate(f"{section}: {{{degree}: 1, {key}: {ulysses}}}")
    assert f"{section}.{key}" in ignored(unread) and "context" not in unread.values["parallel"]
    mixed = translate(f"{section}: {{{degree}: 4, {key}: hybrid}}")
    (note,) = [note for note in mixed.notes if note.source == f"{section}.{key}"]
    assert note.fate == "untranslatable" and "see parallel.context" in note.reason


def test_the_order_of_a_pipeline(translate):
    text = "parallel: {pipeline_config: {pipeline_interleave: True, pipeline_scheduler: %s}}"
    for name, expected in (("1f1b", "1f1b"), ("zero_bubble_v", "zb-v"), ("seqpipe", "seqpipe")):
        assert translate(text % name).values["parallel"]["schedule"] == expected


PARALLEL_OPTIMIZER = "parallel: {enable_parallel_optimizer: %s}\nparallel_config: {data_parallel: 8, %s}\n"


def test_the_parallel_optimizer_shards_weights(translate):
    translation = translate(PARALLEL_OPTIMIZER % ("True", "optimizer_weight_shard_size: 4"))
    expected = {"dp_shard": 4, "dp_replicate": 2, "zero_stage": 3, "reshard_after_forward": False}
    assert translation.values["parallel"] == expected
    translation = translate(PARALLEL_OPTIMIZER % ("False", "optimizer_weight_shard_size: 4"))
    assert translation.values["parallel"] == {"dp_shard": 8, "zero_stage": 0}
    assert ignored(translation) == ["parallel_config.optimizer_weight_shard_size"]


def test_weights_are_gathered_again_when_that_is_recomputed(translate):
    again = "recompute_config: {parallel_optimizer_comm_recompute: True}\n"
    translation = translate(PARALLEL_OPTIMIZER % ("True", "") + again)
    assert translation.values["parallel"]["reshard_after_forward"] is True


WRAPPERS = [
    ("{scale_sense: 1.0}", {}),
    ("{scale_sense: 128}", {"loss_scale": "static", "initial_scale": 128.0}),
    (
        "{scale_sense: {type: DynamicLossScaleUpdateCell, loss_scale_value: 4096, scale_factor: 2, "
        "scale_window: 100}}",
        {
            "loss_scale": "dynamic",
            "loss_scale_convention": "torch",
            "initial_scale": 4096.0,
            "growth_interval": 100,
        },
    ),
]


@pytest.mark.parametrize(("text", "precision"), WRAPPERS)
def test_the_loss_scale_of_the_wrapper(translate, text, precision):
    translation = translate(f"parallel_config: {{model_parallel: 1}}\nrunner_wrapper: {text}\n")
    assert translation.values.get("precision", {}) == precision


@pytest.mark.parametrize(
    ("text", "clip"),
    [
        ("use_clip_grad: True", 1.0),
        ("use_clip_grad: False, max_grad_norm: 3", 0.0),
        ("use_clip_grad: True, max_grad_norm: 3", 3),
    ],
)
def test_clipping_of_the_wrapper(translate, text, clip):
    translation = translate(f"parallel_config: {{model_parallel: 1}}\nrunner_wrapper: {{{text}}}\n")
    assert translation.values["optim"] == {"clip_norm": clip}


def test_clipping_by_zero_would_stop_training_in_pynative(translate):
    translation = translate("training: {steps: 5, max_norm: 0}")
    assert translation.values["optim"] == {"clip_norm": 0.0}
    assert any("0 stops training" in note.reason for note in translation.notes)


def test_pynative_defaults_differ_from_a_run_file(translate):
    translation = translate(
        "training: {steps: 5}\noptimizer: {type: AdamW}\nparallelism: {pipeline_parallel: 2}\n"
    )
    assert translation.values["train"] == {"steps": 5, "micro_batch_size": 1, "global_batch_size": 1}
    assert translation.values["optim"] == {"kind": "adamw", "weight_decay": 0.01}
    assert translation.values["parallel"] == {"zero_stage": 3, "reshard_after_forward": False, "pp": 2}


def test_pynative_turns_sequence_parallelism_on_with_tensor_parallelism(translate):
    given = "parallelism: {tensor_parallel: %d, sequence_parallel: false}\n"
    assert translate(given % 4).values["parallel"]["sequence_parallel"] is True
    assert "sequence_parallel" not in translate(given % 1).values.get("parallel", {})


def test_hybrid_sharding_of_pynative_needs_the_workers(translate):
    text = "parallelism: {data_parallel_shard: 4, tensor_parallel: 2}\n"
    expected = {"zero_stage": 3, "dp_shard": 4, "tp": 2, "sequence_parallel": True}
    assert translate(text).values["parallel"] == expected
    assert translate(text, 16).values["parallel"] == {**expected, "dp_replicate": 2}


SCHEDULES = [
    (
        "type: ConstantWarmUpLR, learning_rate: 1.e-4, warmup_ratio: 0.1",
        {"schedule": "constant", "warmup_steps": 100},
    ),
    (
        "type: CosineWithWarmUpLR, learning_rate: 1.e-4, lr_end: 1.e-5",
        {"schedule": "cosine", "min_lr": 1e-5, "warmup_steps": 0},
    ),
    (
        "type: WarmUpStableDecayLR, learning_rate: 1.e-4, warmup_steps: 10, decay_start_steps: 900",
        {"schedule": "wsd", "warmup_steps": 10, "decay_steps": 100},
    ),
    (
        "type: CosineAnnealingLR, base_lr: 1.e-4, eta_min: 1.e-5",
        {"schedule": "cosine", "min_lr": 1e-5, "warmup_steps": 0},
    ),
]


@pytest.mark.parametrize(("text", "optim"), SCHEDULES)
def test_schedules(translate, text, optim):
    translation = translate(f"training: {{steps: 1000}}\nlr_scheduler: {{{text}}}\n")
    assert translation.values["optim"] == {"lr": 1e-4, **optim}


def test_a_warmup_ratio_without_steps_is_told(translate):
    text = (
        "lr_schedule: {type: CosineWithWarmUpLR, learning_rate: 1.e-4, warmup_ratio: 0.1, total_steps: -1}\n"
    )
    translation = translate(f"runner_config: {{epochs: 3}}\n{text}")
    fates = {note.source: note.fate for note in translation.notes}
    assert fates["lr_schedule.warmup_ratio"] == fates["lr_schedule.total_steps"] == "untranslatable"
    assert fates["runner_config.epochs"] == "untranslatable"


@pytest.mark.parametrize(
    ("text", "width"),
    [
        ("hidden_size: 4096, multiple_of: 256", 11008),
        ("hidden_size: 8192, multiple_of: 4096, ffn_dim_multiplier: 1.3", 28672),
        ("hidden_size: 4096, multiple_of: 256, intermediate_size: 14336", 14336),
    ],
)
def test_the_width_of_llamas_mlp(translate, text, width):
    translation = translate(
        f"parallel_config: {{}}\nmodel: {{model_config: {{type: LlamaConfig, {text}}}}}\n"
    )
    assert translation.values["model"]["ffn_hidden_size"] == width


def test_a_model_with_experts_is_told(translate):
    model = "model: {model_type: deepseek_v3, hidden_size: 64, num_hidden_layers: 2, n_routed_experts: 8}\n"
    translation = translate(f"training: {{steps: 3}}\n{model}")
    assert "model" not in translation.values
    assert any("describe it with model.family moe" in note.reason for note in translation.notes)


def test_expert_parallelism_is_among_the_ranks_of_data_parallelism(translate):
    old = "parallel_config: {data_parallel: 8, model_parallel: 2, expert_parallel: 4}\n"
    for text in (old, "parallelism: {data_parallel_shard: 8, tensor_parallel: 2, expert_parallel: 4}\n"):
        assert translate(text).values["parallel"]["ep"] == 4


def test_callbacks_tell_intervals(translate):
    monitors = "{type: MFLossMonitor, per_print_times: 5},{type: CheckpointMonitor, save_checkpoint_steps: 9}"
    translation = translate(f"parallel_config: {{}}\ncallbacks: [{monitors}, {{type: X}}]\n")
    assert translation.values == {"train": {"log_interval": 5}, "checkpoint": {"interval": 9}}
    assert any(note.reason == "'X' has no counterpart" for note in translation.notes)


def test_a_mixture_of_paths_is_told(translate):
    data = "train_dataset: {data_loader: {config: {data_path: ['0.3', /a, '0.7', /b]}}}\n"
    translation = translate(f"parallel_config: {{}}\n{data}")
    assert "data" not in translation.values
    assert any("data.parts" in note.reason for note in translation.notes)
