"""MindSpore's own AscendC kernel, from the installed wheel, under the emulation: an independent test."""

import ctypes
import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from cases import REFERENCE, values
from emulated import NUMPY_TYPES, Library, Memory, Run, Variant

TILE = 2048

_DTYPE_CODES = {"float32": 0, "float16": 1, "bfloat16": 27}
_ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}

# Rules that MindSpore 2.10.0's source does not keep. The operator compiler inserts some synchronisation on
# its own, so these need not be faults of the binary; a checker of the source has to name them.
KNOWN_FINDINGS = frozenset(
    {
        # The vector unit clears the last tile's buffer; neither the transfer into it nor its reader waits.
        "DataCopyPad to UB on pipe MTE2: write-after-write hazard against pipe V: event or queue missing",
        "ShiftLeft on pipe V: read-after-write hazard against pipe V: PipeBarrier missing",
        # The same for the buffer of the reduction.
        "Cast on pipe V: write-after-write hazard against pipe V: PipeBarrier missing",
        # The scalar unit writes the verdict; the transfer of it is not told to wait.
        "DataCopyPad to GM on pipe MTE3: read-after-write hazard against pipe S: event or queue missing",
        # After an early verdict the kernel returns with three tensors in hand.
        "a queue's tensor was not freed at the end of the kernel",
    }
)
# Where several cores find something: each writes the same verdict to the same 32 bytes.
KNOWN_RACES = frozenset(
    {"DataCopyPad to GM races with another core", "DataCopyPad to GM writes a byte of global memory twice"}
)


def source_path() -> Path | None:
    """The kernel's source in the installed MindSpore, None where this wheel has none."""
    spec = importlib.util.find_spec("mindspore")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "lib" / "plugin" / "ascend" / "custom_ascendc_910b"
    return next(iter(sorted(folder.rglob("all_finite.cpp"))), None)


def variant() -> Variant:
    """The kernel as the emulation's build wants it; one binary serves all dtypes."""
    path = source_path()
    assert path is not None
    return Variant(path.parent, "all_finite", {}, 4)


@dataclass(frozen=True)
class Share:
    """The elements of a core: whole tiles of `tile`, then `tail`, of which `real` are elements."""

    count: int
    tile: int
    tail: int
    loops: int
    real: int
    pad: int


def share_of(count: int, tile: int, item_bytes: int) -> Share:
    """Cut a core's elements into tiles; the last one is padded to whole comparisons of 256 bytes."""
    loops = max(-(-count // tile), 1)
    real = count - (loops - 1) * tile
    unit, block = 256 // item_bytes, 32 // item_bytes
    return Share(count, tile, -(-real // unit) * unit, loops, real, -real % block)


def run(library: Library, values: np.ndarray, dtype: str, cores: int, tile: int) -> tuple[bool, Run]:
    """Whether the kernel calls all values finite, and how it ran; `values` are the bits of the elements."""
    item = _ITEM_BYTES[dtype]
    average = -(-values.size // cores // (256 // item)) * (256 // item)
    shares = (share_of(average, tile, item), share_of(values.size - average * (cores - 1), tile, item))
    numbers = [value for s in shares for value in (s.count, s.tile, s.tail, s.loops, s.real, s.pad)]
    tiling = (ctypes.c_uint32 * 14)(*numbers, 1, _DTYPE_CODES[dtype])
    x = Memory(values)
    verdict = Memory(np.zeros(16, np.uint16), readable=False, writable=True)
    done = library.launch("all_finite", cores, [x, verdict], [x, verdict], tiling, strict=False)
    assert not done.stopped, done.findings
    assert x.guards_intact()
    assert verdict.guards_intact()
    return bool(verdict.array[0] == 0), done


@dataclass(frozen=True)
class SelfTest:
    """What MindSpore's kernel did under the emulation."""

    verdicts: int
    wrong: int
    findings: frozenset[str]


def self_test(library: Library) -> SelfTest:
    """Finite arrays, and arrays with one bad element, in all dtypes, on one core and on three."""
    verdicts, wrong, findings = 0, 0, set()
    for dtype in _DTYPE_CODES:
        for cores in (1, 3):
            for length in (1000, 4 * TILE + 5, 20_000):
                for bits, expected in arrays(dtype, length):
                    finite, done = run(library, bits, dtype, cores, TILE)
                    verdicts, wrong = verdicts + 1, wrong + (finite != expected)
                    findings |= set(done.findings)
    return SelfTest(verdicts, wrong, frozenset(findings))


def arrays(dtype: str, length: int) -> Iterator[tuple[np.ndarray, bool]]:
    """Bits of elements, and whether all of them are finite."""
    clean = bits_of(values(np.random.default_rng(length), length, dtype, "normal"), dtype)
    yield clean, True
    for value in (np.inf, -np.inf, np.nan):
        for place in (0, length // 2, length - 1):
            yield spoiled(clean, dtype, value, [place]), False


def spoiled(clean: np.ndarray, dtype: str, value: float, places: Sequence[int]) -> np.ndarray:
    """The bits of an array with `value` at `places`."""
    bad = np.array([value], np.float32)
    narrowed = bad if dtype == "float32" else REFERENCE.narrow(bad, np.dtype(NUMPY_TYPES[dtype]))
    changed = clean.copy()
    changed[list(places)] = bits_of(narrowed, dtype)[0]
    return changed


def bits_of(numbers: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of an array's elements."""
    return numbers.view(np.uint32 if dtype == "float32" else np.uint16)
