"""The project's C++ library for the CPU: found, built when needed, loaded; standard library only."""

from ms_zero.native.build import Build, Compiler, build_library, find_compilers
from ms_zero.native.libraries import Found, built_libraries, ensure_built, find_library, load_library
from ms_zero.native.sources import (
    VARIANTS,
    Variant,
    best_variant,
    source_key,
    source_root,
    supported_variants,
)

__all__ = [
    "VARIANTS",
    "Build",
    "Compiler",
    "Found",
    "Variant",
    "best_variant",
    "build_library",
    "built_libraries",
    "ensure_built",
    "find_compilers",
    "find_library",
    "load_library",
    "source_key",
    "source_root",
    "supported_variants",
]
