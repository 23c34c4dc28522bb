"""Run configs: typed frozen sections, strict loading, rules with ids.

`load_config` is the way in. Sections hold concrete values only; what is written as `auto` is resolved while
loading. Imports neither mindspore nor numpy.
"""

from ms_zero.config.describe import describe, describe_all
from ms_zero.config.explanations import Explanation
from ms_zero.config.findings import ConfigError, Finding
from ms_zero.config.load import Checked, Loaded, check_config, load_config
from ms_zero.config.mesh import mesh_of
from ms_zero.config.render import dump, render_effective
from ms_zero.config.rules import EXPLANATIONS, RULES, Rule
from ms_zero.config.runnable import require_runnable
from ms_zero.config.schema import (
    CheckpointConfig,
    DataConfig,
    DataPart,
    GPTConfig,
    HardwareConfig,
    LatentConfig,
    LlamaConfig,
    MemoryConfig,
    ModelConfig,
    MoEConfig,
    MonitorConfig,
    OffloadConfig,
    OptimConfig,
    ParallelConfig,
    PrecisionConfig,
    RopeScaling,
    RunConfig,
    TrainConfig,
)

__all__ = [
    "EXPLANATIONS",
    "RULES",
    "Checked",
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "DataPart",
    "Explanation",
    "Finding",
    "GPTConfig",
    "HardwareConfig",
    "LatentConfig",
    "LlamaConfig",
    "Loaded",
    "MemoryConfig",
    "MoEConfig",
    "ModelConfig",
    "MonitorConfig",
    "OffloadConfig",
    "OptimConfig",
    "ParallelConfig",
    "PrecisionConfig",
    "RopeScaling",
    "Rule",
    "RunConfig",
    "TrainConfig",
    "check_config",
    "describe",
    "describe_all",
    "dump",
    "load_config",
    "mesh_of",
    "render_effective",
    "require_runnable",
]
