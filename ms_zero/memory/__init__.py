"""Activation memory: recompute, offload, compression and the measuring of what backward keeps."""

from ms_zero.memory.apply import Applied, apply_recompute, find_blocks
from ms_zero.memory.recompute import Recomputed, ReplayedState, recompute

__all__ = ["Applied", "Recomputed", "ReplayedState", "apply_recompute", "find_blocks", "recompute"]
