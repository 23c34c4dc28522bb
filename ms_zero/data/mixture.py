"""Weighted mixtures: one sequence of samples from several, in fixed proportions at every moment.

Which part sample s comes from does not depend on chance. After any number n of samples, a part of share w has
given between floor(n w) and ceil(n w) of them. The pattern repeats after a period, so the part and the place
in it are found for any s by one look into a table.
"""

from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm
from typing import Final

import numpy as np

from ms_zero.data.loader import SampleSequence
from ms_zero.data.packing import Sample
from ms_zero.errors import UserError

MAX_PERIOD: Final = 1 << 16
"""Samples after which the pattern repeats, at most. Weights in simple ratios, such as 0.7 : 0.2 : 0.1, have a
shorter period and are met exactly; others are rounded to multiples of 1 / 65536 of the whole."""


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """How many samples of a period each part gives, in the ratio of the weights.

    A weight counts as the decimal number that is written in the config: 0.1 is one tenth.

    Raises:
        UserError: a part would give none.
    """
    exact = [Fraction(repr(float(weight))) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    shares = [int(weight * scale) for weight in exact]
    divisor = gcd(*shares)
    shares = [share // divisor for share in shares]
    if sum(shares) > MAX_PERIOD:
        shares = _rounded(shares)
    for number, share in enumerate(shares):
        if share == 0:
            raise UserError(
                f"data.parts[{number}].weight={weights[number]} is less than 1/{MAX_PERIOD} of all weights: "
                "raise it or leave the part out"
            )
    return tuple(shares)


def mixing_pattern(shares: Sequence[int]) -> np.ndarray:
    """The part of each sample of one period, uint16[sum(shares)].

    The j-th sample of a part with s of P samples may come from place ``floor(j P / s)`` on and must come
    before ``ceil((j + 1) P / s)``: keeping to these windows is the same as keeping every count within one
    sample of its share (Baruah et al., "Proportionate progress", 1996). Earliest deadline first finds such an
    order whenever there is one, and there always is.
    """
    period = sum(shares)
    given = [0] * len(shares)
    pattern = np.empty(period, dtype=np.uint16)
    for place in range(period):
        chosen, earliest = -1, period + 1
        for part, share in enumerate(shares):
            if given[part] * period // share <= place:
                deadline = -(-(given[part] + 1) * period // share)
                if given[part] < share and deadline < earliest:
                    chosen, earliest = part, deadline
        assert place < earliest <= period, "no part may come or one is late"
        pattern[place] = chosen
        given[chosen] += 1
    return pattern


class MixtureLoader(SampleSequence):
    """Interleaves sequences by their weights. A part that ends starts over, in its own next order."""

    def __init__(
        self,
        parts: Sequence[SampleSequence],
        weights: Sequence[float],
        *,
        seq_len: int,
        seed: int,
        fingerprint: str,
        corpus: str = "",
    ) -> None:
        """Mix `parts`, at least one, with one weight each.

        Args:
            parts: what is mixed, in an order that counts.
            weights: positive; only their ratios matter.
            seq_len: positions per sample, the same in all parts.
            seed: of the parts, for the cursor.
            fingerprint: identity of parts and weights.
            corpus: where they come from, for messages.

        Raises:
            UserError: a weight is too small beside the others.
        """
        assert len(parts) == len(weights) > 0, f"{len(parts)} parts, {len(weights)} weights"
        super().__init__(seq_len=seq_len, seed=seed, fingerprint=fingerprint, corpus=corpus)
        self.parts = tuple(parts)
        self.shares = whole_shares(weights)
        self._pattern = mixing_pattern(self.shares)
        self._ranks = _ranks(self._pattern, len(parts))

    def __len__(self) -> int:
        """Samples of all parts together."""
        return sum(len(part) for part in self.parts)

    def locate(self, sample_number: int) -> tuple[int, int]:
        """(part, place in its sequence) of a place in the mixture."""
        periods, place = divmod(sample_number, self._pattern.size)
        part = int(self._pattern[place])
        return part, periods * self.shares[part] + int(self._ranks[place])

    def sample(self, sample_number: int) -> Sample:
        """The sample at a place in the mixture."""
        part, number = self.locate(sample_number)
        return self.parts[part].sample(number)


def _rounded(shares: Sequence[int]) -> list[int]:
    """Shares of MAX_PERIOD samples: rounded down, the rest to those that lost most."""
    total = sum(shares)
    rounded = [share * MAX_PERIOD // total for share in shares]
    lost = [share * MAX_PERIOD % total for share in shares]
    most = sorted(range(len(shares)), key=lambda part: (-lost[part], part))
    for part in most[: MAX_PERIOD - sum(rounded)]:
        rounded[part] += 1
    return rounded


def _ranks(pattern: np.ndarray, parts: int) -> np.ndarray:
    """For each place, how many earlier places of the period belong to the same part; int32."""
    ranks = np.empty(pattern.size, dtype=np.int32)
    for part in range(parts):
        (places,) = np.nonzero(pattern == part)
        ranks[places] = np.arange(places.size)
    return ranks
