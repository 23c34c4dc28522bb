import json
import os

import pytest

from ms_zero.data.corpus import Omission
from ms_zero.data.jsonl import jsonl_corpus, read_jsonl
from ms_zero.errors import UserError

SECOND = '{"id": {"text": "x"}, "text": "zweite ü\\n🚀"}'
LINES = ['{"text": "first", "id": 1}', "", '{"text": ""}', SECOND, "   "]


@pytest.fixture
def write(tmp_path):
    def write(content, name="data.jsonl"):
        data = content if isinstance(content, bytes) else content.encode()
        (tmp_path / name).write_bytes(data)
        return tmp_path / name

    return write


def test_each_line_with_text_is_a_document_named_by_its_place(write, tmp_path):
    write("\n".join(LINES))
    write('{"text": "third"}\r\n', "more.jsonl")
    corpus = jsonl_corpus(["data.jsonl", "m*.jsonl"], tmp_path)
    assert [(document.name, document.text) for document in corpus.documents] == [
        ("data.jsonl:1", "first"),
        ("data.jsonl:4", "zweite ü\n🚀"),
        ("more.jsonl:1", "third"),
    ]
    assert corpus.omitted == tuple(Omission(f"data.jsonl:{line}", "no text") for line in (2, 3, 5))
    assert corpus.description == f"2 JSON-lines files under {tmp_path}"


def test_lines_are_read_one_at_a_time(write):
    path = write('{"text": "good"}\n' + "not json\n")
    reader = read_jsonl(path, "d")
    assert next(reader).text == "good"
    with pytest.raises(UserError, match=r"data.jsonl:2: no JSON"):
        next(reader)


def test_another_field(write):
    path = write('{"content": "x", "text": 3}')
    assert next(read_jsonl(path, "d", "content")).text == "x"


# content of line 2, message after "data.jsonl:2: "
BAD = [
    (b"{", "no JSON: Expecting property name enclosed in double quotes at column 2; expected an object"),
    (b'{"text": "a"} {"text": "b"}', "no JSON: Extra data at column 15"),
    (b'{"text": "a"', "no JSON: Expecting ',' delimiter at column 13"),
    (b'{"text": "tab\there"}', "no JSON: Invalid control character"),
    (b"\xef\xbb\xbf{}", "no JSON: Unexpected UTF-8 BOM"),
    (b'{"text": "\xff"}', "byte 0xff at column 11 is not UTF-8"),
    ('{"text": "ü"}'.encode("utf-16"), "byte 0xff at column 1 is not UTF-8"),
    (b"\0\0\0", "no JSON"),
    (b"[" * 100_000, "no JSON: nested too deeply"),
    (b'{"text": ' + b"9" * 10_000 + b"}", "no JSON: a number with too many digits"),
    (b'["text"]', 'a list is no object; expected {"text": ...}'),
    (b'"text"', '"text" is no object'),
    (b"null", "null is no object"),
    (b"{}", "no field 'text'; the object has none"),
    (b'{"content": "x", "id": 1}', "no field 'text'; the object has \"content\", \"id\""),
    (json.dumps(dict.fromkeys("abcdefg", 1)).encode(), 'no field \'text\'; the object has "a", "b", "c", '),
    (b'{"text": null}', "field 'text' is null, expected text"),
    (b'{"text": ["x"]}', "field 'text' is a list, expected text"),
    (b'{"text": {"a": 1}}', "field 'text' is an object, expected text"),
    (b'{"text": 12}', "field 'text' is 12, expected text"),
    (b'{"text": "ok \\ud800"}', "field 'text' holds half a surrogate pair at character 3"),
]


@pytest.mark.parametrize(("line", "message"), BAD, ids=range(len(BAD)))
def test_a_bad_line_is_named_in_one_line(write, tmp_path, line, message):
    write(b'{"text": "fine"}\n' + line + b'\n{"text": "after"}\n')
    with pytest.raises(UserError) as caught:
        jsonl_corpus(["data.jsonl"], tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/data.jsonl:2: {message}")
    assert len(str(caught.value)) < 300 and str(caught.value).isprintable()


@pytest.mark.parametrize("content", ["", "\n\n", '{"text": ""}\n'])
def test_files_without_text_are_refused(write, tmp_path, content):
    write(content)
    with pytest.raises(UserError, match=r"1 JSON-lines file under .*: no line has text"):
        jsonl_corpus(["data.jsonl"], tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file_is_refused(write, tmp_path):
    write("{}").chmod(0)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        jsonl_corpus(["data.jsonl"], tmp_path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    (tmp_path / "folder.jsonl").mkdir()
    for pattern, message in (("none.jsonl", "does not exist"), ("folder.jsonl", "is a folder")):
        with pytest.raises(UserError, match=message):
            jsonl_corpus([pattern], tmp_path)
