"""The graph engine: MindSpore's compiled path from the config, models and checkpoints of the eager one."""

from ms_zero.graph.step import GraphStep, build_step

__all__ = ["GraphStep", "build_step"]
