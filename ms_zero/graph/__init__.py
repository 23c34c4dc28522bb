"""The graph engine: MindSpore's compiled path from the config, models and checkpoints of the eager one."""

from ms_zero.graph.given import Operator
from ms_zero.graph.own import Arrangement, ParallelStep, parallelise
from ms_zero.graph.step import GraphStep, build_step
from ms_zero.parallel import Column, Row, Vocabulary

__all__ = [
    "Arrangement",
    "Column",
    "GraphStep",
    "Operator",
    "ParallelStep",
    "Row",
    "Vocabulary",
    "build_step",
    "parallelise",
]
