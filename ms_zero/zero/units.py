"""Which cells are unsharded together: units and the wrap policies that choose them.

A unit is one or more cells whose parameters share a window: they are whole from before the first of its cells
runs forward until the last has, and again during backward. What a wrap policy leaves over belongs to the root
unit, whose window is the whole forward and the whole backward.

A parameter belongs to the innermost wrapped cell around it. One that lies in several wrapped cells (a tied
head, a cell shared by two blocks) merges their units; one that also lies outside all of them belongs to the
root unit together with the rest of those units.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from mindspore import Parameter, nn

#: (path of a cell, the cell) -> whether the cell is a unit.
Wrap = Callable[[str, nn.Cell], bool]


@dataclass(frozen=True)
class UnitSpec:
    """One unit: a name for messages, its cells, and its parameters by logical name in definition order."""

    name: str
    cells: tuple[nn.Cell, ...]
    params: tuple[str, ...]


def wrap_blocks(root: nn.Cell, *, leaves: bool = False) -> Wrap:
    """Wrap the repeated blocks of a model: the equal-class members of its outermost cell lists.

    Args:
        root: the model.
        leaves: also wrap every cell outside the blocks that holds parameters itself (an embedding, a head),
            so that it is whole only while it runs; for models that use parameters through their cells only.
    """
    blocks = {id(block) for block in _repeated_blocks(root)}
    inside = {id(cell) for block in _repeated_blocks(root) for _, cell in block.cells_and_names()}

    def wrap(path: str, cell: nn.Cell) -> bool:
        return id(cell) in blocks or (leaves and id(cell) not in inside and bool(_own_parameters(cell)))

    return wrap


def wrap_classes(*classes: type[nn.Cell]) -> Wrap:
    """Wrap every cell of one of the classes."""
    return lambda path, cell: isinstance(cell, classes)


def wrap_size(root: nn.Cell, min_elements: int, *, uncalled: Iterable[nn.Cell] = ()) -> Wrap:
    """Wrap bottom-up every cell that has at least ``min_elements`` parameter elements not yet wrapped.

    Args:
        root: the model.
        min_elements: of a unit.
        uncalled: cells that only hold others, beside lists and dicts of cells: what is not called has no
            window.
    """
    chosen: set[int] = set()
    seen: set[int] = set()
    holders = {id(root), *map(id, uncalled)}

    def visit(cell: nn.Cell) -> int:
        own = [param for param in _own_parameters(cell) if id(param) not in seen]
        seen.update(id(param) for param in own)
        numel = sum(prod(param.shape) for param in own) + sum(visit(child) for child in cell.cells())
        is_called = id(cell) not in holders and not isinstance(cell, nn.CellList | nn.CellDict)
        if numel >= min_elements and is_called:
            chosen.add(id(cell))
            return 0
        return numel

    visit(root)
    return lambda path, cell: id(cell) in chosen


def plan_units(root: nn.Cell, wrap: Wrap, leave_out: Collection[str] = ()) -> list[UnitSpec]:
    """Divide the parameters of a model into units, in definition order of their first parameter.

    Args:
        root: the model.
        wrap: which cells are units.
        leave_out: names of parameters that belong to no unit.
    """
    params = {name: param for name, param in root.parameters_and_names() if name not in leave_out}
    names = {id(param): name for name, param in params.items()}
    cells = {path: cell for path, cell in root.cells_and_names() if path and wrap(path, cell)}
    owners: dict[str, set[str]] = {}  # parameter -> paths of the innermost wrapped cells; "" is the root
    for cell, owner in _with_owners(root, {id(cell): path for path, cell in cells.items()}):
        for param in _own_parameters(cell):
            if id(param) in names:
                owners.setdefault(names[id(param)], set()).add(owner)
    unit_of = _merge(owners.values())
    members: dict[str, list[str]] = {}
    for name in names.values():
        members.setdefault(unit_of[min(owners[name])], []).append(name)
    return [_unit(root, cells, unit_of, unit, params) for unit, params in members.items()]


def _unit(
    root: nn.Cell, cells: dict[str, nn.Cell], unit_of: dict[str, str], unit: str, params: list[str]
) -> UnitSpec:
    if unit == "":
        return UnitSpec("the root", (root,), tuple(params))
    paths = [path for path in cells if unit_of.get(path) == unit]
    return UnitSpec(" + ".join(paths), tuple(cells[path] for path in paths), tuple(params))


def _merge(groups: Iterable[Collection[str]]) -> dict[str, str]:
    """Union of paths that share a parameter; a union with the root ("") is the root, which sorts first."""
    leader: dict[str, str] = {}

    def find(path: str) -> str:
        while leader.setdefault(path, path) != path:
            path = leader[path]
        return path

    for paths in groups:
        first, *others = sorted(find(path) for path in paths)
        for other in others:
            leader[other] = first
    return {path: find(path) for path in leader}


def _with_owners(root: nn.Cell, wrapped: Mapping[int, str]) -> Iterator[tuple[nn.Cell, str]]:
    """Every cell with the path of the innermost wrapped cell around it; a shared cell once for each."""
    seen, waiting = set(), [(root, "")]
    while waiting:
        cell, owner = waiting.pop()
        owner = wrapped.get(id(cell), owner)
        if (id(cell), owner) not in seen:
            seen.add((id(cell), owner))
            yield cell, owner
            waiting += [(child, owner) for child in cell.cells()]


def _own_parameters(cell: nn.Cell) -> list[Parameter]:
    """Parameters held by the cell itself, not by its children."""
    return [param for _, param in cell.parameters_and_names(expand=False)]


def _repeated_blocks(root: nn.Cell) -> list[nn.Cell]:
    """Members of the outermost lists of at least two cells of one class that hold parameters."""
    children = list(root.cells())
    if isinstance(root, nn.CellList | nn.SequentialCell) and _are_alike(children):
        return children
    return [block for child in children for block in _repeated_blocks(child)]


def _are_alike(cells: list[nn.Cell]) -> bool:
    # One class with different contents (a list of projections) counts too: units may have any sizes.
    same_class = len({type(cell) for cell in cells}) == 1
    return len(cells) > 1 and same_class and bool(list(cells[0].get_parameters()))
