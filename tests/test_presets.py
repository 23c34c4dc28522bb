import importlib.util
import re
from pathlib import Path

import pytest

import ms_zero
from ms_zero.config import ConfigError, require_runnable
from ms_zero.errors import UserError

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "make_presets.py"

# name -> ZeRO stage, pp, micro batch, policy: the founding table
TABLE = {
    "gpt3-1.5b": (1, 1, 16, "fp16"),
    "gpt3-13b": (2, 2, 8, "fp16"),
    "gpt3-175b": (3, 8, 4, "fp16"),
    "llama-70b": (2, 4, 4, "bf16"),
}


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("make_presets", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", TABLE)
def test_the_founding_table(name):
    config = ms_zero.setup_training(name)
    parallel = config.parallel
    found = (parallel.zero_stage, parallel.pp, config.train.micro_batch_size, config.precision.policy)
    assert found == TABLE[name]
    assert (parallel.tp, parallel.cp) == (1, 1)


def test_the_shape_of_gpt3_1_5b_is_gpt2_xl_with_the_sequence_of_gpt3():
    config = ms_zero.setup_training("gpt3-1.5b")
    model = config.model
    assert (model.num_layers, model.hidden_size, model.num_heads) == (48, 1600, 25)
    assert config.data.seq_len == model.max_seq_len == 2048


def test_the_number_of_workers_decides_the_data_parallel_degree():
    few, many = ms_zero.setup_training("gpt3-175b"), ms_zero.setup_training("gpt3-175b", workers=512)
    assert many.parallel.dp_shard == 64 and many.parallel.pp == few.parallel.pp == 8
    assert many.train.global_batch_size == few.train.global_batch_size
    assert many.train.accumulation_steps == 1536 // (64 * 4)
    with pytest.raises(UserError, match="does not divide the number of workers"):
        ms_zero.setup_training("gpt3-175b", workers=12)


def test_overrides_go_last():
    assert ms_zero.setup_training("gpt3-13b", overrides=["train.steps=7"]).train.steps == 7
    with pytest.raises(UserError, match=r"did you mean train\.steps"):
        ms_zero.setup_training("gpt3-13b", overrides=["train.stpes=7"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt3-175", "did you mean gpt3-175b"),
        ("gpt3_13b", "did you mean gpt3-13b"),
        ("lama-70b", "did you mean llama-70b"),
        ("x", "known: deepseek-tiny, gpt3-1.5b"),
        ("../models/gpt2-small", "no preset"),
        ("", "no preset"),
    ],
)
def test_unknown_names_are_refused_with_suggestions(name, message):
    with pytest.raises(UserError, match=message) as caught:
        ms_zero.setup_training(name)
    assert len(str(caught.value).splitlines()) == 1


COMPILED = ("memory.recompute=sqrt", "engine.kind=graph")


@pytest.mark.parametrize("name", ["gpt3-13b", "gpt3-175b", "llama-70b"])
def test_a_config_that_cannot_be_run_is_refused_where_it_would_be(name):
    require_runnable(ms_zero.setup_training(name))
    config = ms_zero.setup_training(name, workers=16, overrides=["parallel.pp=1", *COMPILED])
    with pytest.raises(ConfigError, match=r"memory.recompute: sqrt is not available with .*\[MZ069\]"):
        require_runnable(config)


def test_the_trainer_refuses_it_before_it_builds_anything():
    from ms_zero import runner

    with pytest.raises(ConfigError, match=r"\[MZ069\]"):
        config = ms_zero.setup_training("gpt3-175b", workers=16, overrides=["parallel.pp=1", *COMPILED])
        runner.build_trainer(config, text=None, comm=None)


def test_the_package_offers_nothing_else_by_accident():
    with pytest.raises(AttributeError, match="no attribute 'setup_trainign'"):
        _ = ms_zero.setup_trainign


def test_every_file_is_what_the_script_writes(script):
    stale = [name for name, text in script.presets() if (script.RUNS / f"{name}.yaml").read_text() != text]
    assert stale == [], "run scripts/make_presets.py"


def test_the_founding_layout_has_the_cards_that_the_file_says(script):
    for row in script.TABLE:
        layout = script.founding_layout(row)
        assert ms_zero.setup_training(row.name).parallel.dp_shard == layout.dp_shard


@pytest.mark.parametrize("name", TABLE)
def test_a_planned_file_tells_its_gain(name):
    text = (SCRIPT.parent.parent / "configs" / "runs" / f"{name}-planned.yaml").read_text()
    (after, before, gain), = re.findall(r"(\d+) tokens/s a card instead of (\d+) \(x ([\d.]+)\)", text)
    assert float(gain) == pytest.approx(int(after) / int(before), rel=0.02) and float(gain) >= 1
    planned, founding = ms_zero.setup_training(f"{name}-planned"), ms_zero.setup_training(name)
    assert planned.train.global_batch_size == founding.train.global_batch_size
    assert planned.model == founding.model and planned.optim == founding.optim
