"""Initial values of parameters, the same in every layout.

Element i of parameter `name` depends only on (seed, name, i): a shard is initialised without the rest.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_zero import rng


@dataclass(frozen=True)
class Normal:
    """Independent normal values with mean 0 and standard deviation `std`."""

    std: float


@dataclass(frozen=True)
class Ones:
    """All ones."""


@dataclass(frozen=True)
class Zeros:
    """All zeros."""


InitRule = Normal | Ones | Zeros


@dataclass(frozen=True)
class ParameterRule:
    """What a layer declares about one of its own parameters.

    init: its initial values. decay: whether weight decay applies (matrices of products; not norms, biases and
    embeddings).
    """

    init: InitRule
    decay: bool


def _rules(model: nn.Cell) -> Iterator[tuple[str, ParameterRule]]:
    """Yield (logical name, rule) of each parameter, a shared one under its first name only."""
    owners = {
        f"{path}.{own}" if path else own: rule
        for path, cell in model.cells_and_names()
        for own, rule in getattr(cell, "parameter_rules", {}).items()
    }
    for name, _ in model.parameters_and_names():
        assert name in owners, f"parameter {name} belongs to a layer without parameter_rules"
        yield name, owners[name]


def init_rules(model: nn.Cell) -> dict[str, InitRule]:
    """Return the initialisation rule of each parameter by logical name."""
    return {name: rule.init for name, rule in _rules(model)}


def decay_names(model: nn.Cell) -> set[str]:
    """Return the logical names of the parameters that weight decay applies to."""
    return {name for name, rule in _rules(model) if rule.decay}


def initial_values(
    rule: InitRule, name: str, shape: tuple[int, ...], seed: int, start: int, stop: int
) -> np.ndarray:
    """Return elements start ... stop-1 (row-major) of the initial value of parameter `name`, float32.

    Any slice has the bits of the same slice of the whole: initial_values(..., 0, prod(shape)).
    """
    assert 0 <= start <= stop <= math.prod(shape), (name, shape, start, stop)
    if isinstance(rule, Ones):
        return np.ones(stop - start, np.float32)
    if isinstance(rule, Zeros):
        return np.zeros(stop - start, np.float32)
    return rng.normal(seed, name, start, stop) * np.float32(rule.std)


def initialise(model: nn.Cell, seed: int) -> None:
    """Fill every parameter of a single-device model with its initial value, allocating storage as needed."""
    rules = init_rules(model)
    for name, parameter in model.parameters_and_names():
        shape = tuple(parameter.shape)
        values = initial_values(rules[name], name, shape, seed, 0, math.prod(shape))
        _set(parameter, Tensor(values.reshape(shape)))


def _set(parameter: Parameter, value: Tensor) -> None:
    # A parameter on the meta device gets its first storage. Later only set_data reaches compiled graphs.
    if parameter.is_meta:
        parameter.data = value
    else:
        parameter.set_data(value)


def count_parameters(model: nn.Cell) -> int:
    """Return the number of elements of all parameters, shared ones once."""
    return sum(math.prod(parameter.shape) for _, parameter in model.parameters_and_names())
