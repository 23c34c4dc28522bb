import dataclasses
import subprocess
import sys

import pytest

from ms_zero.config import ConfigError, GPTConfig, LlamaConfig, RopeScaling, load_config, mesh_of
from ms_zero.errors import UserError


def test_quickstart_cuts_the_batch_as_written():
    config = load_config("runs/quickstart", world_size=2).config
    assert (config.train.global_batch_size, config.train.micro_batch_size) == (32, 8)
    assert (config.train.accumulation_steps, config.parallel.dp_shard) == (2, 2)
    assert isinstance(config.model, GPTConfig)
    assert (config.model.vocab_size, config.model.ffn_hidden_size) == (257, 512)


def test_sections_are_frozen(load):
    config = load().config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.steps = 3


def test_a_preset_name_loads_also_where_a_folder_has_that_name(tmp_path, monkeypatch):
    (tmp_path / "runs" / "quickstart").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert load_config("runs/quickstart").config.train.steps == 200


def test_later_layers_win_key_by_key(write):
    write("train: {steps: 1, seed: 1, log_interval: 1}\noptim: {lr: 1.0}\n", "base/a.yaml")
    write("include: ./a.yaml\ntrain: {steps: 2, seed: 2}\n", "base/b.yaml")
    path = write(
        "include: [models/gpt-tiny, base/b.yaml]\n"
        "data: {seq_len: 8}\n"
        "train: {steps: 3, global_batch_size: 4, micro_batch_size: 4, output_dir: o}\n"
    )
    loaded = load_config(path, ["train.steps=4", "train.steps=5"])
    train = loaded.config.train
    assert (train.steps, train.seed, train.log_interval, loaded.config.optim.lr) == (5, 2, 1, 1.0)
    assert loaded.origins["train.steps"] == "override 'train.steps=5'"
    assert loaded.origins["train.seed"] == f"{path.parent}/base/b.yaml:2"
    assert loaded.origins["train.log_interval"] == f"{path.parent}/base/a.yaml:1"


def test_the_second_include_wins_over_the_first(write):
    write("train: {seed: 1}\n", "a.yaml")
    write("train: {seed: 2}\n", "b.yaml")
    rest = "data: {seq_len: 8}\ntrain: {steps: 3, global_batch_size: 4, micro_batch_size: 4, output_dir: o}\n"
    for order, seed in (("./a.yaml, ./b.yaml", 2), ("./b.yaml, ./a.yaml", 1)):
        path = write(f"include: [models/gpt-tiny, {order}]\n{rest}")
        assert load_config(path).config.train.seed == seed


def test_one_file_may_be_included_by_two_others(write):
    write("train: {seed: 7}\n", "common.yaml")
    write("include: ./common.yaml\n", "a.yaml")
    write("include: ./common.yaml\n", "b.yaml")
    rest = "data: {seq_len: 8}\ntrain: {steps: 3, global_batch_size: 4, micro_batch_size: 4, output_dir: o}\n"
    path = write(f"include: [models/gpt-tiny, ./a.yaml, ./b.yaml]\n{rest}")
    assert load_config(path).config.train.seed == 7


def test_every_value_has_an_origin(load):
    loaded = load("model.init_std=0.5", world=2)
    for section in dataclasses.fields(loaded.config):
        for field in dataclasses.fields(getattr(loaded.config, section.name)):
            assert loaded.origins[f"{section.name}.{field.name}"]
    assert loaded.origins["data.seq_len"].endswith("run.yaml:2")
    assert loaded.origins["optim.lr"] == "default"
    assert loaded.origins["model.init_std"] == "override 'model.init_std=0.5'"
    assert loaded.origins["model.vocab_size"] == "derived: the byte tokenizer"
    micro = "derived: global_batch_size / (accumulation_steps x dp) = 8 / (1 x 2)"
    assert loaded.origins["train.micro_batch_size"] == micro


@pytest.mark.parametrize(
    ("settings", "scale", "interval"),
    [
        ([], 2.0**16, 1000),
        (["precision.loss_scale=static"], 2.0**16, 1000),
        (["precision.policy=fp16"], 2.0**16, 1000),
        (["precision.policy=fp16", "precision.loss_scale_convention=megatron"], 2.0**32, 1000),
        (["precision.policy=fp16", "precision.loss_scale_convention=torch"], 2.0**16, 2000),
    ],
)
def test_a_convention_of_loss_scaling_brings_its_values(load, settings, scale, interval):
    precision = load(*settings).config.precision
    assert (precision.initial_scale, precision.growth_interval) == (scale, interval)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E3", 1e3),
        ("3", 3.0),
        ("2_0.5", 20.5),
        (".5", 0.5),
        ("+1.e-1", 0.1),
        ("1e+2", 100.0),
    ],
)
def test_every_spelling_of_a_number_is_a_float(load, text, value):
    lr = load(f"optim.lr={text}").config.optim.lr
    assert type(lr) is float
    assert lr == value


def test_overrides_are_yaml(load):
    config = load(
        "data.source=files", "data.files=[a.txt, 'b c.txt']", "model.tie_embeddings=false", "train.seed=1_000"
    ).config
    assert config.data.files == ("a.txt", "b c.txt")
    assert config.model.tie_embeddings is False
    assert config.train.seed == 1000


def test_an_override_may_hold_equals_signs_and_a_whole_section(load):
    config = load("train.output_dir=a=b", "optim={lr: 0.5, clip_norm: 0}").config
    assert config.train.output_dir == "a=b"
    assert (config.optim.lr, config.optim.clip_norm, config.optim.warmup_steps) == (0.5, 0.0, 2)


def test_a_section_without_lines_says_nothing(load, write):
    write("train: {seed: 9}\n", "base.yaml")
    text = (
        "include: [models/gpt-tiny, ./base.yaml]\ncheckpoint:\n  # interval: 3\ndata: {seq_len: 8}\n"
        "train:\noptim:\nmonitor: ~\n"
    )
    required = (
        "train.steps=3000",
        "train.global_batch_size=4",
        "train.micro_batch_size=4",
        "train.output_dir=o",
    )
    assert load(*required, text=text).config.train.seed == 9


def test_anchors_stand_for_their_value(load):
    text = (
        "include: [models/gpt-tiny]\ndata: {seq_len: 8, source: files, files: &f [a, b]}\n"
        "train: {steps: &n 3000, eval_interval: *n, global_batch_size: 4, micro_batch_size: 4,\n"
        "  output_dir: o}\n"
    )
    loaded = load(text=text)
    assert loaded.config.train.eval_interval == 3000
    assert loaded.config.data.files == ("a", "b")


def test_a_byte_order_mark_and_windows_line_ends_are_fine(write):
    text = (
        "include: [models/gpt-tiny]\ndata: {seq_len: 8}\n"
        "train: {steps: 3000, global_batch_size: 4, micro_batch_size: 4, output_dir: Ergebnisse/läufe}\n"
    )
    path = write(b"\xef\xbb\xbf" + text.replace("\n", "\r\n").encode())
    assert load_config(path).config.train.output_dir == "Ergebnisse/läufe"


def test_llama_derives_heads_and_takes_rope_scaling(load):
    scaling = "{factor: 8, low_freq_factor: 1, high_freq_factor: 4, original_max_seq_len: 8192}"
    text = (
        "model: {family: llama, hidden_size: 96, num_layers: 2, num_heads: 6, ffn_hidden_size: 256,\n"
        f"  max_seq_len: 64, rope_scaling: {scaling}}}\n"
        "data: {seq_len: 64}\n"
        "train: {steps: 3000, global_batch_size: 4, micro_batch_size: 4, output_dir: o}\n"
    )
    loaded = load(text=text)
    model = loaded.config.model
    assert isinstance(model, LlamaConfig)
    assert (model.num_kv_heads, model.head_dim, model.vocab_size) == (6, 16, 257)
    assert model.rope_scaling == RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_seq_len=8192
    )
    assert loaded.origins["model.rope_scaling.factor"].endswith("run.yaml:2")
    assert load("model.rope_scaling=null", text=text).config.model.rope_scaling is None
    assert load("model.rope_scaling.factor=2", text=text).config.model.rope_scaling.factor == 2.0


def test_a_llama_head_may_be_wider_than_its_share(load):
    loaded = load("model.head_dim=48", text=_LLAMA)
    assert loaded.config.model.head_dim == 48


def test_the_data_parallel_degree_takes_what_other_degrees_leave(load):
    loaded = load("parallel.dp_replicate=2", world=8)
    assert loaded.config.parallel.dp_shard == 4
    mesh = mesh_of(loaded.config, 8)
    assert (mesh.dp, mesh.world_size) == (8, 8)
    with pytest.raises(UserError, match="for 8 workers, but 4 are running"):
        mesh_of(loaded.config, 4)


def test_an_accelerator_without_a_name_is_a_warning(load):
    loaded = load("hardware.target=Ascend")
    assert loaded.config.hardware.device is None
    assert [finding.rule for finding in loaded.warnings] == ["MZ072"]
    named = load("hardware.target=Ascend", "hardware.device=ascend-910b2")
    assert named.config.hardware.device == "ascend-910b2"
    assert named.warnings == ()


@pytest.mark.parametrize("world", [0, -1, True, 1.0, "2"])
def test_the_number_of_workers_is_checked(write, world):
    with pytest.raises(UserError, match="number of workers"):
        load_config("runs/quickstart", world_size=world)


def test_all_violations_are_reported_at_once(refused):
    findings = refused("train.stpes=3", "optim.lr=-1", "model.num_heads=5", "data.seq_len=true", "x", "y.z=1")
    assert sorted(finding.rule for finding in findings) == [
        "MZ004",
        "MZ004",
        "MZ005",
        "MZ006",
        "MZ009",
        "MZ020",
    ]


def test_an_unreadable_include_does_not_pass_for_missing_keys(refused):
    findings = refused(text="include: [./none.yaml]\ntrain: {stpes: 1}\n")
    assert [finding.rule for finding in findings] == ["MZ008", "MZ004"]


def test_a_lost_choice_is_a_warning_a_contradiction_an_error(load, refused):
    text = _GPT + "optim: {beta1: 0.8, warmup_steps: 2}\n"
    loaded = load("optim.kind=sgd", text=text)
    assert [f.rule for f in loaded.warnings] == ["MZ015"]
    assert (loaded.config.optim.beta1, loaded.origins["optim.beta1"]) == (0.9, "default")
    assert [f.rule for f in refused("optim.kind=sgd", "optim.beta1=0.8", text=_GPT)] == ["MZ014"]
    assert [f.rule for f in refused(text=_GPT + "optim: {beta1: 0.8, kind: sgd, warmup_steps: 2}\n")] == [
        "MZ014"
    ]


def test_a_value_without_effect_breaks_no_rule(load):
    loaded = load(
        "optim.schedule=constant", "optim.lr=1e-5", text=_GPT + "optim: {min_lr: 1e-4, warmup_steps: 2}\n"
    )
    assert [finding.rule for finding in loaded.warnings] == ["MZ015"]
    assert loaded.config.optim.min_lr == 0.0


def test_findings_carry_key_place_and_severity(write):
    path = write("include: [models/gpt-tiny]\ntrain:\n  steps: 3\n  stpes: 4\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    finding = next(finding for finding in caught.value.findings if finding.rule == "MZ004")
    assert (finding.rule, finding.severity, finding.path) == ("MZ004", "error", "train.stpes")
    assert finding.where == f"{path}:4"
    assert str(finding) == f"{path}:4: train.stpes: unknown key; did you mean train.steps? [MZ004]"


def test_labels_are_relative_to_the_working_directory(write, monkeypatch):
    path = write("train: 3\n")
    monkeypatch.chdir(path.parent)
    for name in ("run.yaml", path):
        with pytest.raises(ConfigError, match=r"(?m)^run\.yaml:1: train: "):
            load_config(name)


def test_loading_imports_neither_mindspore_nor_numpy():
    code = (
        "import sys; from ms_zero.config import load_config, render_effective;"
        "render_effective(load_config('runs/quickstart', world_size=2));"
        "print(sorted({'mindspore', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


_GPT = (
    "include: [models/gpt-tiny]\ndata: {seq_len: 8}\n"
    "train: {steps: 10, global_batch_size: 4, micro_batch_size: 4, output_dir: o}\n"
)
_LLAMA = _GPT.replace("gpt", "llama") + "optim: {warmup_steps: 1}\n"
