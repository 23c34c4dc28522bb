"""Activation memory: recompute, offload, compression and the measuring of what backward keeps."""

from ms_zero.memory.apply import Applied, apply_recompute, find_blocks
from ms_zero.memory.compress import compress_activations
from ms_zero.memory.construct import Replacement
from ms_zero.memory.offload import offload_activations
from ms_zero.memory.packing import Ledger, PackedActivations
from ms_zero.memory.recompute import ReplayedState, recompute
from ms_zero.memory.saved import SavedTensor, live_tensors, measure_saved

__all__ = [
    "Applied",
    "Ledger",
    "PackedActivations",
    "Replacement",
    "ReplayedState",
    "SavedTensor",
    "apply_recompute",
    "compress_activations",
    "find_blocks",
    "live_tensors",
    "measure_saved",
    "offload_activations",
    "recompute",
]
