"""Explanations in words: of every rule, section and key."""

import pytest

from ms_zero.config import EXPLANATIONS, describe, describe_all
from ms_zero.config.schema import MODEL_FAMILIES, SECTIONS, keys_of
from ms_zero.errors import UserError

KEYS = [
    *(f"model.{name}" for family in MODEL_FAMILIES.values() for name in keys_of(family)),
    *(f"{section}.{name}" for section, cls in SECTIONS.items() for name in keys_of(cls)),
]


@pytest.mark.parametrize("rule", EXPLANATIONS)
def test_every_rule_tells_why_and_how_to_fix_it(rule):
    text = " ".join(describe(rule.lower()).split())
    entry = EXPLANATIONS[rule]
    assert text.startswith(f"{rule} ({entry.severity}): {entry.title}")
    assert entry.explanation in text and entry.fix in text
    assert rule in describe_all()


@pytest.mark.parametrize("path", KEYS)
def test_every_key_tells_meaning_type_and_default(path):
    lines = describe(path).splitlines()
    assert lines[0].split()[0] == path
    assert [line.split()[0] for line in lines if line.startswith("  ")][:1] == ["meaning"]
    assert any(line.startswith("  takes ") for line in lines)
    assert any(line.startswith("  default ") for line in lines)


@pytest.mark.parametrize("section", ["model", *SECTIONS])
def test_a_section_lists_all_its_keys(section):
    shown = describe(section)
    for path in KEYS:
        if path.startswith(f"{section}."):
            assert f"  {path} " in shown


@pytest.mark.parametrize(
    ("path", "facts"),
    [
        ("train.steps", ["an integer at least 1", "default  none: it has to be set", "MZ050"]),
        ("train.micro_batch_size", ["or auto", "default  auto: the batch algebra"]),
        ("optim.beta1", ["at least 0 and less than 1", "default  0.9", "only when optim.kind is adamw"]),
        ("train.eval_samples", ["only when train.eval_interval is at least 1"]),
        ("data.files", ["a list of texts", "default  []"]),
        ("optim.schedule", ["one of cosine, linear, constant, wsd", "default  cosine"]),
        ("model.rope_theta", ["model.rope_theta (llama, moe)"]),
        ("model.rope_scaling", ["model.rope_scaling.factor", "default  null"]),
        ("model.rope_scaling.factor", ["a number at least 1", "none: it has to be set"]),
        ("model.ffn_hidden_size", ["(gpt)\n", "auto: 4 x hidden_size", "(llama)\n", "none: it has"]),
        ("model.ffn_hidden_size", ["(moe)\n", "default  null"]),
        ("model.hidden_size", ["model.hidden_size\n"]),
    ],
)
def test_a_key_tells_its_facts(path, facts):
    shown = describe(path)
    assert [fact for fact in facts if fact not in shown] == []


@pytest.mark.parametrize(
    ("topic", "hint"),
    [
        ("MZ01", "did you mean MZ010 or MZ011 or MZ012?"),
        ("MZ12", "did you mean MZ012"),
        ("train.stpes", "did you mean train.steps"),
        ("steps", "did you mean train.steps?"),
        ("optm", "did you mean optim"),
        ("", "give no name for a list"),
        ("zzz", "give no name for a list"),
        ("train.", "did you mean train"),
        ("\x1b[31m\n", "'\\x1b[31m\\n'"),
        ("x" * 10_000, "give no name for a list"),
    ],
)
def test_an_unknown_topic_names_the_nearest_on_one_line(topic, hint):
    with pytest.raises(UserError) as caught:
        describe(topic)
    line = str(caught.value)
    assert hint in line and line.isprintable() and len(line) < 200
