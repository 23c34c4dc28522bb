"""Techniques that cut a model between ranks, one a file; each is applied to a plain model."""

from ms_zero.parallel.context import ContextPart, RingAttention, UlyssesAttention, cut_context
from ms_zero.parallel.expert import ExpertDispatcher, split_experts
from ms_zero.parallel.placement import Box, Placement, Placements, Replicas, split_evenly
from ms_zero.parallel.sequence import SplitSequence
from ms_zero.parallel.styles import (
    Column,
    Cut,
    Enter,
    Inside,
    OwnTokens,
    Plan,
    Region,
    Row,
    Style,
    Vocabulary,
    parallelize,
)
from ms_zero.parallel.tensor import Border, VocabularyCrossEntropySum, WholeSequence

__all__ = [
    "Border",
    "Box",
    "Column",
    "ContextPart",
    "Cut",
    "Enter",
    "ExpertDispatcher",
    "Inside",
    "OwnTokens",
    "Placement",
    "Placements",
    "Plan",
    "Region",
    "Replicas",
    "RingAttention",
    "Row",
    "SplitSequence",
    "Style",
    "UlyssesAttention",
    "Vocabulary",
    "VocabularyCrossEntropySum",
    "WholeSequence",
    "cut_context",
    "parallelize",
    "split_evenly",
    "split_experts",
]
