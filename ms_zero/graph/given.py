"""Strategies of a model that knows nothing of them: pattern of paths -> how that part is cut. Example::

    strategies = {
        "model.embed": Vocabulary(),
        "model.layers.*.up": Column(),
        "model.layers.*.down": Row(),
        "model.layers.*.norm.layer_norm": Operator((("dp", None), (None,), (None,)), by_layout=False),
    }

A path names a Cell, or an operator that a Cell has as an attribute. The styles of Cells are those of the
eager engine's plans (`ms_zero.parallel`); nothing has to enter or leave a region here, because the compiler
inserts what makes neighbours fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from mindspore import nn
from mindspore.ops import Primitive

from ms_zero.errors import UserError
from ms_zero.graph.strategies import Grid
from ms_zero.parallel.styles import Column, Row, Vocabulary, matches

#: Axes that cut one dim of a tensor, outermost first: names of axes, or None.
Cut = str | tuple[str, ...] | None

_AXES = ("dp", "cp", "tp")
_ROWS = ("dp", "cp")


@dataclass(frozen=True)
class Operator:
    """An operator and how its tensors are cut.

    Attributes:
        inputs: for each input tensor, for each of its dims, the axes that cut it: "dp" (the ranks with
            different samples, replicas included), "cp", "tp", a tuple of them, or None. A 0-d input is ().
        outputs: of its results, where the operator takes that; (): as the operator makes them.
        by_layout: whether MindSpore is told the axes by name (``Layout``). Operators for which it only takes
            numbers of parts ("does not support config layout") need False.
    """

    inputs: tuple[tuple[Cut, ...], ...]
    outputs: tuple[tuple[Cut, ...], ...] = ()
    by_layout: bool = True


Strategy = Column | Row | Vocabulary | Operator


def apply_strategies(network: nn.Cell, strategies: Mapping[str, Strategy], grid: Grid) -> None:
    """Give the operators of a network their strategies, in place.

    Args:
        network: any Cell.
        strategies: a pattern (``*`` and ``?`` within one name) has to match, a path may match one pattern.
        grid: the devices of a pipeline stage.

    Raises:
        UserError: a strategy does not fit the model or the grid.
    """
    cells = dict(network.cells_and_names())
    operators = dict(operators_of(cells))
    taken: dict[str, str] = {}
    for pattern, strategy in strategies.items():
        found = operators if isinstance(strategy, Operator) else cells
        paths = [path for path in found if path and matches(path, pattern)]
        if not paths:
            raise UserError(_unmatched(pattern, strategy, cells, operators))
        for path in paths:
            if path in taken:
                raise UserError(f"graph: strategies: {path} matches {taken[path]} and {pattern}")
            taken[path] = pattern
            _apply(path, found[path], strategy, grid)


def operators_of(cells: Mapping[str, nn.Cell]) -> Iterator[tuple[str, Primitive]]:
    """Path and operator of every operator that a Cell has as an attribute."""
    for path, cell in cells.items():
        for name, value in vars(cell).items():
            if isinstance(value, Primitive):
                yield (f"{path}.{name}" if path else name), value


def uses_axis(strategies: Mapping[str, Strategy], axis: str) -> bool:
    """Whether any strategy cuts over an axis."""
    for strategy in strategies.values():
        if not isinstance(strategy, Operator):
            if axis == "tp":
                return True
            continue
        cuts = [cut for tensor in (*strategy.inputs, *strategy.outputs) for cut in tensor]
        if any(axis in _axes_of(cut) for cut in cuts):
            return True
    return False


def _apply(path: str, part: nn.Cell | Primitive, strategy: Strategy, grid: Grid) -> None:
    if isinstance(strategy, Operator):
        _shard(path, part, strategy, grid)
    elif isinstance(strategy, Vocabulary):
        _cut_table(path, part, grid)
    else:
        _cut_linear(path, part, strategy, grid)


def _shard(path: str, operator: Primitive, strategy: Operator, grid: Grid) -> None:
    convert = partial(_layout if strategy.by_layout else _numbers, path=path, grid=grid)
    inputs = tuple(convert(tensor) for tensor in strategy.inputs)
    outputs = tuple(convert(tensor) for tensor in strategy.outputs) or None
    try:
        operator.shard(inputs, outputs)
    except (TypeError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise UserError(f"graph: strategies: {path}: MindSpore refuses the strategy: {reason}") from None


def _layout(tensor: tuple[Cut, ...], *, path: str, grid: Grid) -> object:
    _check(tensor, path)
    return grid.layout(*("None" if not _axes_of(cut) else cut for cut in tensor))


def _numbers(tensor: tuple[Cut, ...], *, path: str, grid: Grid) -> tuple[int, ...]:
    _check(tensor, path)
    return tuple(grid.parts(_axes_of(cut)) for cut in tensor)


def _check(tensor: tuple[Cut, ...], path: str) -> None:
    used = [axis for cut in tensor for axis in _axes_of(cut)]
    wrong = next((axis for axis in used if axis not in _AXES), None)
    if wrong is not None:
        raise UserError(f"graph: strategies: {path}: {wrong!r} is no axis: expected dp, cp, tp or None")
    double = next((axis for axis in used if used.count(axis) > 1), None)
    if double is not None:
        raise UserError(f"graph: strategies: {path}: {double} cuts two dims of one tensor: use it once")


def _axes_of(cut: Cut) -> tuple[str, ...]:
    if cut is None:
        return ()
    return (cut,) if isinstance(cut, str) else tuple(cut)


def _cut_linear(path: str, cell: nn.Cell, style: Column | Row, grid: Grid) -> None:
    """Cut a Dense: Column some of its output features, Row some of its input features."""
    if not isinstance(cell, nn.Dense):
        raise UserError(
            f"graph: strategies: {path} ({type(cell).__name__}) is no nn.Dense: give its operators "
            "strategies, or let sharding propagate"
        )
    is_column = isinstance(style, Column)
    size = cell.weight.shape[0 if is_column else 1]
    whole = style.blocks if is_column and style.blocks is not None else size
    if size % grid.tp or whole % grid.tp:
        kind = "output" if is_column else "input"
        raise UserError(
            f"graph: strategies: {path}: tp {grid.tp} does not divide its {whole} {kind} features"
        )
    rows, wide = grid.parts(_ROWS), grid.tp if is_column else 1
    if is_column:
        cell.matmul.shard((grid.layout(_ROWS, "None"), grid.layout("tp", "None")))
    else:
        cell.matmul.shard(
            (grid.layout(_ROWS, "tp"), grid.layout("None", "tp")), (grid.layout(_ROWS, "None"),)
        )
    if cell.has_bias:
        cell.bias_add.shard(((rows, wide), (wide,)))
    for _, operator in _activation(cell):
        operator.shard(((rows, wide),))


def _activation(cell: nn.Dense) -> Iterator[tuple[str, Primitive]]:
    """The operators of the activation of a Dense; each maps one tensor, element by element."""
    if isinstance(cell.activation, nn.Cell):
        yield from operators_of(dict(cell.activation.cells_and_names()))
    elif isinstance(cell.activation, Primitive):
        yield "", cell.activation


def _cut_table(path: str, cell: nn.Cell, grid: Grid) -> None:
    if not isinstance(cell, nn.Embedding) or cell.use_one_hot:
        raise UserError(
            f"graph: strategies: {path} ({type(cell).__name__}) is no nn.Embedding with a gather: give its "
            "operators a strategy of their own"
        )
    if cell.vocab_size % grid.tp:
        raise UserError(f"graph: strategies: {path}: tp {grid.tp} does not divide its {cell.vocab_size} rows")
    rows = grid.parts(_ROWS)
    cell.gather.shard(((grid.tp, 1), (rows,)), ((rows, 1),))


def _unmatched(
    pattern: str, strategy: Strategy, cells: Mapping[str, nn.Cell], operators: Mapping[str, Primitive]
) -> str:
    kind, found = ("operator", operators) if isinstance(strategy, Operator) else ("Cell", cells)
    near = get_close_matches(pattern, [path for path in found if path], n=3, cutoff=0.4)
    hint = f"; near are {', '.join(near)}" if near else ""
    return f"graph: strategies: pattern {pattern} matches no {kind} of the network{hint}"
