"""Pipeline parallelism. Empty on purpose: `schedule` must be importable without mindspore."""
