"""A shuffled order that is computed where it is asked for, not stored."""

import hashlib
import math
from typing import Final

_ROUNDS: Final = 8
_MASK: Final = (1 << 64) - 1


class Shuffle:
    """A pseudo-random order of ``0 .. n-1``; each place costs microseconds and no memory, however large n is.

    Places are pairs (left, right) of a grid of at least n cells; in each round one half moves by a hash of
    the other, so the whole is a permutation of the grid: a Feistel network by addition. A cell beyond n is
    sent on until it is in range (Black & Rogaway, "Ciphers with arbitrary finite domains", 2002).
    """

    def __init__(self, seed: int, name: str, n: int) -> None:
        """The order of stream `name` of a seed; `n` is at least 1."""
        assert n >= 1, f"order of {n}"
        self._n = n
        self._rows = math.isqrt(n - 1) + 1
        self._columns = -(-n // self._rows)
        digest = hashlib.sha512(f"ms_zero shuffle 1\0{seed}\0{name}".encode()).digest()
        self._keys = [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]

    def __call__(self, place: int) -> int:
        """What stands at a place, ``0 <= place < n``."""
        assert 0 <= place < self._n, f"place {place} of {self._n}"
        place = self._step(place)
        while place >= self._n:
            place = self._step(place)
        return place

    def _step(self, cell: int) -> int:
        left, right = divmod(cell, self._columns)
        for key in range(0, _ROUNDS, 2):
            left = (left + _mix(right ^ self._keys[key])) % self._rows
            right = (right + _mix(left ^ self._keys[key + 1])) % self._columns
        return left * self._columns + right


def _mix(x: int) -> int:
    """The finaliser of SplitMix64 on 64 bits (Steele, Lea & Flood, "Fast splittable generators", 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
