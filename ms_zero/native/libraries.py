"""Find the CPU library (installed with the package or in the user's cache), build it when needed, load it."""

import ctypes
import fcntl
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ms_zero import resources
from ms_zero.errors import UserError
from ms_zero.native.build import build_library, is_whole
from ms_zero.native.sources import VARIANTS, Variant, best_variant, library_name, source_root

_HOW_TO = "or choose the implementation without native code with hardware.kernels=portable"


@dataclass(frozen=True)
class Found:
    """A built library and where it came from: "package" (made at install time) or "cache" (at first use)."""

    path: Path
    variant: str
    origin: str


def find_library(variant: Variant) -> Found | None:
    """The library of the current sources for `variant`, None when it is not built."""
    name = library_name(source_root(), variant)
    shipped = installed_folder() / name
    if shipped.is_file():
        return Found(shipped, variant.name, "package")
    for path in (folder / name for folder in _cache_folders()):
        if _is_ours(path):
            return Found(path, variant.name, "cache")
    return None


def ensure_built(
    variant: Variant | None = None, announce: Callable[[str], None] = lambda message: None
) -> Found:
    """The library for `variant` (None: the best for this processor), built now when it is not there.

    Several processes may call this at once: one builds, the others wait for it. `announce` is told in one
    line when a build begins, which takes some seconds.

    Raises:
        UserError: this machine is not supported, there is no compiler, or the build failed.
    """
    variant = best_variant() if variant is None else variant
    if variant is None:
        raise UserError(f"kernels: no native CPU kernels for this machine: use x86_64 or aarch64, {_HOW_TO}")
    found = find_library(variant)
    if found is not None:
        return found
    try:
        folder = _make_cache()
        with _locked(folder / f"{variant.name}.lock"):
            found = find_library(variant)
            if found is None:
                build_library(source_root(), variant, folder, mode=0o500, announce=announce)
                found = find_library(variant)
    except (UserError, OSError) as error:
        raise UserError(f"kernels: cannot build the CPU kernels: {error}; {_HOW_TO}") from None
    assert found is not None
    return found


def load_library(variant: str | None = None) -> ctypes.CDLL:
    """The loaded library of a variant by name (None: the best for this processor), built when needed.

    Raises UserError as :func:`ensure_built` does, and when the library cannot be loaded.
    """
    return _loaded(variant)


@cache  # a library is loaded once a process; what is loaded never changes
def _loaded(name: str | None) -> ctypes.CDLL:
    variant = None if name is None else next(v for v in VARIANTS if v.name == name)
    found = ensure_built(variant)
    try:
        library = ctypes.CDLL(str(found.path))
    except OSError as error:
        fix = f"set XDG_CACHE_HOME to a folder whose files may be loaded, {_HOW_TO}"
        raise UserError(f"kernels: cannot load {found.path}: {error}; {fix}") from None
    library.msz_variant.restype = ctypes.c_char_p
    built_for = library.msz_variant().decode()
    if built_for != found.variant:
        raise UserError(f"kernels: {found.path} is for {built_for}, not {found.variant}: delete it")
    return library


def installed_folder() -> Path:
    """Where the build at install time leaves libraries: beside the sources."""
    return resources.config_dir().parent / "build" / "native"


def _cache_folders() -> tuple[Path, ...]:
    """The user's cache, and for users without a usable home a folder of their own in the temporary one."""
    temporary = Path(tempfile.gettempdir()) / f"ms_zero-{os.getuid()}" / "native"
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:  # a user of a container, without HOME and without an entry in /etc/passwd
        return (temporary,)
    return home / "ms_zero" / "native", temporary


def _make_cache() -> Path:
    """Make the first cache folder that can be made, writable by nobody else: what lies in it is loaded."""
    reasons = []
    for folder in _cache_folders():
        try:
            for each in (folder.parent, folder):
                each.parent.mkdir(parents=True, exist_ok=True)
                each.mkdir(exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            reasons.append(f"{folder}: {error.strerror}")
            continue
        if not _is_private(folder):
            raise UserError(f"{folder} belongs to somebody else or others may write to it: remove it")
        return folder
    raise UserError(f"no folder can keep the library ({'; '.join(reasons)})")


def _is_ours(path: Path) -> bool:
    try:
        return path.is_file() and _is_private(path) and is_whole(path)
    except OSError:  # HOME may be the unreadable one of somebody else; the file may be replaced meanwhile
        return False


def _is_private(path: Path) -> bool:
    for each in (path, path.parent):
        found = each.stat()
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return False
    return True


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        # Some network file systems have no locks: there every process builds the same library.
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def built_libraries(variants: Sequence[Variant] = VARIANTS) -> tuple[Found, ...]:
    """Every library of the current sources that is built."""
    return tuple(found for found in map(find_library, variants) if found is not None)
