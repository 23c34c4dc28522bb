"""Lists of sections: the parts of a mixture."""

import pytest

from ms_zero.config import DataPart, dump, load_config, render_effective

TEXT = """\
include: [models/gpt-tiny]
data:
  seq_len: 64
  source: mixture
  parts:
    - {source: jsonl, files: [a.jsonl, 'b*.jsonl'], weight: 0.7}
    - source: stdlib
      weight: 1
train: {steps: 10, global_batch_size: 8, accumulation_steps: 1, output_dir: out}
optim: {warmup_steps: 2}
"""


def test_parts_are_sections(load):
    parts = load(text=TEXT).config.data.parts
    assert parts == (
        DataPart(source="jsonl", files=("a.jsonl", "b*.jsonl"), weight=0.7),
        DataPart(source="stdlib", files=(), weight=1.0),
    )
    assert isinstance(parts[1].weight, float)


def test_the_effective_config_loads_as_itself(load, write):
    loaded = load(text=TEXT)
    again = load_config(write(render_effective(loaded)))
    assert again.config == loaded.config and dump(again.config) == dump(loaded.config)


def test_a_later_layer_replaces_the_list(load):
    loaded = load("data.parts=[{source: stdlib, weight: 2}]", text=TEXT)
    assert loaded.config.data.parts == (DataPart(source="stdlib", weight=2.0),)


# rule, key, line of the finding, replaced text, new text
BAD = [
    ("MZ004", "data.parts[0].wieght", 6, "weight: 0.7", "weight: 0.7, wieght: 1"),
    ("MZ007", "data.parts[0].weight", 6, ", weight: 0.7", ""),
    ("MZ007", "data.parts[1].source", 7, "source: stdlib\n", "files: []\n"),
    ("MZ010", "data.parts[0].source", 6, "source: jsonl", "source: json"),
    ("MZ010", "data.parts[0].source", 6, "source: jsonl", "source: mixture"),
    ("MZ006", "data.parts[0].weight", 6, "0.7", "0"),
    ("MZ006", "data.parts[0].weight", 6, "0.7", "-1"),
    ("MZ006", "data.parts[0].weight", 6, "0.7", ".nan"),
    ("MZ006", "data.parts[1].weight", 8, "weight: 1", "weight: .inf"),
    ("MZ005", "data.parts[0].weight", 6, "0.7", "'0.7'"),
    ("MZ005", "data.parts[0].files", 6, "[a.jsonl, 'b*.jsonl']", "a.jsonl"),
    ("MZ010", "data.parts[0].source", 6, "source: jsonl", "source: {a: 1}"),
    ("MZ005", "data.parts[1]", 7, "source: stdlib\n      weight: 1", "stdlib"),
    ("MZ005", "data.parts[1]", 7, "source: stdlib\n      weight: 1", "null"),
    ("MZ005", "data.parts[1]", 7, "source: stdlib\n      weight: 1", "[1]"),
]


@pytest.mark.parametrize(("rule", "path", "line", "old", "new"), BAD)
def test_what_is_wrong_in_a_part_is_found_where_it_is(refused, rule, path, line, old, new):
    assert TEXT.count(old) == 1
    (finding,) = refused(text=TEXT.replace(old, new))
    assert (finding.rule, finding.path) == (rule, path)
    assert finding.where.endswith(f"run.yaml:{line}")


@pytest.mark.parametrize("value", ["3", "{source: stdlib, weight: 1}", "'stdlib'"])
def test_something_else_than_a_list_is_refused(refused, value):
    findings = refused("data.source=mixture", f"data.parts={value}")
    assert [(finding.rule, finding.path) for finding in findings] == [("MZ005", "data.parts")]
    assert "expected a list of mappings with source, files, weight" in findings[0].message


def test_everything_wrong_is_reported_at_once(refused):
    findings = refused(text=TEXT.replace("0.7", "0").replace("source: stdlib", "source: web"))
    assert [(finding.rule, finding.path) for finding in findings] == [
        ("MZ006", "data.parts[0].weight"),
        ("MZ010", "data.parts[1].source"),
    ]
