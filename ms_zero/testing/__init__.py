"""Tools for tests: worker processes without a scheduler."""

from ms_zero.testing.workers import WorkerError, run_workers

__all__ = ["WorkerError", "run_workers"]
