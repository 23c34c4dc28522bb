"""A group of ranks that communicate."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Group:
    """Ranks that take part in a collective, as one member sees them.

    Made by :meth:`ms_zero.comm.Communicator.new_group`; groups are never created by non-members.
    """

    name: str
    """Label used by counters and messages ("dp_shard", "world", ...)."""
    ranks: tuple[int, ...]
    """World ranks in ascending order; collectives concatenate and sum in this order."""
    index: int
    """Position of this process in `ranks`."""
    handle: str = field(default="", repr=False)
    """The framework's name of the group; empty for a group of one."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)
