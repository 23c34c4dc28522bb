"""What holds for every translation, shown on an example file of each kind and on files of other versions."""

import random
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ms_zero.config import check_config, load_config, schema
from ms_zero.config.translate import FATES, TOOLS, render_run_file, translate_file
from ms_zero.config.translate.result import RunNotes
from ms_zero.errors import UserError

EXAMPLES = sorted((Path(__file__).parent / "examples").iterdir())


def tool_of(path):
    return path.name.partition("-")[0]


def known_keys():
    owners = {"model": list(schema.MODEL_FAMILIES.values())}
    owners |= {name: [owner] for name, owner in schema.SECTIONS.items()}
    return {
        f"{name}.{item.name}"
        for name, section in owners.items()
        for owner in section
        for item in fields(owner)
    }


def flat(values):
    return {f"{section}.{name}": value for section, names in values.items() for name, value in names.items()}


def complete(text, values):
    """The text of a run file with what a translation cannot know."""
    lines = [text.rstrip()]
    train = values.get("train", {})
    batch = sum(name in train for name in ("micro_batch_size", "global_batch_size", "accumulation_steps"))
    missing = {} if "output_dir" in train else {"output_dir": "out"}
    missing |= {} if "steps" in train else {"steps": 100_000}
    missing |= {"global_batch_size": 1024} if batch == 1 and "global_batch_size" not in train else {}
    missing |= {"micro_batch_size": 1, "global_batch_size": 1024} if batch == 0 else {}
    given = [f"train.{name}={value}" for name, value in missing.items()]
    if "model" not in values:
        lines.insert(1, "include: [models/gpt2-small]")
    given += [] if "seq_len" in values.get("data", {}) else ["data.seq_len=1024"]
    return "\n".join(lines) + "\n", given


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_every_key_of_an_example_has_a_fate_and_a_place(path):
    source = TOOLS[tool_of(path)].read(path, 16)
    translation = translate_file(tool_of(path), path, 16)
    told = {note.source for note in translation.notes}
    repeated = {name for name in source.leaves if name.startswith("train_dataset_task.dataset_config.")}
    assert set(source.leaves) - repeated <= told
    assert {note.fate for note in translation.notes} <= set(FATES) - {"unknown"}
    for note in translation.notes:
        assert note.where.startswith(str(path))
        assert note.fate == "translated" or note.reason
        assert str(note).isprintable()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_becomes_a_run_file_that_loads(path, write):
    translation = translate_file(tool_of(path), path, 16)
    assert set(flat(translation.values)) <= known_keys()
    written = {note.target for note in translation.notes if note.fate in ("translated", "default")}
    assert written == set(flat(translation.values))
    text, overrides = complete(render_run_file(translation, path.name), translation.values)
    loaded = load_config(write(text), overrides, None, to_run=False)
    for name, value in flat(translation.values).items():
        section, key = name.split(".")
        found = getattr(getattr(loaded.config, section), key)
        assert found == (tuple(value) if isinstance(value, list) else value), name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_a_version_without_a_section_says_so_and_writes_nothing_of_it(path, monkeypatch):
    small = {name: schema.SECTIONS[name] for name in ("data", "train", "optim", "parallel")}
    monkeypatch.setattr(schema, "SECTIONS", small)
    translation = translate_file(tool_of(path), path, 16)
    assert set(translation.values) <= {"model", *small}
    for note in translation.notes:
        if note.fate == "unavailable":
            assert note.reason == f"{note.target} is not in this version"
    if tool_of(path) in ("deepspeed", "mindformers") and "auto" not in path.name:
        assert any(
            note.target == "precision.policy" and note.fate == "unavailable" for note in translation.notes
        )


def test_a_value_that_a_key_does_not_take_is_told_with_the_reason():
    notes = RunNotes({"a": 7, "b": -1})
    assert not notes.put("a", "parallel.zero_stage", 7)
    assert not notes.put("b", "train.steps", "many")
    result = notes.result()
    assert result.values == {}
    assert [note.fate for note in result.notes] == ["untranslatable"] * 2
    assert "at most 3" in result.notes[0].reason and "expected an integer" in result.notes[1].reason


def test_two_keys_that_contradict_each_other_are_told():
    notes = RunNotes({"a": 7, "b": 8, "c": 7})
    assert notes.put("a", "train.steps", 7) and not notes.put("b", "train.steps", 8)
    assert notes.put("c", "train.steps", 7)
    result = notes.result()
    assert result.values == {"train": {"steps": 7}}
    assert [note.reason for note in result.notes if note.source == "b"] == [
        "contradicts a, which sets train.steps to 7"
    ]


def test_a_value_without_effect_is_left_out():
    notes = RunNotes({"a": "sgd", "b": 0.9})
    notes.put("a", "optim.kind", "sgd")
    notes.put("b", "optim.beta1", 0.9)
    result = notes.result()
    assert result.values == {"optim": {"kind": "sgd"}}
    assert result.notes[1].reason == "has no effect because optim.kind is sgd"


def test_the_run_file_names_where_values_are_from_and_what_was_left(write):
    path = write(
        '{"train_batch_size": 8, "train_micro_batch_size_per_gpu": 8, "aio": {"block_size": 1}}', "d.json"
    )
    text = render_run_file(translate_file("deepspeed", path), "d.json (DeepSpeed)", ["models/gpt-tiny"])
    assert text.startswith("# Translated from d.json (DeepSpeed).\ninclude: [models/gpt-tiny]\n")
    assert "  global_batch_size: 8" in text and "# train_batch_size\n" in text
    assert "# untranslatable  aio.block_size: asynchronous file access is sized automatically" in text
    assert [finding.path for finding in check_config(write(text)).findings] == [
        "data.seq_len",
        "train.steps",
        "train.output_dir",
    ]


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        ("{", "a.json", "a.json:1: not valid JSON"),
        ('{"a": 1,}', "a.json", "a.json:1: not valid JSON"),
        ('{"a": 1, "a": 2}', "a.json", "a.json:1: key 'a' is already set"),
        (
            '{\n"zero_optimization": {"stage": 1,\n"stage": 2}}',
            "a.json",
            "a.json:3: key 'stage' is already set",
        ),
        ("[1]", "a.json", "not a mapping of keys"),
        ("", "a.yaml", "the file is empty"),
        ("a: 1\na: 2\n", "a.yaml", "a.yaml:2: key 'a' is already set"),
        ("a: !!python/object:os.system x\n", "a.yaml", "not allowed"),
        ("a: 1\n---\nb: 2\n", "a.yaml", "a second document"),
        ("[" * 100_000, "a.json", "not valid JSON"),
        ('{"a": ' * 50 + "1" + "}" * 50, "a.json", "nested deeper than 16 levels"),
        (b"\xff\xfe{}", "a.json", "is not UTF-8"),
        (b" " * 200_000, "a.json", "larger than 128 KiB"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(write, content, name, message):
    with pytest.raises(UserError) as caught:
        translate_file("deepspeed", write(content, name))
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1 and str(caught.value).isprintable()


@pytest.mark.parametrize("tool", TOOLS)
def test_a_missing_file_is_refused(tmp_path, tool):
    with pytest.raises(UserError, match="cannot read this file"):
        translate_file(tool, tmp_path / "none.json")


def test_tabs_and_exponents_of_json_are_read(write):
    path = write(
        '{\n\t"zero_optimization": {\n\t\t"stage": 2,\n\t\t"reduce_bucket_size": 5E8\n\t}\n}', "a.json"
    )
    values = translate_file("deepspeed", path).values["parallel"]
    assert values == {"zero_stage": 2, "bucket_mb": pytest.approx(5e8 * 4 / 2**20)}


@pytest.mark.parametrize("tool", ["deepspeed", "fsdp", "mindformers"])
def test_an_unknown_key_is_told_with_its_line_and_the_nearest_one(write, tool):
    typo = {
        "deepspeed": ("zero_optimization:\n  stage: 1\n  reduce_bucket_sise: 1\n", "reduce_bucket_size"),
        "fsdp": ("sharding_strategy: FULL_SHARD\n\nbackward_prefech: x\n", "backward_prefetch"),
        "mindformers": ("training:\n  steps: 3\n  max_nrom: 1\n", "training.max_norm"),
    }[tool]
    (unknown,) = [note for note in translate_file(tool, write(typo[0])).notes if note.fate == "unknown"]
    assert unknown.where.endswith("run.yaml:3") and typo[1] in unknown.reason


HOSTILE = [None, True, False, 0, 1, -1, 2.5, 1e308, 10**30, "auto", "x", "", "nan", "bf16"]
HOSTILE += [[], [1], ["a", {}], {}]
READING = {"MZ002", "MZ004", "MZ005", "MZ006", "MZ010", "MZ014", "MZ016"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_values_that_make_no_sense_are_told_and_never_written(path, write):
    tool = TOOLS[tool_of(path)]
    source = tool.read(path, 16)
    choose = random.Random(path.name)
    for _ in range(20):
        leaves = dict(source.leaves)
        for name in choose.sample(list(leaves), min(len(leaves), choose.randint(1, 6))):
            value = choose.choice(HOSTILE)
            leaves[name] = [str(value)] * choose.randint(0, 2) if tool_of(path) == "megatron" else value
        try:
            translation = tool.translate(replace(source, leaves=leaves))
        except UserError:
            continue
        told = {note.source for note in translation.notes}
        assert {name for name in leaves if not name.startswith("train_dataset_task.")} <= told
        checked = check_config(write(render_run_file(translation, path.name)))
        assert [str(finding) for finding in checked.findings if finding.rule in READING] == []
