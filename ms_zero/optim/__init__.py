"""Optimizers over sharded models, clipping and learning-rate schedules."""

from ms_zero.optim.optimizer import SGD, AdamW, GroupOptions
from ms_zero.optim.schedule import Schedule

__all__ = ["SGD", "AdamW", "GroupOptions", "Schedule"]
