"""Plain single-device models."""

from ms_zero.models.gpt import GPT
from ms_zero.models.init import count_parameters, decay_names, init_rules, initial_values, initialise

__all__ = ["GPT", "count_parameters", "decay_names", "init_rules", "initial_values", "initialise"]
