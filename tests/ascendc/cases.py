"""Numeric cases for the emulated kernels, compared to the last bit with the contract's numpy reference."""

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np
from emulated import (
    NUMPY_TYPES,
    ROOT,
    TOTAL,
    Library,
    Memory,
    Run,
    Variant,
    adam_variant,
    stats_variant,
)
from tiling import TilingLibrary

CORES = (1, 8, 40, 48)
SIZES = (
    1,
    2,
    7,
    8,
    9,
    15,
    16,
    17,
    31,
    33,
    63,
    65,
    255,
    256,
    257,
    1000,
    4607,
    4863,
    4864,
    4865,
    5119,
    5120,
    5121,
    8191,
    8192,
    8193,
    9727,
    9729,
    16385,
    12289,
    65535,
    65537,
    100003,
    524287,
    1 << 20,
    (1 << 20) - 3,
)
STATS_TILE, STATS_ROWS, LANES = 8192, 64, 64


def load_reference() -> ModuleType:
    """The numpy reference, without the package around it (which imports mindspore)."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "ms_zero" / "kernels" / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = load_reference()


@dataclass(frozen=True)
class AdamCase:
    """One launch of FusedAdamW."""

    grad: str
    low: str | None
    length: int
    cores: int
    step: int = 3
    found_inf: float = 0.0
    kind: str = "normal"
    offset: int = 0
    """Elements by which every array is moved off a 512-byte border."""

    @property
    def variant(self) -> Variant:
        return adam_variant(self.grad, self.low)


@dataclass(frozen=True)
class StatsCase:
    """One launch of GradStats and of GradStatsTotal."""

    dtype: str
    length: int
    cores: int
    kind: str = "normal"
    offset: int = 0

    @property
    def variant(self) -> Variant:
        return stats_variant(self.dtype)


@dataclass(frozen=True)
class Outcome:
    """What a case showed: `errors` is empty when everything held."""

    errors: tuple[str, ...]
    max_ulp: float
    run: Run
    bytes_per_param: float


def values(rng: np.random.Generator, length: int, dtype: str, kind: str) -> np.ndarray:
    """Random numbers of a dtype; kind "special" mixes in inf, NaN, denormals, zeros and the extremes."""
    exponents = rng.integers(-12, 4, length)
    numbers = np.ldexp(rng.standard_normal(length), exponents).astype(np.float32)
    if kind == "special" and length:
        special = np.array(
            [
                0.0,
                -0.0,
                np.inf,
                -np.inf,
                np.nan,
                1e-40,
                -1e-45,
                6e-8,
                65504.0,
                65519.9,
                -70000.0,
                3e38,
                1e20,
                1e-20,
            ],
            np.float32,
        )
        places = rng.random(length) < 0.3
        numbers[places] = rng.choice(special, int(places.sum()))
    with np.errstate(over="ignore"):
        return REFERENCE.narrow(numbers, np.dtype(NUMPY_TYPES[dtype])) if dtype != "float32" else numbers


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Where two arrays have the same bits, or both a NaN (which one is not part of the contract)."""
    unsigned = {2: np.uint16, 4: np.uint32}[a.itemsize]
    wide_a, wide_b = REFERENCE.widen(a), REFERENCE.widen(b)
    return (a.view(unsigned) == b.view(unsigned)) | (np.isnan(wide_a) & np.isnan(wide_b))


def ulp_distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest distance in units of the last place, infinite between a number and a NaN."""
    differs = ~same_bits(a, b)
    if not differs.any():
        return 0.0
    signed = {2: np.int16, 4: np.int32}[a.itemsize]

    def order(x: np.ndarray) -> np.ndarray:
        bits = x[differs].view(signed).astype(np.int64)
        return np.where(bits < 0, -(bits & (2 ** (8 * a.itemsize - 1) - 1)), bits)

    if (np.isnan(REFERENCE.widen(a[differs])) | np.isnan(REFERENCE.widen(b[differs]))).any():
        return float("inf")
    return float(np.abs(order(a) - order(b)).max())


class Checker:
    """Runs cases on a library and compares."""

    def __init__(self, library: Library, tiling: TilingLibrary) -> None:
        self._library, self._tiling = library, tiling

    def adam(self, case: AdamCase, kernel: str | None = None, max_overlap: float = np.inf) -> Outcome:
        """Run an AdamW case; `kernel` names another table entry than the case's own (a mutant)."""
        inputs = _adam_inputs(case)
        expected = [array.copy() for array in inputs[:3]]
        low_type = None if case.low is None else NUMPY_TYPES[case.low]
        low = None if low_type is None else np.full(case.length, 0x1234, np.uint16).view(low_type)
        expected_low = None if low is None else low.copy()
        REFERENCE.adamw(*expected, inputs[3], expected_low, inputs[4])
        skipped = case.found_inf != 0
        p, m, v = (Memory(array, writable=True, offset=case.offset) for array in inputs[:3])
        grad, scalars = Memory(inputs[3], offset=case.offset), Memory(inputs[4])
        token = Memory(np.full(1, -7, np.float32), readable=False, writable=True)
        memories, arguments = [p, m, v, grad, scalars, token], [p, m, v, grad, scalars]
        outputs = [p, m, v]
        if low is not None:
            low_memory = Memory(low, readable=False, writable=True, offset=case.offset)
            memories.append(low_memory)
            arguments.append(low_memory)
            outputs.append(low_memory)
            expected.append(expected_low)
        tiling = self._tiling.adam(case.length, case.cores, inputs[3].itemsize, 0 if low is None else 2)
        name = kernel or case.variant.name
        run = self._library.launch(name, tiling.cores, memories, [*arguments, *outputs, token], tiling)
        errors, ulp = _compare(run, memories, outputs, expected, max_overlap)
        errors += _wrong_ub(run, planned_adam_ub(tiling.tile, inputs[3].itemsize, 0 if low is None else 2))
        if token.array[0] != (0.0 if skipped else 1.0):
            errors.append(f"token is {token.array[0]}")
        expected_bytes = 0 if skipped else _adam_bytes(case)
        moved = _moved(run, memories, without=(scalars, token))
        if moved != expected_bytes * case.length and not run.stopped:
            errors.append(f"{moved} bytes moved, {expected_bytes * case.length} expected")
        return Outcome(tuple(errors), ulp, run, moved / max(case.length, 1))

    def stats(self, case: StatsCase, kernel: str | None = None, max_overlap: float = np.inf) -> Outcome:
        """Run a GradStats case and check the partial sums of all rows."""
        rng = np.random.default_rng([case.length, case.cores])
        x = Memory(values(rng, case.length, case.dtype, case.kind), offset=case.offset)
        partials = Memory(np.full(STATS_ROWS * 8, np.nan, np.float32), readable=False, writable=True)
        tiling = self._tiling.stats(case.length, case.cores)
        run = self._library.launch(
            kernel or case.variant.name, tiling.cores, [x, partials], [x, partials], tiling
        )
        expected = expected_partials(REFERENCE.widen(x.values), tiling.per_core, tiling.cores)
        errors, ulp = _compare(run, [x, partials], [partials], [expected], max_overlap)
        errors += _wrong_ub(run, planned_stats_ub(x.values.itemsize))
        moved = _moved(run, [x, partials], without=(partials,))
        if moved != x.values.nbytes and not run.stopped:
            errors.append(f"{moved} bytes moved, {x.values.nbytes} expected")
        return Outcome(tuple(errors), ulp, run, moved / max(case.length, 1))

    def total(self, partials: np.ndarray, kernel: str | None = None) -> Outcome:
        """Run GradStatsTotal on partial sums [64, 8]."""
        rows = Memory(partials.reshape(-1))
        result = Memory(np.full(1, np.nan, np.float32), readable=False, writable=True)
        run = self._library.launch(kernel or TOTAL.name, 1, [rows, result], [rows, result], None)
        errors, ulp = _compare(run, [rows, result], [result], [expected_total(partials)], np.inf)
        errors += _wrong_ub(run, (STATS_ROWS + 1) * 32)
        return Outcome(tuple(errors), ulp, run, 0.0)


def planned_adam_ub(tile: int, grad_bytes: int, low_bytes: int) -> int:
    """What FusedAdamW has to take of the unified buffer, in bytes: the tile is chosen to fill it."""
    widened = 4 if grad_bytes == 2 else 0
    return tile * (2 * (12 + grad_bytes) + low_bytes + 4 + widened) + 96


def planned_stats_ub(item_bytes: int) -> int:
    """What GradStats has to take: two tiles of input, one of squares, three levels of sums, the rows."""
    return STATS_TILE * (2 * item_bytes + 4) + (128 + 8 + 8) * 4 + (1 + STATS_ROWS) * 32


def _wrong_ub(run: Run, planned: int) -> list[str]:
    if run.stopped or run.ub_peak == planned:
        return []
    return [f"takes {run.ub_peak} bytes of the unified buffer, planned are {planned}"]


def _adam_inputs(case: AdamCase) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng([case.length, case.cores, case.step])
    if case.kind == "ties":
        return _tie_inputs(case, rng)
    p, m = (values(rng, case.length, "float32", case.kind) for _ in range(2))
    v = np.abs(values(rng, case.length, "float32", case.kind))
    grad = values(rng, case.length, case.grad, case.kind)
    scalars = REFERENCE.adamw_scalars(
        lr=3e-4,
        beta1=0.9,
        beta2=0.95,
        eps=1e-8,
        weight_decay=0.1,
        step=case.step,
        grad_scale=0.37,
        found_inf=case.found_inf,
    )
    return p, m, v, grad, scalars


def _tie_inputs(case: AdamCase, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """A step that leaves every parameter as it is, halfway between two numbers of the low-precision dtype."""
    half_step = 12 if case.low == "float16" else 15  # the highest bit that is rounded away
    bits = (
        (rng.integers(0x3000, 0x4700, case.length).astype(np.uint32) << 16)
        >> (half_step + 1)
        << (half_step + 1)
    )
    sign = rng.integers(0, 2, case.length).astype(np.uint32) << 31
    p = (bits | np.uint32(1 << half_step) | sign).view(np.float32)
    zeros = np.zeros(case.length, np.float32)
    grad = zeros.astype(NUMPY_TYPES[case.grad])
    scalars = REFERENCE.adamw_scalars(
        lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, step=case.step
    )
    return p, zeros, zeros + 1, grad, scalars


def _adam_bytes(case: AdamCase) -> int:
    return 24 + np.dtype(NUMPY_TYPES[case.grad]).itemsize + (0 if case.low is None else 2)


def _moved(run: Run, memories: Sequence[Memory], without: Sequence[Memory]) -> int:
    return sum(
        run.bytes_read[i] + run.bytes_written[i] for i, memory in enumerate(memories) if memory not in without
    )


def _compare(
    run: Run,
    memories: Sequence[Memory],
    outputs: Sequence[Memory],
    expected: Sequence[np.ndarray],
    max_overlap: float,
) -> tuple[list[str], float]:
    errors = [f"rule: {finding}" for finding in run.findings]
    errors += ["wrote outside its tensors" for memory in memories if not memory.guards_intact()]
    ulp = 0.0
    if not run.stopped:
        for position, (output, wanted) in enumerate(zip(outputs, expected)):
            ulp = max(ulp, ulp_distance(output.array, wanted))
            wrong = np.flatnonzero(~same_bits(output.array, wanted))
            if wrong.size:
                first = int(wrong[0])
                errors.append(
                    f"output {position}: {wrong.size} wrong, the first at {first}: "
                    f"{output.array[first]!r} instead of {wanted[first]!r}"
                )
        if run.overlap > max_overlap:
            errors.append(f"transfers and arithmetic do not overlap: {run.overlap:.3f} > {max_overlap}")
    return errors, ulp


def expected_partials(x: np.ndarray, per_core: int, cores: int) -> np.ndarray:
    """Rows [64 * 8]: the first float of row c is the sum of squares of core c."""
    rows = np.zeros((STATS_ROWS, 8), np.float32)
    with np.errstate(all="ignore"):
        for core in range(cores):
            total = np.float32(0.0)
            for start in range(core * per_core, min((core + 1) * per_core, x.size), STATS_TILE):
                total = np.float32(total + _tile_sum(x[start : min(start + STATS_TILE, x.size)]))
            rows[core, 0] = total
    return rows.reshape(-1)


def _tile_sum(x: np.ndarray) -> np.float32:
    """Neighbours are added in pairs, then pairs of pairs: the tree of the reduction instruction."""
    squares = np.zeros(STATS_TILE, np.float32)
    np.multiply(x, x, out=squares[: x.size])
    while squares.size > 1:
        squares = squares[0::2] + squares[1::2]
    return squares[0]


def expected_total(partials: np.ndarray) -> np.ndarray:
    """The first floats of the rows, added in ascending order."""
    total = np.float32(0.0)
    with np.errstate(all="ignore"):
        for value in partials.reshape(STATS_ROWS, 8)[:, 0]:
            total = np.float32(total + value)
    return np.array([total], np.float32)


def adam_cases(
    grads: Sequence[str], lows: Sequence[str | None], sizes: Sequence[int], cores: Sequence[int]
) -> Iterator[AdamCase]:
    """Every dtype pair, size and number of cores; special values, offsets and skips on some of them."""
    for grad in grads:
        for low in lows:
            for position, length in enumerate(sizes):
                for count in cores:
                    kind = "special" if (position + count) % 3 == 0 else "normal"
                    yield AdamCase(grad, low, length, count, 1 + position, 0.0, kind, position % 5)
            for found in (1.0, np.inf, np.nan, 1e-45):
                yield AdamCase(grad, low, 5000, 8, found_inf=found)
            yield AdamCase(grad, low, 5000, 8, found_inf=-0.0)
            yield AdamCase(grad, low, 0, 8)


def stats_cases(dtypes: Sequence[str], sizes: Sequence[int], cores: Sequence[int]) -> Iterator[StatsCase]:
    """Every dtype, size and number of cores; special values and offsets on some of them."""
    for dtype in dtypes:
        for position, length in enumerate((0, *sizes)):
            for count in cores:
                kind = "special" if (position + count) % 3 == 0 else "normal"
                yield StatsCase(dtype, length, count, kind, position % 5)
        yield StatsCase(dtype, 3 * STATS_TILE * 70 + 5, 70)
