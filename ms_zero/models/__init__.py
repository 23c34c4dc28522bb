"""Plain single-device models."""

from ms_zero.models.dropout import Dropout, DropoutPosition, DropoutState
from ms_zero.models.gpt import GPT
from ms_zero.models.init import count_parameters, decay_names, init_rules, initial_values, initialise
from ms_zero.models.llama import Llama

__all__ = [
    "GPT",
    "Dropout",
    "DropoutPosition",
    "DropoutState",
    "Llama",
    "count_parameters",
    "decay_names",
    "init_rules",
    "initial_values",
    "initialise",
]
