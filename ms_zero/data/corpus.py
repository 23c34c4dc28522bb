"""Where text comes from: named documents in a deterministic order, and their split for validation."""

import glob
import hashlib
import os
import platform
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path

from ms_zero.errors import UserError

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_PACKAGE_FOLDERS = frozenset({"site-packages", "dist-packages"})


@dataclass(frozen=True)
class Document:
    """A text and the name that identifies it within its corpus."""

    name: str
    text: str


@dataclass(frozen=True)
class Omission:
    """Something that was found but left out of the corpus, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Corpus:
    """Documents with unique names and at least one character each, in a fixed order.

    Attributes:
        description: where the text comes from, for people.
        documents: what is used.
        omitted: what was found and left out.
    """

    description: str
    documents: tuple[Document, ...]
    omitted: tuple[Omission, ...] = ()


def stdlib_corpus() -> Corpus:
    """The source text of the running Python's standard library (about 700 files, 12 MB).

    Raises:
        UserError: this Python has no library sources, as when they are packed in a zip file.
    """
    root = Path(sysconfig.get_path("stdlib"))
    corpus = folder_corpus(root, f"Python {platform.python_version()} standard library")
    if not corpus.documents:
        raise UserError(f"no Python source text under {root}: install the full standard library, or set "
                        "data.source=files and data.files")
    return corpus


def folder_corpus(root: Path, description: str) -> Corpus:
    """All non-empty UTF-8 ``*.py`` files under `root`, ordered and named by their relative posix path.

    Folders of tests and of installed packages are left out; they and unusable files are listed as omissions.
    """
    documents: list[Document] = []
    omitted: list[Omission] = []
    for found in _python_files(root, root):
        if isinstance(found, Path):
            found = _library_document(found, root)
        (documents if isinstance(found, Document) else omitted).append(found)
    by_name = attrgetter("name")
    return Corpus(description, tuple(sorted(documents, key=by_name)), tuple(sorted(omitted, key=by_name)))


def file_corpus(patterns: Sequence[str], base: Path | None = None) -> Corpus:
    """One document per UTF-8 text file.

    Files keep the order of `patterns`, those of one glob are sorted. A document's name is its path relative
    to the folder that all files share, so that a moved corpus stays the same corpus.

    Args:
        patterns: paths and globs (``**`` spans folders; hidden files need an explicit dot).
        base: the folder that relative patterns start from; default the working directory.

    Raises:
        UserError: a file is missing, unreadable, empty or not UTF-8, or a glob matches no file.
    """
    found = find_files(patterns, base)
    documents = tuple(Document(name, read_text(path)) for path, name in found.names.items())
    return Corpus(found.describe("text"), documents, found.omitted)


@dataclass(frozen=True)
class FoundFiles:
    """Files that patterns matched.

    Attributes:
        root: the folder that all files share.
        names: path -> its path relative to the root, in the order of the patterns.
        omitted: files that were matched more than once.
    """

    root: Path
    names: dict[Path, str]
    omitted: tuple[Omission, ...]

    def describe(self, kind: str) -> str:
        """How many files of a kind there are, and where."""
        noun = "file" if len(self.names) == 1 else "files"
        return f"{len(self.names)} {kind} {noun} under {self.root}"


def find_files(patterns: Sequence[str], base: Path | None = None) -> FoundFiles:
    """The files that paths and globs mean; see :func:`file_corpus`.

    Raises:
        UserError: a file is missing, or a glob matches no file.
    """
    if not patterns:
        raise UserError("data.files is empty: list at least one path or glob")
    counts = Counter(path for pattern in patterns for path in _expand(pattern, base or Path()))
    root = Path(os.path.commonpath([path.parent for path in counts]))
    names = {path: path.relative_to(root).as_posix() for path in counts}
    omitted = [Omission(names[path], "matched again") for path in names for _ in range(counts[path] - 1)]
    return FoundFiles(root, names, tuple(omitted))


def split_documents(
    documents: Sequence[Document], validation_fraction: float
) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    """Training and validation documents, each in corpus order.

    A document goes to validation if a hash of its name, read as a number in [0, 1), is below the fraction:
    the choice depends on nothing else, so adding documents moves none of the others.

    Raises:
        UserError: a part would be empty (with fraction 0 only training may not be), or the fraction is not in
            [0, 1).
    """
    if not 0 <= validation_fraction < 1:
        raise UserError(f"data.validation_fraction={validation_fraction}: expected at least 0 and below 1")
    held = [_position(document.name) < validation_fraction for document in documents]
    train = tuple(document for document, out in zip(documents, held, strict=True) if not out)
    validation = tuple(document for document, out in zip(documents, held, strict=True) if out)
    if not train or (validation_fraction > 0 and not validation):
        raise UserError(_split_advice(documents, validation_fraction, "validation" if train else "training"))
    return train, validation


def _python_files(folder: Path, root: Path) -> Iterator[Path | Omission]:
    """Every ``*.py`` below `folder`, and an omission for each folder that is not entered."""
    name = folder.relative_to(root).as_posix() + "/"
    try:
        entries = [(entry, entry.is_dir()) for entry in folder.iterdir()]
    except OSError as error:
        yield Omission(name, f"unreadable: {error.strerror}")
        return
    for entry, is_folder in entries:
        if not is_folder:
            if entry.suffix == ".py":
                yield entry
        elif reason := _folder_omission(entry):
            yield Omission(entry.relative_to(root).as_posix() + "/", reason)
        else:
            yield from _python_files(entry, root)


def _folder_omission(folder: Path) -> str | None:
    if folder.name in _TEST_FOLDERS:
        return "test folder"
    if folder.name in _PACKAGE_FOLDERS:
        return "installed packages"
    return "symbolic link to a folder" if folder.is_symlink() else None


def _library_document(path: Path, root: Path) -> Document | Omission:
    name = path.relative_to(root).as_posix()
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        return Omission(name, f"unreadable: {error.strerror}")
    except UnicodeDecodeError:
        return Omission(name, "not UTF-8")
    return Document(name, text) if text else Omission(name, "empty")


def _expand(pattern: str, base: Path) -> list[Path]:
    """The files that a path or glob means, with folders resolved."""
    try:
        path = base / Path(pattern).expanduser()
        if path.is_dir():
            raise UserError(f"data file {pattern} is a folder: name the files in it, with a glob if you like")
        if path.exists():
            return [path.parent.resolve() / path.name]
        if not any(sign in pattern for sign in "*?["):
            raise UserError(f"data file {pattern} does not exist under {base.absolute()}: correct the path")
        # root_dir keeps signs in the name of the base folder literal; pathlib refuses absolute patterns.
        matches = sorted(glob.glob(str(Path(pattern).expanduser()), root_dir=base, recursive=True))  # noqa: PTH207
        files = [base / match for match in matches if not (base / match).is_dir()]
        if not files:
            raise UserError(f"data glob {pattern} matches no file in {base.absolute()}: correct the path")
        return [file.parent.resolve() / file.name for file in files]
    except (OSError, RuntimeError) as error:  # a name too long, a folder without permission, an unknown ~user
        raise UserError(f"data file {pattern} cannot be looked up: {error}") from error


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
        UserError: it is unreadable, empty or not UTF-8.
    """
    try:
        if not path.is_file():
            raise UserError(f"data file {path} is not a regular file: expected UTF-8 text")
        text = path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"data file {path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"data file {path} is not UTF-8 text: byte 0x{error.object[error.start]:02x} at offset "
            f"{error.start}; convert it, for example with iconv, or leave it out"
        ) from error
    if not text:
        raise UserError(f"data file {path} is empty: leave it out")
    return text


def _position(name: str) -> float:
    """A number in [0, 1) that depends only on `name`, uniform over names."""
    digest = hashlib.sha256(name.encode(errors="surrogateescape")).digest()  # file names may be any bytes
    return (int.from_bytes(digest[:8], "big") >> 11) * 2.0**-53


def _split_advice(documents: Sequence[Document], fraction: float, missing: str) -> str:
    count = len(documents)
    if count == 1:
        name = documents[0].name
        return (
            f"one document ({name}) cannot be split for data.validation_fraction={fraction}: give more "
            f"files, cut it into pieces (split -n l/20 --additional-suffix=.txt {name} part-), or set "
            "data.validation_fraction=0 to train without validation"
        )
    lowest, second = sorted(_position(document.name) for document in documents)[:2]
    middle = (lowest + second) / 2
    value = next(v for v in (round(middle, digits) for digits in range(2, 18)) if lowest < v <= second)
    return (
        f"data.validation_fraction={fraction} leaves no document for {missing} out of {count}: set it to "
        f"{value}, which gives 1 document to validation, or give more files"
    )
