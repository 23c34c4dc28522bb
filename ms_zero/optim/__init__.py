"""Optimizers on flat fp32 tensors, clipping and learning-rate schedules."""
