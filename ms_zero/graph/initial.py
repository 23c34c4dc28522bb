"""Initial values of parameters that the compiler cuts: a rank makes its own parts, one after another.

Before compilation parameters are declared: a name, a shape, no storage. Afterwards each has the shape of the
rank's part. No rank ever holds a whole model, nor a whole parameter that is cut.
"""

from collections.abc import Iterable, Mapping
from math import prod

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from ms_zero._compat import declared_parameter
from ms_zero.models import init_rules, initial_values
from ms_zero.parallel.placement import Box, FlatValues


def declare(model: nn.Cell) -> None:
    """Take the storage of a model's parameters; names, shapes, dtypes and what is trained stay."""
    declared: dict[int, Parameter] = {}
    for _, cell in model.cells_and_names():
        for name, param in list(cell.parameters_and_names(expand=False)):
            if id(param) not in declared:
                declared[id(param)] = declared_parameter(param)
            cell.insert_param_to_cell(name, declared[id(param)], check_name_contain_dot=False)


def seeded_values(model: nn.Cell, seed: int) -> FlatValues:
    """(name, start, stop) -> initial values, which are the same in every layout; see `ms_zero.models`."""
    rules = init_rules(model)
    shapes = {name: tuple(param.shape) for name, param in model.parameters_and_names()}
    return lambda name, start, stop: initial_values(rules[name], name, shapes[name], seed, start, stop)


def fill(named: Iterable[tuple[str, Parameter]], boxes: Mapping[str, Box], values: FlatValues) -> None:
    """Give declared parameters the values of this rank's part.

    Args:
        named: logical name and parameter; those that have values keep them.
        boxes: name of a parameter -> what this rank holds of it; without an entry nothing.
        values: of whole parameters, fp32, asked for range by range.
    """
    for name, param in named:
        if param.has_init and param.name in boxes:
            assert param.dtype == ms.float32, (name, param.dtype)
            part = part_of(name, boxes[param.name], values)
            param.set_data(Tensor(part.reshape(param.shape)), slice_shape=True)
        assert not (param.has_init and param.sliced), f"{name}: held, but not known how it is cut"


def part_of(name: str, box: Box, values: FlatValues) -> np.ndarray:
    """The values of one part, flat; nothing else of the parameter is made."""
    part, at = np.empty(prod(box.shape), np.float32), 0
    for first, count in box.runs(0, part.size):
        part[at : at + count] = values(name, first, first + count)
        at += count
    return part
