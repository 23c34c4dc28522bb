import hashlib
import os
import sysconfig
from pathlib import Path

import pytest

from ms_zero.data import corpus as corpus_module
from ms_zero.data.corpus import (
    Document,
    Omission,
    file_corpus,
    folder_corpus,
    split_documents,
    stdlib_corpus,
)
from ms_zero.errors import UserError


def write(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def names(corpus):
    return [document.name for document in corpus.documents]


def documents(count):
    return [Document(f"file{index}.txt", "text") for index in range(count)]


# --- the standard library


def test_stdlib_is_real_text_in_a_fixed_order_without_tests():
    corpus = stdlib_corpus()
    assert names(corpus) == sorted(names(corpus))
    assert len(set(names(corpus))) == len(corpus.documents) > 400
    assert {"os.py", "json/decoder.py"} <= set(names(corpus))
    assert sum(len(document.text) for document in corpus.documents) > 5_000_000
    folders = {part for name in names(corpus) for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    text = dict(zip(names(corpus), (document.text for document in corpus.documents), strict=True))
    assert text["os.py"] == Path(os.__file__).read_text(encoding="utf-8")
    assert all(omission.reason for omission in corpus.omitted)


def test_stdlib_counts_every_file_as_used_or_left_out():
    corpus = stdlib_corpus()
    left_out = tuple(omission.name for omission in corpus.omitted)
    known = {*names(corpus), *left_out}
    root = Path(sysconfig.get_path("stdlib"))
    for path in root.rglob("*.py"):
        name = path.relative_to(root).as_posix()
        assert name in known or name.startswith(left_out), f"{name} was skipped silently"


def test_a_python_without_sources_is_explained(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus_module.sysconfig, "get_path", lambda name: str(tmp_path / "python311.zip"))
    with pytest.raises(UserError, match=r"no Python source text under .*python311.zip.*data.source=files"):
        stdlib_corpus()


def test_folder_leaves_out_with_a_reason(tmp_path):
    write(
        tmp_path,
        {
            "b.py": "b",
            "a/z.py": "z",
            "a.py": "a",
            "a/test/x.py": "x",
            "a/tests/x.py": "x",
            "site-packages/pip.py": "pip",
            "latin.py": "# é".encode("latin-1"),
            "empty.py": "",
            "notes.txt": "not source",
            "testing.py": "kept: only folders are tests",
        },
    )
    (tmp_path / "gone.py").symlink_to(tmp_path / "missing")
    (tmp_path / "loop").symlink_to(tmp_path)
    corpus = folder_corpus(tmp_path, "demo")
    assert names(corpus) == ["a.py", "a/z.py", "b.py", "testing.py"]
    assert corpus.omitted == (
        Omission("a/test/", "test folder"),
        Omission("a/tests/", "test folder"),
        Omission("empty.py", "empty"),
        Omission("gone.py", "unreadable: No such file or directory"),
        Omission("latin.py", "not UTF-8"),
        Omission("loop/", "symbolic link to a folder"),
        Omission("site-packages/", "installed packages"),
    )


# --- files


def test_files_keep_the_order_of_patterns_and_globs_are_sorted(tmp_path):
    write(tmp_path, {"z.txt": "z", "b/2.txt": "2", "b/1.txt": "1", "b/c/0.txt": "0", "b/skip.md": "x"})
    corpus = file_corpus(["z.txt", "b/**/*.txt"], tmp_path)
    assert names(corpus) == ["z.txt", "b/1.txt", "b/2.txt", "b/c/0.txt"]
    assert [document.text for document in corpus.documents] == ["z", "1", "2", "0"]
    assert corpus.description == f"4 text files under {tmp_path}"


def test_names_do_not_depend_on_where_the_files_are(tmp_path, monkeypatch):
    for place in ("here", "there/deeper"):
        write(tmp_path / place, {"x/a.txt": "a", "y/b.txt": "b"})
    here = file_corpus([str(tmp_path / "here/*/*.txt")])
    there = file_corpus(["../deeper/x/a.txt", "y/../y/b.txt"], tmp_path / "there/deeper")
    monkeypatch.chdir(tmp_path / "here")
    working = file_corpus(["x/a.txt", "y/b.txt"])
    assert here.documents == there.documents == working.documents
    assert names(here) == ["x/a.txt", "y/b.txt"]


def test_a_file_matched_again_is_used_once_and_reported(tmp_path):
    write(tmp_path, {"a.txt": "a", "b.txt": "b"})
    corpus = file_corpus(["b.txt", "*.txt", "./a.txt"], tmp_path)
    assert names(corpus) == ["b.txt", "a.txt"]
    assert corpus.omitted == (Omission("b.txt", "matched again"), Omission("a.txt", "matched again"))


def test_signs_of_a_glob_may_be_part_of_a_name(tmp_path):
    write(tmp_path / "set[1]", {"a[0].txt": "literal", "b.txt": "b"})
    assert names(file_corpus(["a[0].txt"], tmp_path / "set[1]")) == ["a[0].txt"]
    assert names(file_corpus(["*.txt"], tmp_path / "set[1]")) == ["a[0].txt", "b.txt"]


def test_text_is_taken_as_it_is(tmp_path):
    write(tmp_path, {"a.txt": "\ufeffone\r\ntwo\n\x00"})
    assert file_corpus(["a.txt"], tmp_path).documents[0].text == "\ufeffone\r\ntwo\n\x00"


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("absent.txt", "absent.txt does not exist under"),
        ("*.none", r"\*.none matches no file"),
        ("sub", "sub is a folder"),
        ("su?", r"su\? matches no file"),
        ("empty.txt", "empty.txt is empty"),
        ("latin.txt", "latin.txt is not UTF-8 text: byte 0xe9 at offset 3"),
        ("pipe", "pipe is not a regular file"),
        ("dangling*", "dangling.txt is not a regular file"),
        ("x" * 5000, "cannot be looked up: .*too long"),
        ("~nobody-of-that-name/x", "cannot be looked up"),
        ("nul\0.txt", "does not exist"),
    ],
)
def test_unusable_files_are_named(tmp_path, pattern, message):
    write(tmp_path, {"empty.txt": "", "latin.txt": "caf\xe9".encode("latin-1"), "sub/x.txt": "x"})
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling.txt").symlink_to(tmp_path / "missing")
    with pytest.raises(UserError, match=message) as caught:
        file_corpus([pattern], tmp_path)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    write(tmp_path, {"secret.txt": "x"})

    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(UserError, match=r"secret.txt cannot be read: Permission denied"):
        file_corpus(["secret.txt"], tmp_path)
    assert folder_corpus(write(tmp_path, {"s.py": "x"}), "demo").omitted == (
        Omission("s.py", "unreadable: Permission denied"),
    )


def test_no_files_is_an_error():
    with pytest.raises(UserError, match=r"data\.files is empty"):
        file_corpus([])


# --- the split


def test_split_depends_on_the_name_alone():
    few, many = documents(40), documents(400)
    held = {document.name for document in split_documents(few, 0.3)[1]}
    assert {document.name for document in split_documents(many, 0.3)[1] if document in few} == held
    assert {document.name for document in split_documents(few[::-1], 0.3)[1]} == held


def test_split_is_a_partition_in_corpus_order_of_about_the_fraction():
    train, validation = split_documents(documents(2000), 0.1)
    assert sorted([*train, *validation], key=lambda document: int(document.name[4:-4])) == documents(2000)
    assert list(train) == [document for document in documents(2000) if document not in set(validation)]
    assert 150 < len(validation) < 250


def test_split_follows_the_hash_of_the_name():
    for document in documents(20):
        position = int.from_bytes(hashlib.sha256(document.name.encode()).digest()[:8], "big") / 2**64
        pair = [document, *documents(100)]
        assert (document in split_documents(pair, 0.5)[1]) == (position < 0.5)


def test_a_larger_fraction_only_adds_documents():
    small = set(split_documents(documents(100), 0.1)[1])
    assert small < set(split_documents(documents(100), 0.4)[1])


def test_fraction_zero_keeps_all_for_training():
    assert split_documents(documents(1), 0) == (tuple(documents(1)), ())


@pytest.mark.parametrize(("fraction", "missing"), [(1e-9, "validation"), (0.999999, "training")])
def test_an_empty_part_names_a_fraction_that_works(fraction, missing):
    with pytest.raises(UserError, match=f"leaves no document for {missing} out of 3") as caught:
        split_documents(documents(3), fraction)
    advice = float(str(caught.value).split("set it to ")[1].split(",")[0])
    train, validation = split_documents(documents(3), advice)
    assert (len(train), len(validation)) == (2, 1)


def test_one_document_says_how_to_go_on():
    with pytest.raises(UserError, match=r"one document \(file0.txt\).*more files.*validation_fraction=0 "):
        split_documents(documents(1), 0.05)


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, float("nan")])
def test_the_fraction_is_checked(fraction):
    with pytest.raises(UserError, match=rf"data.validation_fraction={fraction}: expected"):
        split_documents(documents(3), fraction)


def test_names_that_are_not_utf8_work(tmp_path):
    name = os.fsdecode(b"caf\xe9.txt")
    write(tmp_path, {"b.txt": "b"})
    (tmp_path / name).write_text("x")
    train, validation = split_documents(file_corpus(["*.txt"], tmp_path).documents, 0)
    assert {document.name for document in train} == {name, "b.txt"} and not validation
