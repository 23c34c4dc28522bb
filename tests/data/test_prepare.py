import json

import numpy as np
import pytest

from ms_zero.data import prepare
from ms_zero.data.indexed import IndexedTokens
from ms_zero.data.prepare import Unit, encode_unit, plan_units, tokenize_files
from ms_zero.data.tokenizer import ByteTokenizer
from ms_zero.errors import UserError

EOT = ByteTokenizer.eot_id
TEXTS = [f"Zeile {number} ü " * (number % 7) for number in range(200)]


class NoMarks(ByteTokenizer):
    """Refuses some texts, as a tokenizer may."""

    def encode(self, text):
        if "!" in text:
            raise UserError("no marks, please")
        return super().encode(text)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare, "_UNIT_BYTES", 500)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.txt").write_text("a whole\nfile ü")
    (tmp_path / "c.NDJSON").write_text('{"text": "last"}\n\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "empty.jsonl").write_text("")
    return tmp_path


def encode(folder, *names, output="out", tokenizer=None, workers=1, **options):
    inputs = [str(folder / name) for name in names]
    tokenizer = tokenizer or ByteTokenizer()
    return tokenize_files(inputs, folder / output, tokenizer, workers=workers, field="text", **options)


def test_documents_are_written_in_order(folder):
    written = encode(folder, "a.jsonl", "b.txt", "c.NDJSON", "empty.txt", "empty.jsonl")
    expected = [text for text in TEXTS if text] + ["a whole\nfile ü", "last"]
    indexed = IndexedTokens(folder / "out")
    assert [indexed.document(number).tolist() for number in range(len(indexed))] == [
        [*text.encode(), EOT] for text in expected
    ]
    blank = sum(not text for text in TEXTS)
    assert (written.documents, written.empty, written.dtype) == (len(expected), blank + 2, "uint16")
    assert written.tokens == indexed.tokens.size


def test_bytes_do_not_depend_on_the_number_of_workers(folder):
    outputs = []
    for workers in (1, 2, 3):
        encode(folder, "a.jsonl", "b.txt", "c.NDJSON", output=f"out{workers}", workers=workers)
        outputs.append([(folder / f"out{workers}{suffix}").read_bytes() for suffix in (".bin", ".idx")])
    assert outputs[0] == outputs[1] == outputs[2]


def test_units_are_whole_lines_and_cover_the_file(folder):
    units = plan_units([folder / "a.jsonl"], "text")
    data = (folder / "a.jsonl").read_bytes()
    assert len(units) > 10
    assert [unit.start for unit in units] == [0, *(unit.stop for unit in units[:-1])]
    assert units[-1].stop == len(data)
    assert all(data[unit.stop - 1 : unit.stop] == b"\n" for unit in units[:-1])
    pieces = [encode_unit(unit, ByteTokenizer()) for unit in units]
    whole = encode_unit(Unit(folder / "a.jsonl", 0, len(data), "text"), ByteTokenizer())
    assert np.concatenate([piece.tokens for piece in pieces]).tolist() == whole.tokens.tolist()
    assert sum(piece.empty for piece in pieces) == whole.empty


def test_progress_reaches_the_end(folder):
    seen = []
    encode(folder, "a.jsonl", "b.txt", on_progress=lambda *values: seen.append(values))
    total = sum((folder / name).stat().st_size for name in ("a.jsonl", "b.txt"))
    assert seen[-1][:2] == (total, total) and seen[-1][2] == IndexedTokens(folder / "out").tokens.size
    assert [values[0] for values in seen] == sorted(values[0] for values in seen)


def damage(folder, line):
    path = folder / "a.jsonl"
    lines = path.read_bytes().splitlines()
    lines[150] = line
    path.write_bytes(b"\n".join(lines))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"{", "a.jsonl:151: no JSON"),
        (b'{"body": "x"}', "a.jsonl:151: no field 'text'"),
        (b'{"text": "\xfc"}', "a.jsonl:151: byte 0xfc"),
    ],
)
def test_a_bad_line_in_the_middle_is_named_and_nothing_is_left(folder, workers, line, message):
    damage(folder, line)
    before = sorted(folder.iterdir())
    with pytest.raises(UserError, match=message):
        encode(folder, "a.jsonl", workers=workers)
    assert sorted(folder.iterdir()) == before


def test_a_text_that_the_tokenizer_refuses_is_named(folder):
    damage(folder, b'{"text": "no!"}')
    with pytest.raises(UserError, match=r"a.jsonl:151: no marks, please"):
        encode(folder, "a.jsonl", tokenizer=NoMarks())


def test_an_existing_pair_is_replaced_only_on_request(folder):
    encode(folder, "b.txt")
    for suffix in (".bin", ".idx"):
        (folder / "one.idx").unlink(missing_ok=True)
        (folder / "one.bin").unlink(missing_ok=True)
        (folder / f"one{suffix}").write_bytes(b"mine")
        with pytest.raises(UserError, match=rf"one\{suffix} exists already: .*--overwrite"):
            encode(folder, "b.txt", output="one")
        assert (folder / f"one{suffix}").read_bytes() == b"mine"
    encode(folder, "c.NDJSON", overwrite=True)
    assert IndexedTokens(folder / "out").tokens.size == 5


@pytest.mark.parametrize("names", [["empty.txt"], ["empty.jsonl"], ["empty.txt", "empty.jsonl"]])
def test_no_text_is_refused(folder, names):
    with pytest.raises(UserError, match="no text in"):
        encode(folder, *names)
    assert not list(folder.glob("*out*"))


def test_a_binary_text_file_and_a_missing_file_are_refused(folder):
    (folder / "binary.txt").write_bytes(b"\x80\x81")
    with pytest.raises(UserError, match=r"binary.txt is not UTF-8 text: byte 0x80"):
        encode(folder, "binary.txt")
    with pytest.raises(UserError, match=r"none.txt does not exist"):
        encode(folder, "none.txt")
    with pytest.raises(UserError, match=r"cannot write .*none/out.bin"):
        encode(folder, "b.txt", output="none/out")


def test_a_worker_that_dies_is_reported(folder):
    worker = prepare._Worker(ByteTokenizer())
    worker._process.kill()
    worker._process.join()
    unit = Unit(folder / "b.txt", 0, 3, None)
    worker.give(unit)
    with pytest.raises(UserError, match=r"a worker ended with status -9 while it encoded .*b.txt"):
        worker.take(unit)
    worker.close()
