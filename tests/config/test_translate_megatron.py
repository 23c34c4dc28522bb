import random

import pytest

from ms_zero.config import load_config
from ms_zero.config.translate import render_run_file, translate_file
from ms_zero.errors import UserError


@pytest.fixture
def translate(write):
    def translate(text, workers=None):
        return translate_file("megatron", write(text, "pretrain.sh"), workers)

    return translate


def fates(translation):
    return {note.source: note.fate for note in translation.notes if note.fate != "default"}


CASES = [
    ("--tensor-model-parallel-size 4", "parallel", {"tp": 4}),
    ("--expert-model-parallel-size 4", "parallel", {"ep": 4}),
    ("--context-parallel-size 2 --cp-comm-type p2p", "parallel", {"cp": 2, "context": "ring"}),
    ("--context-parallel-size 4 --cp-comm-type a2a", "parallel", {"cp": 4, "context": "ulysses"}),
    ("--use-distributed-optimizer", "parallel", {"zero_stage": 1}),
    ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", "parallel", {"zero_stage": 2}),
    ("--use-torch-fsdp2", "parallel", {"zero_stage": 3}),
    ("--bf16", "precision", {"policy": "bf16"}),
    ("--bf16 --grad-reduce-in-bf16", "precision", {"policy": "bf16", "reduce": "bf16"}),
    ("--fp16 --loss-scale 1024", "precision", None),
    (
        "--optimizer-cpu-offload --optimizer-offload-fraction 0.5",
        "offload",
        {"optimizer": "cpu", "fraction": 0.5},
    ),
    ("--lr 1e-4 --lr-decay-style constant --lr-warmup-iters 7", "optim", None),
    ("--rampup-batch-size 16 8 300 --micro-batch-size 1 --global-batch-size 32", "train", None),
    (
        "--split 98,1,1 --data-path a_text_document",
        "data",
        {"files": ["a_text_document"], "source": "megatron"},
    ),
    ("--data-path 1.0 a_text_document", "data", {"files": ["a_text_document"]}),
    (
        "--seq-length 128 --reset-position-ids --reset-attention-mask",
        "data",
        {"reset_attention": True, "seq_len": 128},
    ),
]


@pytest.mark.parametrize(("text", "section", "values"), CASES)
def test_what_becomes_of_arguments(translate, text, section, values):
    found = translate(text).values[section]
    expected = (
        values
        or {
            "precision": {"policy": "fp16", "loss_scale": "static", "initial_scale": 1024.0},
            "optim": {"schedule": "constant", "warmup_steps": 7, "beta2": 0.999, "weight_decay": 0.01},
            "train": {"rampup_start": 16, "rampup_increment": 8, "rampup_samples": 300},
        }[section]
    )
    assert {name: found[name] for name in expected} == expected


def test_fp16_brings_the_rules_and_defaults_of_megatron(translate):
    precision = translate("--fp16").values["precision"]
    assert precision["loss_scale_convention"] == "megatron" and precision["initial_scale"] == 2.0**32
    assert precision["accumulate"] == precision["reduce"] == "fp16"
    precision = translate("--fp16 --accumulate-allreduce-grads-in-fp32").values["precision"]
    assert precision["accumulate"] == precision["reduce"] == "fp32"


IGNORED = [
    ("--sequence-parallel", "--sequence-parallel"),
    ("--bf16 --loss-scale-window 9", "--loss-scale-window"),
    ("--fp16 --loss-scale 8 --hysteresis 3", "--hysteresis"),
    ("--overlap-param-gather", "--overlap-param-gather"),
    ("--recompute-granularity selective --recompute-num-layers 2", "--recompute-num-layers"),
    ("--optimizer-offload-fraction 0.5", "--optimizer-offload-fraction"),
    ("--data-parallel-sharding-strategy optim", "--data-parallel-sharding-strategy"),
    ("--num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2", "--num-query-groups"),
]


@pytest.mark.parametrize(("text", "name"), IGNORED)
def test_what_megatron_does_not_read_is_pointed_out(translate, text, name):
    assert [note.source for note in translate(text).notes if note.fate == "ignored"] == [name]


LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear"


def test_the_family_follows_from_positions_norm_and_activation(translate):
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
    assert translate(shape).values["model"]["family"] == "gpt"
    assert translate(f"{shape} {LLAMA}").values["model"]["family"] == "llama"
    mixed = translate(f"{shape} --swiglu")
    assert "model" not in mixed.values
    assert "learned positions, LayerNorm and SwiGLU" in " ".join(note.reason for note in mixed.notes)
    assert fates(translate(f"{shape} --num-experts 8"))["--hidden-size"] == "untranslatable"


def test_the_kind_of_context_parallelism_is_read_where_there_is_any(translate):
    assert fates(translate("--lr 1\n--cp-comm-type a2a"))["--cp-comm-type"] == "ignored"
    mixed = translate("--context-parallel-size 4 --cp-comm-type a2a+p2p")
    assert fates(mixed)["--cp-comm-type"] == "untranslatable" and mixed.values["parallel"]["cp"] == 4
    assert "context" not in mixed.values["parallel"]


def test_megatron_ties_embeddings_unless_told(translate):
    shape = f"--num-layers 2 --hidden-size 64 --num-attention-heads 4 {LLAMA}"
    assert translate(shape).values["model"]["tie_embeddings"] is True
    assert (
        translate(f"{shape} --untie-embeddings-and-output-weights").values["model"]["tie_embeddings"] is False
    )


def test_dropout_of_megatron_is_told(translate):
    shape = "--num-layers 2 --hidden-size 64 --num-attention-heads 4"
    assert fates(translate(shape))["--hidden-dropout"] == "untranslatable"
    assert fates(translate(f"{shape} --hidden-dropout 0.0"))["--hidden-dropout"] == "same"


def test_samples_become_steps_only_when_that_is_exact(translate):
    batch = "--micro-batch-size 1 --global-batch-size 8"
    assert translate(f"{batch} --train-samples 80").values["train"]["steps"] == 10
    assert fates(translate(f"{batch} --train-samples 81"))["--train-samples"] == "untranslatable"
    growing = translate(f"{batch} --rampup-batch-size 4 4 100 --train-samples 80")
    assert fates(growing)["--train-samples"] == "untranslatable"


@pytest.mark.parametrize("seed", range(40))
def test_the_batch_algebra_is_kept(translate, write, seed):
    choose = random.Random(seed)
    micro, steps, dp = choose.randint(1, 9), choose.randint(1, 9), choose.choice([1, 2, 3, 4, 8])
    given = choose.random() < 0.7
    text = f"--micro-batch-size {micro} --train-iters 3000" + (
        f" --global-batch-size {micro * steps * dp}" * given
    )
    run = render_run_file(translate(text), "x", ["models/gpt-tiny"])
    train = load_config(write(run), ["data.seq_len=64", "train.output_dir=out"], dp).config.train
    expected = (micro * steps * dp, steps) if given else (micro * dp, 1)
    assert (train.micro_batch_size, train.global_batch_size, train.accumulation_steps) == (micro, *expected)


def test_a_script_with_arrays_variables_and_comments(translate):
    text = (
        "#!/bin/bash\nTP=2 # ranks\nexport X=1\nARGS=(\n  --tensor-model-parallel-size ${TP} # here\n"
        "\t--lr 1e-4 --min-lr=1e-5\n  --data-path '/a b/c'\n)\nOTHER=(--swiglu --fp16)\n"
        'torchrun pretrain_gpt.py "${ARGS[@]}" \\\n  --train-iters \\\n  50\n'
    )
    values = translate(text).values
    assert values["parallel"] == {"tp": 2} and values["train"] == {"steps": 50}
    assert values["optim"]["min_lr"] == 1e-5 and values["data"]["files"] == ["/a b/c"]
    assert values["precision"]["policy"] == "fp16"


def test_a_variable_that_the_script_does_not_set_is_told(translate):
    for value in ("$DATA", "${DATA}_text", "$1"):
        translation = translate(f"--data-path {value} --split 1,0,0")
        (note,) = [note for note in translation.notes if note.source == "--data-path"]
        assert "a shell variable" in note.reason and note.where.endswith("pretrain.sh:1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "no --arguments in this file"),
        ("--lr 1\n--lr 2\n", "pretrain.sh:2: --lr is already set at"),
        ("--save 'abc", "pretrain.sh:1: not a command line: no closing quotation"),
    ],
)
def test_a_file_that_is_no_command_line_is_refused(translate, text, message):
    with pytest.raises(UserError, match=message):
        translate(text)


def test_unknown_arguments_are_told_with_line_and_nearest(translate):
    (note,) = [
        note for note in translate("--lr 1\n--tensor-model-paralel-size 2").notes if note.fate == "unknown"
    ]
    assert note.where.endswith(":2") and "--tensor-model-parallel-size" in note.reason


def test_a_known_family_of_arguments_is_no_unknown_one(translate):
    assert fates(translate("--tensorboard-dir x --moe-router-topk 2")) == {
        "--tensorboard-dir": "untranslatable",
        "--moe-router-topk": "untranslatable",
    }
