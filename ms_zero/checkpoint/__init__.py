"""Topology-free checkpoints: logical tensor names, global shapes and offsets; loads in any layout.

A checkpoint is a directory of safetensors files and a manifest, committed by one atomic rename. Needs numpy
only.
"""

from ms_zero.checkpoint.directory import latest, prune
from ms_zero.checkpoint.layout import Shard
from ms_zero.checkpoint.reader import Checkpoint, open_checkpoint
from ms_zero.checkpoint.save import SaveError, save

__all__ = ["Checkpoint", "SaveError", "Shard", "latest", "open_checkpoint", "prune", "save"]
