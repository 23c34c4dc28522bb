"""A world of ranks as threads, with an exchange that really goes through JSON."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from ms_zero.checkpoint import save


class World:
    """`run` calls a function once per rank and returns, per rank, its result or the exception it raised."""

    def __init__(self, size):
        self.size = size
        self._meet = threading.Barrier(size, timeout=20)
        self._posted = [None] * size

    def exchange(self, rank, obj):
        self._posted[rank] = json.dumps(obj, allow_nan=False)
        self._meet.wait()
        everything = [json.loads(text) for text in self._posted]
        self._meet.wait()
        return everything

    def run(self, function):
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(function, rank) for rank in range(self.size)]
            return [future.exception() or future.result() for future in futures]

    def save_rank(self, root, step, rank, shards, state):
        """The part of one rank in a save; for use inside `run`."""
        return save(
            root,
            step,
            shards,
            state,
            rank=rank,
            world_size=self.size,
            exchange=lambda obj: self.exchange(rank, obj),
            barrier=self._meet.wait,
        )

    def save(self, root, step, shards_of_rank, state, roots=None):
        """Save with every rank; `roots` and a list of states give each rank its own."""
        roots = roots or [root] * self.size
        states = state if isinstance(state, list) else [state] * self.size

        def one(rank):
            return self.save_rank(roots[rank], step, rank, shards_of_rank[rank], states[rank])

        return self.run(one)


@pytest.fixture
def world():
    return World
