"""Counter-based random numbers: element i of a stream depends only on (seed, name, i).

Any slice of a stream can be generated alone and is bit-identical to that slice of the whole, so each rank
draws only its own part and no layout changes a value. The bits are Philox4x64-10 (Salmon et al., "Parallel
Random Numbers: As Easy as 1, 2, 3", SC 2011), keyed by a hash of (seed, name).

Everything after the bits uses only operations that IEEE 754 rounds exactly (add, subtract, multiply, divide,
square root, scaling by powers of two): no libm, hence the same bits on every platform.
"""

import hashlib
from collections.abc import Callable

import numpy as np

_WORDS = 4  # 64-bit words per Philox counter value
_CHUNK = 1 << 14  # elements in flight: the scratch arrays stay in the cache


def uniform_bits(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Elements `start`..`stop` of the stream (seed, name): uint64[stop - start], uniform over all values."""
    return _generator(seed, name, start, stop).random_raw(stop - start)


def uniform(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """float32[stop - start], uniform over the multiples of 2**-24 in [0, 1)."""
    return _convert(seed, name, start, stop, lambda bits: (bits >> np.uint64(40)) * 2.0**-24)


def normal(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """float32[stop - start] of the standard normal distribution, one stream element a value.

    The inverse of the normal distribution function is evaluated in float64 by the rational approximations of
    Wichura's PPND7 ("Algorithm AS 241", Applied Statistics 37, 1988), relative error about 1e-7. The largest
    magnitude is 8.2, that of probability 2**-53.
    """
    return _convert(seed, name, start, stop, _inverse_normal)


def _generator(seed: int, name: str, start: int, stop: int) -> np.random.Philox:
    """The stream (seed, name), about to give element `start`."""
    assert 0 <= start <= stop, f"slice {start}:{stop} of stream {name!r}"
    digest = hashlib.sha256(f"ms_zero rng 1\0{seed}\0{name}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8")
    generator = np.random.Philox(key=key, counter=start // _WORDS)
    generator.random_raw(start % _WORDS)
    return generator


def _convert(
    seed: int, name: str, start: int, stop: int, convert: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """float32[stop - start]: `convert` applied to the bits, a chunk at a time."""
    generator = _generator(seed, name, start, stop)
    out = np.empty(stop - start, dtype=np.float32)
    for at in range(0, out.size, _CHUNK):
        part = out[at : at + _CHUNK]
        part[:] = convert(generator.random_raw(part.size))
    return out


def _inverse_normal(bits: np.ndarray) -> np.ndarray:
    # 52 bits plus a half: exact in float64, never 0 or 1, and symmetric about 1/2.
    probability = ((bits >> np.uint64(12)) + 0.5) * 2.0**-52
    centred = probability - 0.5
    value = centred * _ratio(0.180625 - centred * centred, _CENTRE_TOP, _CENTRE_BOTTOM)
    (tail,) = np.nonzero(np.abs(centred) > 0.425)
    depth = np.sqrt(-_log(np.minimum(probability[tail], 1.0 - probability[tail])))
    near = _ratio(depth - 1.6, _NEAR_TOP, _NEAR_BOTTOM)
    far = _ratio(depth - 5.0, _FAR_TOP, _FAR_BOTTOM)
    value[tail] = np.copysign(np.where(depth <= 5.0, near, far), centred[tail])
    return value


_CENTRE_TOP = (59.109374720, 159.29113202, 50.434271938, 3.3871327179)
_CENTRE_BOTTOM = (67.187563600, 78.757757664, 17.895169469, 1.0)
_NEAR_TOP = (0.17023821103, 1.3067284816, 2.7568153900, 1.4234372777)
_NEAR_BOTTOM = (0.12021132975, 0.73700164250, 1.0)
_FAR_TOP = (0.017337203997, 0.42868294337, 3.0812263860, 6.6579051150)
_FAR_BOTTOM = (0.012258202635, 0.24197894225, 1.0)


def _ratio(x: np.ndarray, top: tuple[float, ...], bottom: tuple[float, ...]) -> np.ndarray:
    return _polynomial(x, top) / _polynomial(x, bottom)


def _polynomial(x: np.ndarray, coefficients: tuple[float, ...]) -> np.ndarray:
    """Horner's rule, highest power first; multiply and add are separate so that nothing is fused."""
    value = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        value += coefficient
        value *= x
    value += coefficients[-1]
    return value


def _log(x: np.ndarray) -> np.ndarray:
    """Logarithm from exact operations: x = m 2**e, log m = 2 atanh((m - 1) / (m + 1)); error 1e-11."""
    mantissa, exponent = np.frexp(x)
    ratio = (mantissa - np.sqrt(0.5)) / (mantissa + np.sqrt(0.5))  # |ratio| <= 0.172
    series = tuple(1.0 / k for k in range(13, 0, -2))
    return (exponent - 0.5) * 0.6931471805599453 + 2.0 * ratio * _polynomial(ratio * ratio, series)
