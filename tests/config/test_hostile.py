"""Input that nobody should write: one clear line each, never a traceback, never a hang."""

import os
import re
from random import Random

import pytest

from ms_zero.config import ConfigError, load_config
from ms_zero.config.explanations import READING
from ms_zero.resources import find_preset

ALIAS_BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join(['*' + old] * 10)}]\n" for old, new in zip("abcdefgh", "bcdefghi")
)
HUGE = "9" * 5000

# name, rule, part of the message, file content
FILES = [
    ("empty", "MZ002", "the file is empty", ""),
    ("only comments", "MZ002", "the file is empty", "# nothing\n\n"),
    ("only a document marker", "MZ002", "the top level is null", "---\n"),
    ("null", "MZ002", "the top level is null", "null\n"),
    ("list", "MZ002", "the top level is a list", "- a\n- b\n"),
    ("text", "MZ002", "the top level is text", "hello\n"),
    ("number", "MZ002", "the top level is an integer", "42\n"),
    ("two documents", "MZ002", ":2: a second document", "train: {}\n---\ntrain: {}\n"),
    ("tab indents", "MZ002", ":2: not valid YAML: a tab cannot indent", "train:\n\tsteps: 3\n"),
    ("tab after spaces", "MZ002", "a tab cannot indent", "train:\n \tsteps: 3\n"),
    ("open bracket", "MZ002", "not valid YAML", "data: {files: [a, b\n"),
    ("open quote", "MZ002", "not valid YAML", "train: {output_dir: 'a}\n"),
    ("two colons", "MZ002", ":1: not valid YAML", "train: steps: 3\n"),
    ("bad indentation", "MZ002", ":3: not valid YAML", "train:\n    steps: 3\n  seed: 1\n"),
    ("bad escape", "MZ002", "not valid YAML", 'train: {output_dir: "a\\q"}\n'),
    ("bad directive", "MZ002", "not valid YAML", "%YAML 9.9\n---\ntrain: {}\n"),
    ("at sign", "MZ002", "not valid YAML", "train: @home\n"),
    ("glob without quotes", "MZ002", ':1: .*such as "\\*.txt" in quotes', "data: {files: [*.txt]}\n"),
    ("alias without anchor", "MZ002", "alias \\*x has no anchor", "train: *x\n"),
    ("list as key", "MZ002", "a key is a list", "? [a, b]\n: 1\n"),
    ("mapping as key", "MZ002", "a key is a mapping", "{a: 1}: 2\n"),
    ("null byte", "MZ002", "'\\\\x00' is not allowed", "train: \0\n"),
    ("escape character", "MZ002", "'\\\\x1b' is not allowed", "train: \x1b[31m\n"),
    ("latin 1", "MZ001", ":2: byte 0xfc is not UTF-8", b"train: {}\nname: M\xfcller\n"),
    ("utf 16", "MZ001", "byte 0xff is not UTF-8", "train: {}\n".encode("utf-16")),
    ("random bytes", "MZ001", "is not UTF-8", bytes(range(128, 256)) * 10),
    ("cut emoji", "MZ001", "is not UTF-8", "# \N{PARTY POPPER}".encode()[:-1]),
    ("giant file", "MZ001", "larger than 128 KiB", b"# " + b"x" * 10_000_000),
    (
        "python object",
        "MZ011",
        "tag '!!python/object/apply:os.system'",
        "a: !!python/object/apply:os.system [ls]\n",
    ),
    ("python tuple", "MZ011", "tag '!!python/tuple'", "data: {files: !!python/tuple [a]}\n"),
    ("python name as key", "MZ011", "tag '!!python/name:os.system'", "!!python/name:os.system x: 1\n"),
    ("own tag", "MZ011", "tag '!include'", "train: !include other.yaml\n"),
    ("binary", "MZ011", "tag '!!binary'", "train: {output_dir: !!binary aGk=}\n"),
    ("cast", "MZ011", "tag '!!int'", "train: {steps: !!int '3'}\n"),
    ("merge key", "MZ011", "merge keys", "train:\n  <<: {steps: 3}\n"),
    ("alias bomb", "MZ012", "more than 20000 values", ALIAS_BOMB),
    ("alias of itself", "MZ012", "alias \\*a contains itself", "train: &a {steps: *a}\n"),
    ("many values", "MZ012", "more than 20000 values", "data: {files: [" + "a," * 60_000 + "]}\n"),
    ("deep flow", "MZ013", "nested deeper than 16", "a: " + "[" * 60_000),
    ("deep mappings", "MZ013", "nested deeper than 16", "{a: " * 30_000),
    ("deep blocks", "MZ013", "nested deeper than 16", "- " * 60_000),
    ("duplicate section", "MZ003", ":2: key 'train' is already set at .*:1", "train: {}\ntrain: {}\n"),
    ("duplicate key", "MZ003", "key 'steps' is already set", "train:\n  steps: 3\n  seed: 1\n  steps: 4\n"),
    ("duplicate in quotes", "MZ003", "key 'steps' is already set", "train: {steps: 3, 'steps': 4}\n"),
    ("duplicate include", "MZ003", "key 'include' is already set", "include: []\ninclude: []\n"),
    ("unknown section", "MZ004", "trian: unknown key; did you mean train", "trian: {}\n"),
    ("unknown section, far off", "MZ004", "known keys: model, data", "zzzz: 1\n"),
    ("unknown key", "MZ004", "train.stpes: unknown key; did you mean train.steps", "train: {stpes: 3}\n"),
    ("key of another section", "MZ004", "did you mean optim.lr", "train: {lr: 0.1}\n"),
    ("key without section", "MZ004", "did you mean train.steps", "steps: 3\n"),
    ("wrong case", "MZ004", "did you mean train.steps", "train: {Steps: 3}\n"),
    (
        "key of the other family",
        "MZ004",
        "unknown key of this family",
        "model: {family: gpt, rope_theta: 1.0}\n",
    ),
    ("number as key", "MZ004", "unknown key", "train: {1: 2}\n"),
    ("empty key", "MZ004", "train.'': unknown key", "train: {'': 2}\n"),
    ("long key", "MZ004", "unknown key", f"train: {{{'k' * 900}: 2}}\n"),
    ("key with line break", "MZ004", "unknown key", 'train: {"a\\nb\\e[31m": 2}\n'),
    ("many unknown keys", "MZ004", "unknown key", "train:\n" + "".join(f"  k{i}: 1\n" for i in range(9000))),
    ("section is a list", "MZ005", "train: .*is a list; expected a mapping", "train: [1]\n"),
    ("section is a number", "MZ005", "train: 3 is an integer; expected a mapping", "train: 3\n"),
    ("model is text", "MZ005", "model: 'gpt' is text; expected a mapping", "model: gpt\n"),
    (
        "truth value as count",
        "MZ005",
        "train.steps: true is a truth value; expected an int",
        "train: {steps: true}\n",
    ),
    ("text as count", "MZ005", "'many' is text; expected an integer", "train: {steps: many}\n"),
    ("quoted count", "MZ005", "'8' is text; expected an integer .*without quotes", "train: {steps: '8'}\n"),
    ("count with unit", "MZ005", "'8k' is text; expected an integer", "train: {steps: 8k}\n"),
    ("octal", "MZ005", "'010' is text; expected an integer", "train: {steps: 010}\n"),
    ("sexagesimal", "MZ005", "'1:30' is text; expected an integer", "train: {steps: 1:30}\n"),
    ("float as count", "MZ005", "1000.0 is not an integer; .*write 1000", "train: {steps: 1e3}\n"),
    ("null count", "MZ005", "train.steps: it is null; expected an integer", "train: {steps: }\n"),
    ("list as count", "MZ005", "is a list; expected an integer", "train: {steps: [1]}\n"),
    ("mapping as count", "MZ005", "it is a mapping; expected an integer", "train: {steps: {a: 1}}\n"),
    ("yes", "MZ005", "'yes' is text; expected true or false", "monitor: {console: yes}\n"),
    ("number as truth value", "MZ005", "1 is an integer; expected true or false", "monitor: {console: 1}\n"),
    ("number as text", "MZ005", "12 is an integer; expected text .*quotes", "train: {output_dir: 12}\n"),
    ("date as number", "MZ005", "is text; expected a number", "optim: {lr: 2024-01-01}\n"),
    ("text as list", "MZ005", "expected a list of texts", "data: {source: files, files: a.txt}\n"),
    (
        "number in a list",
        "MZ005",
        "data.files: the item 3 is an int",
        "data: {source: files, files: [a, 3]}\n",
    ),
    (
        "text in a list of numbers",
        "MZ005",
        "stage_layers: the item 'two' is text; expected an integer",
        "parallel: {stage_layers: [2, two]}\n",
    ),
    (
        "truth value in a list of numbers",
        "MZ005",
        "the item (true|True) is a truth value; expected an integer",
        "parallel: {stage_layers: [true]}\n",
    ),
    (
        "negative number in a list",
        "MZ006",
        "the item -1 is out of range; expected at least 0",
        "parallel: {stage_layers: [5, -1]}\n",
    ),
    ("number for a list", "MZ005", r"a list of integers at least 0", "parallel: {stage_layers: 2}\n"),
    ("auto where there is none", "MZ005", "'auto' is text; expected an integer", "train: {steps: auto}\n"),
    (
        "nested section is text",
        "MZ005",
        "expected a mapping, or null",
        "model: {family: llama, rope_scaling: yarn}\n",
    ),
    ("infinity", "MZ006", "inf is not finite", "optim: {lr: .inf}\n"),
    ("not a number", "MZ006", "nan is not finite", "optim: {lr: .nan}\n"),
    ("float overflow", "MZ006", "inf is not finite", "optim: {lr: 1e999}\n"),
    ("huge integer", "MZ006", "out of range", "train: {steps: 99999999999999999999}\n"),
    (
        "integer beyond floats",
        "MZ006",
        "train.steps: 9+\\.\\.\\. is out of",
        f"train: {{steps: {HUGE[:3000]}}}\n",
    ),
    ("gigantic integer as number", "MZ006", "is not finite", f"optim: {{lr: {HUGE[:3000]}}}\n"),
    ("gigantic integer", "MZ005", "inf is not an integer", f"train: {{steps: {HUGE}}}\n"),
    ("zero", "MZ006", "train.steps: 0 is out of range; expected at least 1", "train: {steps: 0}\n"),
    ("negative", "MZ006", "-3 is out of range", "train: {steps: -3}\n"),
    (
        "momentum of one",
        "MZ006",
        "1 is out of range; expected at least 0 and less than 1",
        "optim: {beta1: 1}\n",
    ),
    ("no step", "MZ007", "train.steps: missing; optimizer steps in all", "train: {seed: 3}\n"),
    ("no model", "MZ007", "model.family: missing; .*include: \\[models/gpt-tiny\\]", "train: {steps: 3}\n"),
    ("family is a mapping", "MZ005", "model.family: it is a mapping", "model: {family: {}}\n"),
    ("unknown family", "MZ010", "'bert' is not a model family", "model: {family: bert}\n"),
    ("family is a list", "MZ010", "is not a model family", "model: {family: [gpt]}\n"),
    (
        "unknown choice",
        "MZ010",
        "'cosin' is not allowed; .*did you mean cosine",
        "optim: {schedule: cosin}\n",
    ),
    ("number as choice", "MZ010", "3 is not allowed; expected one of", "optim: {schedule: 3}\n"),
    ("empty text", "MZ016", "the text is empty", "train: {output_dir: ''}\n"),
    ("blank text", "MZ016", "the text is empty", "train: {output_dir: '  '}\n"),
    ("null byte in text", "MZ016", "holds control characters", 'train: {output_dir: "a\\0b"}\n'),
    ("terminal codes in text", "MZ016", "holds control characters", 'train: {output_dir: "\\e[2J"}\n'),
    ("empty file name", "MZ016", "data.files: the text is empty", "data: {source: files, files: ['']}\n"),
    ("include of itself", "MZ008", "a file includes itself: run.yaml -> run.yaml", "include: ./run.yaml\n"),
    ("missing include", "MZ008", ":1: include: no file './none.yaml'", "include: [./none.yaml]\n"),
    ("include of a folder", "MZ008", "no file '.'", "include: [.]\n"),
    ("include of a device", "MZ008", "no file '/dev/zero'", "include: [/dev/zero]\n"),
    ("missing preset", "MZ008", "did you mean gpt-tiny", "include: [models/gpt-tny]\n"),
    ("preset outside", "MZ008", "no preset", "include: [models/../../pyproject]\n"),
    ("preset of no kind", "MZ008", "expected models/NAME", "include: [gpt-tiny]\n"),
    ("cluster as include", "MZ008", "expected models/NAME", "include: [clusters/cpu]\n"),
    ("include of a number", "MZ008", "found an integer", "include: [3]\n"),
    ("include of null", "MZ008", "found null", "include:\n"),
    ("include of a mapping", "MZ008", "found a mapping", "include: {a: b}\n"),
    ("include with null byte", "MZ008", "is not a file name", 'include: ["a\\0.yaml"]\n'),
    ("include with a long name", "MZ008", "no file", f"include: [./{'n' * 5000}.yaml]\n"),
]

OVERRIDES = [
    ("MZ009", "expected section.key=value", "train.steps"),
    ("MZ009", "expected section.key=value", "=3"),
    ("MZ009", "expected section.key=value", ""),
    ("MZ009", "expected section.key=value", "train..steps=3"),
    ("MZ009", "expected section.key=value", "train steps=3"),
    ("MZ009", "expected section.key=value", "--train.steps=3"),
    ("MZ009", "expected section.key=value", "train.steps\n=3"),
    ("MZ009", "no value after '='", "train.steps="),
    ("MZ009", "a file can include others", "include=[a]"),
    ("MZ009", "nested deeper", ".".join("a" * 20_000) + "=1"),
    ("MZ002", "not valid YAML", "train.steps=["),
    ("MZ002", "not valid YAML", "train.steps=a: b: c"),
    ("MZ002", "is not allowed in YAML", "train.steps=\x00"),
    ("MZ002", "is not allowed in YAML", "train.output_dir=\udcff"),
    ("MZ011", "tag '!!python/name:os.system'", "train.steps=!!python/name:os.system"),
    ("MZ003", "is already set", "train={steps: 1, steps: 2}"),
    ("MZ013", "nested deeper", "train.steps=" + "[" * 5000),
    ("MZ004", "did you mean train.steps", "train.stpes=3"),
    ("MZ005", "expected a mapping", "train=3"),
    ("MZ005", "it is a mapping; expected an integer", "train.steps.a=3"),
]


@pytest.mark.parametrize(
    ("rule", "message", "content"), [case[1:] for case in FILES], ids=[case[0] for case in FILES]
)
def test_a_bad_file_is_refused_in_clear_lines(refused, rule, message, content):
    findings = refused(text=content)
    matching = [finding for finding in findings if finding.rule == rule]
    assert any(re.search(message, str(finding)) for finding in matching), [
        str(finding) for finding in findings
    ]
    assert max(len(str(finding)) for finding in findings) < 400


@pytest.mark.parametrize(("rule", "message", "override"), OVERRIDES)
def test_a_bad_override_is_refused_in_clear_lines(refused, rule, message, override):
    findings = refused(override)
    assert [finding.rule for finding in findings] == [rule]
    assert re.search(message, str(findings[0]))
    assert str(findings[0]).startswith("override ")
    assert len(str(findings[0])) < 400


def test_every_explained_finding_of_reading_has_a_case():
    assert {case[1] for case in FILES} | {case[0] for case in OVERRIDES} == {entry.id for entry in READING}


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert len(caught.value.findings) == 1
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["", "no\0where", "x" * 10_000, "nowhere/run.yaml", "runs/quikstart", "\udcff"]
)
def test_a_missing_file_is_one_line(name):
    line = refusal(name)
    assert "[MZ001]" in line
    assert line.isprintable()


def test_only_regular_files_are_read(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop.yaml").symlink_to("loop.yaml")
    for path in (tmp_path, tmp_path / "pipe.yaml", tmp_path / "loop.yaml", "/dev/zero", "/dev/null"):
        assert "cannot read this file" in refusal(path)


def test_files_that_include_each_other_are_refused(write):
    write("include: ./b.yaml\n", "a.yaml")
    write("include: ./c.yaml\n", "b.yaml")
    path = write("include: ./a.yaml\n", "c.yaml")
    assert "a file includes itself: c.yaml -> a.yaml -> b.yaml -> c.yaml" in refusal(path)


def test_a_file_that_includes_itself_by_another_name_is_refused(write):
    path = write("include: ./other.yaml\n")
    (path.parent / "other.yaml").symlink_to("run.yaml")
    assert "a file includes itself" in refusal(path)


def test_a_long_chain_of_includes_is_refused(write):
    for number in range(30):
        write(f"include: ./{number + 1}.yaml\n", f"{number}.yaml")
    write("train: {}\n", "30.yaml")
    assert "nested deeper than 8 files" in refusal(write("include: ./0.yaml\n"))


def test_a_tree_of_includes_is_bounded(write):
    for number in range(5):
        write(f"include: [{', '.join([f'./{number + 1}.yaml'] * 9)}]\n", f"{number}.yaml")
    write("train: {}\n", "5.yaml")
    with pytest.raises(ConfigError, match="more than 64 files") as caught:
        load_config(write("include: ./0.yaml\n"))
    assert len(caught.value.findings) < 10


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_is_refused_or_harmless(write, seed):
    source = find_preset("runs", "quickstart").read_bytes()
    pieces = [
        b"!!",
        b"&a ",
        b"*a",
        b"<<: ",
        b"[",
        b"{",
        b"}",
        b"|",
        b"? ",
        b": ",
        b"\t",
        b"1e",
        b"'",
        b"\xff",
        b"\n  ",
    ]
    random = Random(seed)
    refused = 0
    for _ in range(50):
        damaged = bytearray(source)
        for _ in range(random.randint(1, 4)):
            start = random.randrange(len(damaged))
            damaged[start : start + random.randint(0, 9)] = random.choice(pieces)
        try:
            load_config(write(bytes(damaged)))
        except ConfigError as error:
            refused += 1
            assert all(line.isprintable() for line in str(error).split("\n"))
    assert refused > 10


def test_many_violations_are_cut_short(refused):
    findings = refused(text="train:\n" + "".join(f"  k{number}: 1\n" for number in range(300)))
    assert len(findings) > 300
