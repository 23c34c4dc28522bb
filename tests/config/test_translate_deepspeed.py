import json
import random

import pytest

from ms_zero.config import check_config, dump, load_config
from ms_zero.config.translate import render_run_file, to_deepspeed, translate_file
from ms_zero.errors import UserError

GPT = ["models/gpt-tiny"]
REST = ["data.seq_len=64", "train.output_dir=out"]


@pytest.fixture
def translate(write):
    def translate(config, workers=None):
        return translate_file("deepspeed", write(json.dumps(config), "ds.json"), workers)

    return translate


def fates(translation, source):
    return [(note.fate, note.target) for note in translation.notes if note.source == source]


def reason(translation, source, fate):
    (found,) = [note.reason for note in translation.notes if (note.source, note.fate) == (source, fate)]
    return found


ADAM = {"type": "AdamW", "params": {"lr": 1e-4}}

# config, source key, fate, dotted target (or part of the reason), value
CASES = [
    ({"gradient_clipping": 0.3}, "gradient_clipping", "translated", "optim.clip_norm", 0.3),
    ({"steps_per_print": 7}, "steps_per_print", "translated", "train.log_interval", 7),
    ({"zero_optimization": True}, "zero_optimization", "translated", "parallel.zero_stage", 1),
    ({"zero_optimization": {"stage": 3}}, "zero_optimization.stage", "translated", "parallel.zero_stage", 3),
    (
        {"zero_optimization": {"overlap_comm": True}},
        "zero_optimization.overlap_comm",
        "ignored",
        "stage is 0",
        None,
    ),
    (
        {"zero_optimization": {"stage": 1, "overlap_comm": False}},
        "zero_optimization.overlap_comm",
        "untranslatable",
        "always reduced while",
        None,
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device",
        "ignored",
        "only read at stage 3",
        None,
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        "zero_optimization.offload_param.device",
        "translated",
        "offload.params",
        "cpu",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/x"}}},
        "zero_optimization.offload_param.device",
        "untranslatable",
        "'nvme' is not allowed",
        None,
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
        "zero_optimization.offload_optimizer.nvme_path",
        "ignored",
        "the device is cpu",
        None,
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}},
        "zero_optimization.offload_optimizer.nvme_path",
        "translated",
        "offload.nvme_path",
        "/x",
    ),
    (
        {"zero_optimization": {"stage": 1, "cpu_offload": True}},
        "zero_optimization.cpu_offload",
        "translated",
        "offload.optimizer",
        "cpu",
    ),
    (
        {"zero_optimization": {"stage": 3, "allgather_bucket_size": 5e8}},
        "zero_optimization.allgather_bucket_size",
        "ignored",
        "only read at stages 1 and 2",
        None,
    ),
    (
        {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 0}},
        "zero_optimization.stage3_prefetch_bucket_size",
        "translated",
        "parallel.prefetch",
        0,
    ),
    (
        {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8}},
        "zero_optimization.reduce_bucket_size",
        "untranslatable",
        "no effect because parallel.zero_stage is 3",
        None,
    ),
    ({"fp16": {"enabled": True}}, "fp16.enabled", "translated", "precision.policy", "fp16"),
    ({"bfloat16": {"enabled": True}}, "bf16.enabled", "translated", "precision.policy", "bf16"),
    ({"fp16": {"enabled": False, "loss_scale": 8}}, "fp16.loss_scale", "ignored", "only read when", None),
    (
        {"fp16": {"enabled": True, "loss_scale": 128, "hysteresis": 4}},
        "fp16.hysteresis",
        "ignored",
        "fp16.loss_scale is constant",
        None,
    ),
    (
        {"fp16": {"enabled": True, "loss_scale": 128}},
        "fp16.loss_scale",
        "default",
        "precision.initial_scale",
        128,
    ),
    (
        {"fp16": {"enabled": True, "initial_scale_power": 8}},
        "fp16.initial_scale_power",
        "translated",
        "precision.initial_scale",
        256.0,
    ),
    ({"optimizer": ADAM}, "gradient_clipping", "default", "optim.clip_norm", 0.0),
    ({"optimizer": ADAM}, "optimizer.params.betas", "default", "optim.beta2", 0.999),
    ({"optimizer": ADAM}, "optimizer.params.weight_decay", "default", "optim.weight_decay", 0.0),
    (
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
        "optimizer.type",
        "untranslatable",
        "L2 decay",
        None,
    ),
    (
        {"optimizer": {"type": "AdamW", "params": {"adam_w_mode": False}}},
        "optimizer.params.adam_w_mode",
        "ignored",
        "does not read it for AdamW",
        None,
    ),
    (
        {"optimizer": {"type": "OneBitAdam", "params": {"lr": 1}}},
        "optimizer.type",
        "untranslatable",
        "'One",
        None,
    ),
    (
        {"optimizer": {"type": "SGD", "params": {"lr": 1}}},
        "optimizer.type",
        "translated",
        "optim.kind",
        "sgd",
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3}}, "optimizer": ADAM},
        "optimizer.params.lr",
        "ignored",
        "sets the rate to warmup_max_lr 0.001",
        None,
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {}}},
        "scheduler.params.warmup_num_steps",
        "default",
        "optim.warmup_steps",
        1000,
    ),
    (
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}}},
        "scheduler.params.warmup_type",
        "same",
        "linear",
        None,
    ),
    (
        {"scheduler": {"type": "WarmupCosineLR", "params": {"cos_min_ratio": 0.1}}, "optimizer": ADAM},
        "scheduler.params.cos_min_ratio",
        "translated",
        "optim.min_lr",
        1e-5,
    ),
    (
        {"scheduler": {"type": "OneCycle", "params": {}}},
        "scheduler.type",
        "untranslatable",
        "not offered",
        None,
    ),
    (
        {"activation_checkpointing": {"cpu_checkpointing": True}},
        "activation_checkpointing.cpu_checkpointing",
        "ignored",
        "partition_activations",
        None,
    ),
    ({"train_batch_size": "auto"}, "train_batch_size", "same", "the third follows", None),
    ({"gradient_clipping": "auto"}, "gradient_clipping", "untranslatable", "Hugging Face fills it in", None),
    ({"tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size", "translated", "parallel.tp", 4),
    ({"sequence_parallel_size": 4}, "sequence_parallel_size", "translated", "parallel.cp", 4),
    ({"sequence_parallel_size": 4}, "sequence_parallel_size", "default", "parallel.context", "ulysses"),
    ({"sequence_parallel_size": 1}, "sequence_parallel_size", "translated", "parallel.cp", 1),
    (
        {"flops_profiler": {"enabled": True}},
        "flops_profiler.enabled",
        "untranslatable",
        "metrics.jsonl",
        None,
    ),
    ({"grad_clipping": 1}, "grad_clipping", "unknown", "gradient_clipping", None),
    ({"zero_optimization": {"stge": 1}}, "zero_optimization.stge", "unknown", "stage", None),
]


@pytest.mark.parametrize(("config", "source", "fate", "expected", "value"), CASES)
def test_what_becomes_of_a_key(translate, config, source, fate, expected, value):
    translation = translate(config)
    found = [note for note in translation.notes if (note.source, note.fate) == (source, fate)]
    assert found, translation.notes
    if value is None:
        assert any(expected in note.reason for note in found)
    else:
        assert expected in {note.target for note in found}
        section, name = expected.split(".")
        assert translation.values[section][name] == pytest.approx(value)


def test_the_stage_that_is_not_there_is_zero(translate):
    translation = translate({"zero_optimization": {"overlap_comm": True}})
    assert translation.values == {}
    assert fates(translation, "zero_optimization.overlap_comm") == [("ignored", "")]


def test_nvme_below_stage_3_is_host_memory_as_in_deepspeed(translate):
    block = {"stage": 2, "offload_optimizer": {"device": "nvme"}}
    translation = translate({"zero_optimization": block})
    assert translation.values["offload"] == {"optimizer": "cpu"}
    assert "host memory" in reason(translation, "zero_optimization.offload_optimizer.device", "ignored")


def test_low_precision_reductions_of_deepspeed_are_kept(translate):
    translation = translate({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
    assert translation.values["precision"] == {"policy": "bf16", "reduce": "bf16", "accumulate": "bf16"}
    translation = translate({"bf16": {"enabled": True}, "communication_data_type": "fp32"})
    assert translation.values["precision"] == {"policy": "bf16", "reduce": "fp32"}


def test_hybrid_sharding_needs_the_number_of_workers(translate):
    config = {"zero_optimization": {"stage": 3, "mics_shard_size": 8}}
    assert translate(config).values["parallel"] == {"zero_stage": 3, "dp_shard": 8}
    assert "tell --workers" in reason(translate(config), "zero_optimization.mics_shard_size", "translated")
    assert translate(config, 32).values["parallel"] == {"zero_stage": 3, "dp_shard": 8, "dp_replicate": 4}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "both true"),
        ({"gradient_accumulation_steps": 4}, "train_batch_size: missing"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "needs ZeRO stage 3",
        ),
    ],
)
def test_what_deepspeed_refuses_is_refused(translate, config, message):
    with pytest.raises(UserError, match=message):
        translate(config)


def deepspeed_batch(config, dp):
    """How DeepSpeed completes the triple (train, micro, accumulation)."""
    train = config.get("train_batch_size")
    micro, steps = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps")
    if train is not None and micro is not None:
        return train, micro, steps or train // micro // dp
    if train is not None:
        steps = steps or 1
        return train, train // dp // steps, steps
    return micro * (steps or 1) * dp, micro, steps or 1


@pytest.mark.parametrize("seed", range(60))
def test_the_batch_algebra_is_kept(translate, write, seed):
    choose = random.Random(seed)
    micro, steps, dp = choose.randint(1, 9), choose.randint(1, 9), choose.choice([1, 2, 3, 4, 8])
    triple = {
        "train_batch_size": micro * steps * dp,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": steps,
    }
    usable = [{*triple}, {"train_batch_size"}, {"train_micro_batch_size_per_gpu"}]
    usable += [{*triple} - {name} for name in triple]
    kept = choose.choice(usable)
    config = {name: value for name, value in triple.items() if name in kept}
    text = render_run_file(translate(config), "ds.json", GPT)
    train = load_config(write(text), [*REST, "train.steps=3000"], dp).config.train
    found = (train.global_batch_size, train.micro_batch_size, train.accumulation_steps)
    assert found == deepspeed_batch(config, dp)


def generated(seed):
    """A DeepSpeed config of keys that both sides can say, and what of it comes back."""
    choose = random.Random(seed)
    stage = choose.randint(0, 3)
    config = {"zero_optimization": {"stage": stage}}
    config["train_micro_batch_size_per_gpu"] = choose.randint(1, 16)
    config["gradient_accumulation_steps"] = choose.randint(1, 16)
    config["gradient_clipping"] = choose.choice([0.0, 0.5, 1.0])
    config["steps_per_print"] = choose.randint(1, 100)
    policy = choose.choice(["fp32", "bf16", "fp16"])
    if policy != "fp32":
        config[policy] = {"enabled": True}
        config["communication_data_type"] = choose.choice(["fp32", policy])
        config["data_types"] = {"grad_accum_dtype": choose.choice(["fp32", policy])}
    if policy == "fp16":
        config["fp16"] |= choose.choice(
            [
                {"loss_scale": 0, "initial_scale_power": choose.randint(4, 24), "loss_scale_window": 500}
                | {"hysteresis": choose.randint(1, 4), "min_loss_scale": 1},
                {"loss_scale": 1024},
            ]
        )
    if 0 < stage < 3:
        config["zero_optimization"]["reduce_bucket_size"] = choose.randint(10**6, 10**9)
    if stage > 0 and choose.random() < 0.5:
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if stage == 3 and choose.random() < 0.5:
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
        config["zero_optimization"]["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": "/swap",
            "ratio": 0.5,
        }
    lr = choose.choice([1e-4, 3e-4])
    params = {"lr": lr, "betas": [0.9, choose.choice([0.95, 0.999])], "eps": 1e-8, "weight_decay": 0.1}
    config["optimizer"] = {"type": "AdamW", "params": params}
    config["scheduler"] = choose.choice(
        [
            {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0.0, "warmup_max_lr": lr, "warmup_num_steps": 50},
            },
            {
                "type": "WarmupDecayLR",
                "params": {
                    "warmup_min_lr": 0.0,
                    "warmup_max_lr": lr,
                    "warmup_num_steps": 7,
                    "total_num_steps": 900,
                },
            },
            {
                "type": "WarmupCosineLR",
                "params": {
                    "warmup_min_ratio": 0.0,
                    "cos_min_ratio": 0.1,
                    "warmup_num_steps": 7,
                    "total_num_steps": 900,
                },
            },
        ]
    )
    config["scheduler"]["params"]["warmup_type"] = "linear"
    return config


@pytest.mark.parametrize("seed", range(60))
def test_there_and_back_keeps_what_both_can_say(translate, seed):
    config = generated(seed)
    back = to_deepspeed(translate(config).values).values
    assert back == {
        name: pytest.approx(value) if isinstance(value, float) else value for name, value in config.items()
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_generated_config_becomes_a_run_file_without_a_finding(translate, write, seed):
    config = generated(seed)
    text = render_run_file(translate(config), "ds.json", GPT)
    overrides = [*REST] if "total_num_steps" in str(config) else [*REST, "train.steps=3000"]
    assert [str(finding) for finding in check_config(write(text), overrides).findings] == []


def test_a_whole_run_file_becomes_a_config_and_says_what_it_cannot():
    values = dump(load_config("runs/quickstart", ["optim.schedule=wsd", "optim.decay_steps=5"]).config)
    translation = to_deepspeed(values)
    told = {note.source for note in translation.notes}
    leaves = {f"{section}.{name}" for section, names in values.items() for name in names}
    assert told == leaves
    assert translation.values["train_batch_size"] == 32 and "scheduler" not in translation.values
    assert "optim.schedule" in {note.source for note in translation.notes if note.fate == "untranslatable"}
    json.dumps(translation.values)


def test_hybrid_sharding_goes_back_as_mics():
    values = {"parallel": {"zero_stage": 3, "dp_shard": 8, "dp_replicate": 4}}
    assert to_deepspeed(values).values["zero_optimization"] == {"mics_shard_size": 8, "stage": 3}


def test_recompute_and_activations_go_over_where_deepspeed_reads_them(translate):
    block = {"partition_activations": True, "cpu_checkpointing": True}
    assert translate({"activation_checkpointing": block}).values == {"memory": {"activations": "host"}}
