"""Which ranks share the parameters of a bucket."""

from __future__ import annotations

from dataclasses import dataclass

from ms_zero.comm import Group


@dataclass(frozen=True)
class Groups:
    """Who shares what.

    Attributes:
        shard: ranks that see different data and own one chunk each.
        replica: ranks that own the same chunk and see different data (HSDP); of size 1 without replicas.
        experts: the same for parameters that ranks which see different data have cut between them (expert
            parallelism): those of `shard` and of `replica` that hold the same part. None: there are none.
    """

    shard: Group
    replica: Group
    experts: Groups | None = None

    def __post_init__(self) -> None:
        # Chunks of experts have to lie in the shard group exactly once, so that a sum over it is the whole.
        assert self.experts is None or set(self.experts.shard.ranks) <= set(self.shard.ranks), self

    @property
    def num_ranks(self) -> int:
        """Ranks that see different data."""
        return self.shard.size * self.replica.size
