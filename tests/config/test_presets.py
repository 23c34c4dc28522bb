import pytest

from ms_zero.config import ConfigError, load_config, schema
from ms_zero.plan.models import load_model, model_names, trainable_names
from ms_zero.plan.parameters import count_parameters
from ms_zero.resources import list_presets

REST = (
    "data: {seq_len: 64}\ntrain: {steps: 3000, global_batch_size: 4, accumulation_steps: 1, output_dir: o}\n"
)


@pytest.mark.parametrize("name", trainable_names())
def test_every_model_preset_completes_a_config(write, name):
    loaded = load_config(write(f"include: [models/{name}]\n{REST}"))
    assert loaded.warnings == ()
    assert loaded.config.model.family in schema.MODEL_FAMILIES


@pytest.mark.parametrize("name", sorted(set(model_names()) - set(trainable_names())))
def test_models_for_planning_only_are_refused_for_training(write, name):
    with pytest.raises(ConfigError, match="can be planned, not trained, by this version; to train"):
        load_config(write(f"include: [models/{name}]\n{REST}"))


@pytest.mark.parametrize("name", model_names())
def test_every_model_preset_is_read_by_the_planner(name):
    shape = load_model(name)
    assert (shape.name, shape.note) == (name, "")
    assert count_parameters(shape) > 100_000


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", list_presets("runs"))
def test_every_run_preset_loads_without_a_warning(name, world):
    loaded = load_config(f"runs/{name}", world_size=world)
    assert loaded.warnings == ()
    train = loaded.config.train
    assert train.global_batch_size == train.micro_batch_size * train.accumulation_steps * world
    assert train.output_dir == f"runs/{name}"


def test_the_shipped_presets_are_there():
    assert {"gpt-tiny", "gpt2-small", "llama-tiny"} <= set(list_presets("models"))
    assert {"quickstart", "llama-tiny"} <= set(list_presets("runs"))
    assert {"cpu", "ascend-910b2"} <= set(list_presets("clusters"))
