"""What a rank sent, counted by operation and group."""

from __future__ import annotations

from collections import defaultdict


class Counters:
    """Logical bytes sent by this rank and number of calls, per (operation, group name).

    Bytes follow the ring algorithms, whatever the backend really does: with N members and a full tensor of
    S bytes, all_reduce sends 2 (N-1)/N S, all_gather and reduce_scatter (N-1)/N S, all_to_all what goes to
    others, broadcast S at the source, send S. A group of one sends nothing but is counted as a call.
    """

    def __init__(self) -> None:
        self.bytes: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.calls: defaultdict[tuple[str, str], int] = defaultdict(int)

    def record(self, op: str, group: str, num_bytes: int) -> None:
        """Add one call of `op` on the group named `group`."""
        self.bytes[op, group] += num_bytes
        self.calls[op, group] += 1

    def total_bytes(self, op: str | None = None, group: str | None = None) -> int:
        """Bytes over all entries that match (None matches all)."""
        return sum(n for (o, g), n in self.bytes.items() if op in (None, o) and group in (None, g))

    def total_calls(self, op: str | None = None, group: str | None = None) -> int:
        """Calls over all entries that match (None matches all)."""
        return sum(n for (o, g), n in self.calls.items() if op in (None, o) and group in (None, g))

    def reset(self) -> None:
        """Forget everything."""
        self.bytes.clear()
        self.calls.clear()
