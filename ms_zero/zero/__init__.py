"""ZeRO: flat buckets, sharding stages 0 to 3, units and their windows."""

from ms_zero.zero.api import ShardedModel, shard
from ms_zero.zero.nvme import NvmeStates
from ms_zero.zero.sharded import Options
from ms_zero.zero.states import HostStates
from ms_zero.zero.units import wrap_blocks, wrap_classes, wrap_size

__all__ = [
    "HostStates",
    "NvmeStates",
    "Options",
    "ShardedModel",
    "shard",
    "wrap_blocks",
    "wrap_classes",
    "wrap_size",
]
