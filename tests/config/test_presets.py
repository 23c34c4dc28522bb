import pytest

from ms_zero.config import ConfigError, check_config, load_config, schema
from ms_zero.plan.layout import Layout
from ms_zero.plan.memory import MemoryModel
from ms_zero.plan.models import load_model, model_names
from ms_zero.plan.parameters import count_parameters
from ms_zero.plan.run import layout_of, memory_model_of
from ms_zero.plan.shapes import from_config
from ms_zero.resources import list_presets

REST = (
    "data: {seq_len: 64}\ntrain: {steps: 3000, global_batch_size: 4, accumulation_steps: 1, output_dir: o}\n"
)


@pytest.mark.parametrize("name", model_names())
def test_every_model_preset_completes_a_config(write, name):
    loaded = load_config(write(f"include: [models/{name}]\n{REST}"))
    assert loaded.warnings == ()
    assert loaded.config.model.family in schema.MODEL_FAMILIES


@pytest.mark.parametrize("name", model_names())
def test_every_model_preset_is_read_by_the_planner(name):
    shape = load_model(name)
    assert (shape.name, shape.note) == (name, "")
    assert count_parameters(shape) > 100_000
    layout = Layout(seq_len=min(shape.max_seq_len, 2048))
    assert layout.violations(shape) == []
    assert MemoryModel(shape).peak(layout) > 16 * count_parameters(shape)


SMALL = ("quickstart", "llama-tiny", "mixtral-tiny", "deepseek-tiny")
NAMED = sorted(set(list_presets("runs")) - set(SMALL))


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", SMALL)
def test_a_run_preset_for_any_machine_loads_without_a_warning(name, world):
    loaded = load_config(f"runs/{name}", world_size=world)
    assert loaded.warnings == ()
    train = loaded.config.train
    assert train.global_batch_size == train.micro_batch_size * train.accumulation_steps * world
    assert train.output_dir == f"runs/{name}"


@pytest.mark.parametrize("name", NAMED)
def test_a_run_preset_of_a_named_size_loads_lints_and_plans(name):
    checked = check_config(f"runs/{name}")
    assert {finding.severity for finding in checked.findings} <= {"unavailable"}
    loaded = load_config(f"runs/{name}", world_size=None, to_run=False)
    assert (loaded.warnings, loaded.world_size) == ((), checked.world_size)
    layout = layout_of(loaded.config)
    shape = from_config(loaded.config.model, name)
    assert layout.violations(shape) == [] and layout.devices == loaded.world_size
    assert layout.global_batch_size == loaded.config.train.global_batch_size
    assert memory_model_of(loaded.config, name).report(layout).peak > 0
    assert loaded.config.train.output_dir == f"runs/{name}"


@pytest.mark.parametrize("name", NAMED)
def test_what_cannot_be_run_yet_is_refused_with_the_reason(name):
    if load_config(f"runs/{name}", world_size=None, to_run=False).config.parallel.cp == 1:
        load_config(f"runs/{name}", world_size=None)
        return
    with pytest.raises(ConfigError, match=r"is not available in this version; only 1 is \[MZ062\]"):
        load_config(f"runs/{name}", world_size=None)


def test_the_shipped_presets_are_there():
    assert {"gpt-tiny", "gpt2-small", "llama-tiny"} <= set(list_presets("models"))
    assert {"quickstart", "llama-tiny"} <= set(list_presets("runs"))
    assert {"cpu", "ascend-910b2"} <= set(list_presets("clusters"))
