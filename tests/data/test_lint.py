import json

import numpy as np
import pytest

from ms_zero.data import ByteTokenizer, Source
from ms_zero.data.lint import lint_source

EOT = ByteTokenizer.eot_id
GOOD = [[1, 2, EOT], [3, EOT]]


@pytest.fixture
def lint(tmp_path):
    def lint(kind, *files, tokenizer=None, vocab_size=257):
        source = Source(kind, files)
        findings = lint_source(source, tokenizer=tokenizer, vocab_size=vocab_size, base=tmp_path)
        found = [(finding.severity, finding.message) for finding in findings]
        assert all("\n" not in message for _, message in found)
        return found

    return lint


def test_sound_data_has_no_findings(lint, tmp_path, pairs):
    pairs.write_pair(tmp_path / "data", GOOD)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "a.txt").write_text("x")
    assert lint("megatron", "data", tokenizer=ByteTokenizer()) == []
    assert lint("megatron", "data", vocab_size=None) == []
    assert lint("jsonl", "*.jsonl") == lint("files", "a.txt") == lint("stdlib") == []


@pytest.mark.parametrize("dtype", ["<u2", "<i4", "<i8"])
def test_all_ids_beyond_the_vocabulary_are_counted(lint, tmp_path, pairs, dtype):
    pairs.write_pair(tmp_path / "data", [[1, 256], [2, 257, 300], [400]], dtype)
    assert lint("megatron", "data") == [
        (
            "error",
            f"{tmp_path}/data.bin: 3 ids are beyond the vocabulary of 257, "
            "the first is 257 in document 1, id 1",
        )
    ]


def test_ids_are_found_in_every_chunk(lint, tmp_path, pairs):
    count = (1 << 22) + 5
    tokens = np.zeros(count, np.uint16)
    tokens[-2:] = 999
    (tmp_path / "data.bin").write_bytes(tokens.tobytes())
    (tmp_path / "data.idx").write_bytes(pairs.index_bytes([count - 2, 2]))
    ((severity, message),) = lint("megatron", "data")
    assert severity == "error" and "2 ids are beyond" in message and "999 in document 1, id 0" in message


def test_negative_and_giant_ids(lint, tmp_path, pairs):
    pairs.write_pair(tmp_path / "data", [[1, -5]], "<i4")
    assert "the first is -5 in document 0, id 1" in lint("megatron", "data")[0][1]
    pairs.write_pair(tmp_path / "data", [[1, 2**40]], "<i8")
    assert "1 ids do not fit 31 bits" in lint("megatron", "data", vocab_size=None)[0][1]


def test_empty_documents_are_doubtful(lint, tmp_path, pairs):
    pairs.write_pair(tmp_path / "data", [[1], [], [2], []])
    expected = f"{tmp_path}/data.bin: 2 empty documents, the first is 1"
    assert lint("megatron", "data") == [("warning", expected)]


def test_mixed_ends_are_refused(lint, tmp_path, pairs, monkeypatch):
    monkeypatch.setattr("ms_zero.data.lint._DOCUMENTS", 2)
    pairs.write_pair(tmp_path / "data", [[1, EOT], [], [2], [3, EOT], [4]])
    findings = lint("megatron", "data", tokenizer=ByteTokenizer())
    assert [severity for severity, _ in findings] == ["warning", "error"]
    assert "2 documents end with the end-of-text id 256 (as 0), 2 do not (as 2)" in findings[1][1]
    assert len(lint("megatron", "data")) == 1


def test_structure_is_told_for_every_file(lint, tmp_path, pairs):
    for name in "abcdef":
        pairs.write_pair(tmp_path / name, GOOD)
    (tmp_path / "a.bin").write_bytes(b"12")
    (tmp_path / "b.idx").write_bytes(b"MMIDIDX\0\0")
    (tmp_path / "c.bin").unlink()
    (tmp_path / "d.idx").write_bytes(pairs.index_bytes([5], "<i4"))
    pairs.write_pair(tmp_path / "e", GOOD, "<f8")
    pairs.write_pair(tmp_path / "f", [])
    findings = lint("megatron", "*", "none")
    messages = ["truncated"] * 2 + ["does not exist", "uint16 would fit", "float64", "no ids", "none.idx"]
    assert [severity for severity, _ in findings] == ["error"] * 7
    for (_, message), part in zip(findings, messages, strict=True):
        assert part in message


def test_bad_lines_are_all_told_up_to_a_limit(lint, tmp_path):
    lines = ["{}", "", json.dumps({"text": ""}), json.dumps({"text": "fine"}), "nonsense", *["[]"] * 30]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    findings = lint("jsonl", "a.jsonl")
    errors = [message for severity, message in findings if severity == "error"]
    assert len(errors) == 21
    assert errors[0].startswith(f"{tmp_path}/a.jsonl:1: no field")
    assert errors[1].startswith(f"{tmp_path}/a.jsonl:5: no JSON")
    assert errors[-1].endswith("a.jsonl: 12 more bad lines")
    assert findings[-1] == ("warning", f"{tmp_path}/a.jsonl: 2 lines without text, the first is 2")


@pytest.mark.parametrize("content", ["", "\n", '{"text": ""}'])
def test_a_file_without_text_is_told(lint, tmp_path, content):
    (tmp_path / "a.jsonl").write_text(content)
    assert ("error", f"{tmp_path}/a.jsonl: no line has text") in lint("jsonl", "a.jsonl")


def test_text_files_are_told_one_by_one(lint, tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xff")
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c.txt").write_text("fine")
    messages = [message for _, message in lint("files", "*.txt", "d.txt")]
    assert len(messages) == 3
    assert "not UTF-8" in messages[0] and "is empty" in messages[1] and "does not exist" in messages[2]
