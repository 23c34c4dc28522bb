"""How a node learns that the job has ended elsewhere: the scheduler on node 0 no longer listens.

MindSpore's workers do not notice the loss of the scheduler themselves; they would wait for a peer that is
gone until their time-outs. The scheduler leaves last, so while local workers run, its absence is a failure.
"""

import socket
import time

_CONNECT_TIMEOUT_S = 2.0


class SchedulerProbe:
    """Knocks at the scheduler's port now and then; gone after ``patience`` refusals in a row.

    Probing begins once ``start`` is called: before the cluster stands, the scheduler may not be up yet.
    """

    def __init__(self, address: str, port: int, *, interval_s: float = 2.0, patience: int = 2) -> None:
        self._target = (address, port)
        self._interval_s = interval_s
        self._patience = patience
        self._next_at: float | None = None
        self._refusals = 0

    def start(self) -> None:
        """Begin to probe; later calls change nothing."""
        if self._next_at is None:
            self._next_at = time.monotonic()

    def gone(self) -> bool:
        """Whether the scheduler has been out of reach for long enough; returns at once between probes."""
        now = time.monotonic()
        if self._next_at is None or now < self._next_at:
            return False
        self._next_at = now + self._interval_s
        try:
            socket.create_connection(self._target, timeout=_CONNECT_TIMEOUT_S).close()
            self._refusals = 0
        except OSError:
            self._refusals += 1
        return self._refusals >= self._patience
