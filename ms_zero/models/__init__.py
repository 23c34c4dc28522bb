"""Plain single-device models."""

from ms_zero.models.decoder import MoEDecoder
from ms_zero.models.dropout import Dropout, DropoutPosition, DropoutState
from ms_zero.models.gpt import GPT
from ms_zero.models.init import count_parameters, decay_names, init_rules, initial_values, initialise
from ms_zero.models.llama import Llama
from ms_zero.models.moe import Mixture, take_loads
from ms_zero.models.routing import Rules, updated_bias

__all__ = [
    "GPT",
    "Dropout",
    "DropoutPosition",
    "DropoutState",
    "Llama",
    "Mixture",
    "MoEDecoder",
    "Rules",
    "count_parameters",
    "decay_names",
    "init_rules",
    "initial_values",
    "initialise",
    "take_loads",
    "updated_bias",
]
