import json

import pytest

from ms_zero.config import dump, load_config, render_effective

VARIANTS = [
    ("runs/quickstart", []),
    ("runs/llama-tiny", ["optim.kind=sgd", "optim.schedule=constant"]),
    ("runs/quickstart", ["data.source=files", "data.files=['it''s', 'a,b', '[x]', 'null', '12', 'ü: #']"]),
    ("runs/quickstart", ["optim.schedule=wsd", "optim.decay_steps=20", "optim.eps=1e-12", "optim.lr=1"]),
    ("runs/quickstart", ["train.output_dir=auto", "checkpoint.resume=some/where", "hardware.target=Ascend"]),
    (
        "runs/llama-tiny",
        [
            "model.rope_scaling={factor: 8, low_freq_factor: 1, original_max_seq_len: 64}",
            "model.rope_scaling.high_freq_factor=4",
            "train.eval_interval=0",
        ],
    ),
]


@pytest.mark.parametrize(("name", "overrides"), VARIANTS)
def test_the_effective_config_loads_as_itself(write, name, overrides):
    loaded = load_config(name, overrides, 2)
    again = load_config(write(render_effective(loaded)), world_size=2)
    assert again.config == loaded.config
    assert dump(again.config) == dump(loaded.config)


def test_every_value_is_shown_with_its_origin():
    loaded = load_config("runs/quickstart", ["train.seed=5"], 2)
    text = render_effective(loaded)
    lines = text.splitlines()
    assert lines[0].endswith("runs/quickstart.yaml for 2 workers")
    assert any(line.split() == ["seed:", "5", "#", "override", "'train.seed=5'"] for line in lines)
    assert any(line.split("#")[0].strip() == "micro_batch_size: 8" and "derived" in line for line in lines)
    assert any(line.strip().startswith("# files: []") and "data.source is stdlib" in line for line in lines)
    sections = [line for line in lines if line.endswith(":")]
    assert len(lines) == 1 + len(sections) + sum(len(section) for section in dump(loaded.config).values())


def test_dump_is_json_data():
    values = dump(load_config("runs/quickstart", ["data.source=files", "data.files=[a]"]).config)
    assert values["data"]["files"] == ["a"]
    assert values["model"]["family"] == "gpt"
    assert json.loads(json.dumps(values)) == values
