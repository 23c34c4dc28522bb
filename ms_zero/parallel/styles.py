"""A plan says which cells of a plain model are cut, and how: pattern of cell paths -> style. Example::

    plan = {
        "blocks.*.mlp": Enter(),             # its argument enters a region
        "blocks.*.mlp.up": Column(),
        "blocks.*.mlp.down": Row(),          # and its result leaves it
        "head": Column(enters=True),         # logits stay cut: use VocabularyCrossEntropySum
    }
    placements = parallelize(model, plan, WholeSequence(comm, mesh.group("tp")))

What a region is, see :mod:`ms_zero.parallel.tensor`. Parameters that no style cuts stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from mindspore import Parameter, Tensor, mint, nn

from ms_zero.comm.communicator import DTYPES
from ms_zero.errors import UserError
from ms_zero.parallel.placement import Box, Placement, Placements, Replicas, split_evenly
from ms_zero.parallel.tensor import (
    Border,
    ColumnParallelLinear,
    RowParallelLinear,
    VocabularyParallelEmbedding,
    count_once,
)


@dataclass(frozen=True)
class Column:
    """A linear layer with some of the output features.

    Attributes:
        blocks: number of equal blocks of output features that are never cut, such as heads. It is a multiple
            of the number of ranks, or a divisor: then several ranks have the same block. None: features are
            cut anywhere.
        enters: whether the layer's input comes from outside of a region.
    """

    blocks: int | None = None
    enters: bool = False

    def apply(self, cell: nn.Cell, path: str, cuts: Cuts) -> nn.Cell:
        """The cell that takes the place of the layer."""
        weight, bias = _linear_parameters(cell, path)
        local_bias = None if bias is None else cuts.cut(bias, 0, self.blocks)
        local = cuts.cut(weight, 0, self.blocks)
        activation = getattr(cell, "activation", None)
        return ColumnParallelLinear(local, local_bias, cuts.border, enters=self.enters, activation=activation)


@dataclass(frozen=True)
class Row:
    """A linear layer with some of the input features.

    Attributes:
        leaves: whether its result leaves the region; else it is a partial sum, and the layer has no bias and
            no activation of its own.
    """

    leaves: bool = True

    def apply(self, cell: nn.Cell, path: str, cuts: Cuts) -> nn.Cell:
        """The cell that takes the place of the layer."""
        weight, bias = _linear_parameters(cell, path)
        activation = getattr(cell, "activation", None)
        if not self.leaves and not bias is activation is None:
            raise UserError(
                f"tensor parallelism: {path} gives a partial sum, to which a bias or an activation cannot be "
                f"applied: use Row()"
            )
        local = cuts.cut(weight, 1)
        return RowParallelLinear(local, bias, cuts.border, leaves=self.leaves, activation=activation)


@dataclass(frozen=True)
class Cut:
    """A cell inside of a region that computes with what there is of its own parameters.

    Attributes:
        dims: which of its parameters are cut, and along which dim.
    """

    dims: tuple[tuple[str, int], ...]

    def apply(self, cell: nn.Cell, path: str, cuts: Cuts) -> None:
        """Replace the parameters."""
        own = dict(cell.parameters_and_names(expand=False))
        for name, dim in self.dims:
            if name not in own or not 0 <= dim < own[name].ndim:
                raise UserError(f"tensor parallelism: {path} has no parameter {name} with a dim {dim}")
            setattr(cell, name, cuts.cut(own[name], dim))


@dataclass(frozen=True)
class Region:
    """A cell that is a region as a whole: its first argument enters, its result, a partial sum, leaves.

    Of several results the first is one; what rides along is the same on all ranks.
    """

    def apply(self, cell: nn.Cell, path: str, cuts: Cuts) -> None:
        """Let arguments enter and results leave."""
        border = cuts.border

        def after(cell: nn.Cell, args: tuple, output: Tensor | tuple[Tensor, ...]) -> Tensor | tuple:
            if not isinstance(output, tuple):
                return border.leave(output)
            first, *others = output
            return (border.leave(first), *(count_once(other, border.group) for other in others))

        _change_first_argument(cell, path, border.enter)
        cell.register_forward_hook(after)


@dataclass(frozen=True)
class Vocabulary:
    """An embedding with some of the rows."""

    def apply(self, cell: nn.Cell, path: str, cuts: Cuts) -> nn.Cell:
        """The cell that takes the place of the embedding."""
        own = dict(cell.parameters_and_names(expand=False))
        if len(own) != 1 or next(iter(own.values())).ndim != 2:
            raise UserError(
                f"tensor parallelism: {path} is no embedding: expected one parameter [rows, width]"
            )
        ((name, weight),) = own.items()
        total = weight.shape[0]
        first, _ = split_evenly(total, cuts.border.group.size, cuts.border.group.index)
        local = cuts.cut(weight, 0)
        return VocabularyParallelEmbedding(local, cuts.border, first=first, total=total, name=name)


@dataclass(frozen=True)
class Enter:
    """A cell whose first argument enters a region: once for all the column-parallel layers that read it."""

    def apply(self, cell: nn.Cell, path: str, cuts: Cuts) -> None:
        """Let the argument enter before each call."""
        _change_first_argument(cell, path, cuts.border.enter)


@dataclass(frozen=True)
class OwnTokens:
    """A cell outside of regions whose first argument is [..., T], one number for each token (positions).

    It gets those of the tokens that this rank has there.
    """

    def apply(self, cell: nn.Cell, path: str, cuts: Cuts) -> None:
        """Cut the argument before each call."""
        if cuts.border.splits_sequence:
            _change_first_argument(cell, path, cuts.border.own_tokens)


@dataclass(frozen=True)
class Inside:
    """A cell with whole parameters inside of a region, such as a norm of each head.

    Each rank uses them on what it has there: their gradients are partial sums.
    """

    def apply(self, cell: nn.Cell, path: str, cuts: Cuts) -> None:
        """Remember the parameters."""
        cuts.add_partial(cell.get_parameters())


Style = Column | Row | Cut | Region | Vocabulary | Enter | OwnTokens | Inside

#: Pattern of cell paths, `*` and `?` within one name -> style.
Plan = Mapping[str, Style]


def parallelize(model: nn.Cell, plan: Plan, border: Border) -> Placements:
    """Cut a plain model as a plan says; cells of the model are replaced in place.

    Parameters keep their names. Those without values (on the meta device) stay so, the others get the values
    of the first rank, so that ranks may have drawn different ones. Collective. Hooks that were
    registered on a replaced cell are lost, so this comes before any other technique.

    Args:
        model: the same on all ranks.
        plan: a pattern has to match a cell, a cell may match one pattern. Regions do not lie in each other: a
            column-parallel layer has one cell around it that enters, or enters by itself.
        border: `WholeSequence`, or `SplitSequence` for sequence parallelism.

    Returns:
        Where the local parameters lie; of all parameters, if there is more than one rank.

    Raises:
        UserError: the plan does not fit the model, or the model cannot be cut between so many ranks.
    """
    if border.group.size == 1:
        return Placements()
    names = {id(param): name for name, param in model.parameters_and_names()}
    _agree_on_values(model, border)
    cuts = Cuts(border, names)
    cells = dict(model.cells_and_names())
    found = _match(cells, plan)
    _check_regions(found)
    for path, style in found.items():
        new = style.apply(cells[path], path, cuts)
        if new is not None:
            _replace(cells, path, new)
    cuts.check_nothing_left(model)
    by_name = {names[id(old)]: placement for old, _, placement in cuts.done()}
    for name, param in model.parameters_and_names():
        if name not in by_name:
            is_partial = border.splits_sequence or cuts.is_partial(param)
            by_name[name] = Placement(Box.whole(param.shape), (Replicas(border.group, is_partial),))
    return Placements(by_name, (border.group,))


class Cuts:
    """The parameters that are cut so far."""

    def __init__(self, border: Border, names: Mapping[int, str]) -> None:
        """`names`: of the parameters, by id."""
        self.border = border
        self._names = names
        self._done: dict[int, tuple[Parameter, Parameter, Placement]] = {}
        self._partial: set[int] = set()

    def cut(self, param: Parameter, dim: int, blocks: int | None = None) -> Parameter:
        """This rank's part of a parameter; the same Parameter again for a shared one.

        Raises:
            UserError: it cannot be cut so, or was cut in another way.
        """
        name = self._names.get(id(param), param.name)
        start, stop, sharers = self._range(name, param.shape[dim], blocks)
        box = Box.whole(param.shape).cut(dim, start, stop)
        if id(param) in self._done:
            _, local, placement = self._done[id(param)]
            if placement.box != box:
                raise UserError(f"tensor parallelism: the plan cuts the shared parameter {name} in two ways")
            return local
        ranks = tuple(self.border.group.ranks[index] for index in sharers)
        group = self.border.comm.new_group(ranks, "tp_replicas") if len(ranks) > 1 else None
        replicas = () if group is None else (Replicas(group, is_partial=True),)
        local = _local_parameter(param, box)
        self._done[id(param)] = param, local, Placement(box, replicas)
        return local

    def add_partial(self, params: Iterable[Parameter]) -> None:
        """Remember whole parameters whose gradients are partial sums."""
        self._partial.update(id(param) for param in params)

    def is_partial(self, param: Parameter) -> bool:
        """Whether a whole parameter was remembered."""
        return id(param) in self._partial

    def done(self) -> Iterator[tuple[Parameter, Parameter, Placement]]:
        """Whole parameter, its part, and where that lies."""
        yield from self._done.values()

    def check_nothing_left(self, model: nn.Cell) -> None:
        """Refuse a shared parameter that one cell has a part of and another still has whole."""
        for path, cell in model.cells_and_names():
            for name, param in cell.parameters_and_names(expand=False):
                if id(param) in self._done:
                    raise UserError(
                        f"tensor parallelism: the plan cuts {self._names[id(param)]} but not {path}.{name}, "
                        f"which is the same parameter"
                    )

    def _range(self, name: str, size: int, blocks: int | None) -> tuple[int, int, Sequence[int]]:
        """The elements [start, stop) of this rank, and the members of the group that have the same ones."""
        parts, index = self.border.group.size, self.border.group.index
        if blocks is not None and blocks < 1:
            raise UserError(f"tensor parallelism: {name}: {blocks} blocks, expected at least 1")
        if blocks is None or (blocks % parts == 0 and size % blocks == 0):
            if size < parts:
                raise UserError(f"tensor parallelism: {name}: {size} features cannot be cut in {parts} parts")
            return *split_evenly(size, parts, index), (index,)
        if parts % blocks or size % blocks:
            raise UserError(
                f"tensor parallelism: {name}: {size} features in {blocks} blocks cannot be shared between "
                f"{parts} ranks: the number of blocks must be a multiple or a divisor of the number of ranks"
            )
        copies = parts // blocks
        block, unit = index // copies, size // blocks
        return block * unit, (block + 1) * unit, range(block * copies, (block + 1) * copies)


def _agree_on_values(model: nn.Cell, border: Border) -> None:
    for param in model.get_parameters():
        if not param.is_meta and param.dtype in DTYPES:
            param.set_data(border.comm.broadcast(param.data, border.group.ranks[0], border.group))


def _local_parameter(param: Parameter, box: Box) -> Parameter:
    if param.is_meta:
        data = mint.empty(box.shape, dtype=param.dtype, device="meta")
    else:
        data = Tensor(box.take(param.asnumpy()).copy())
    return Parameter(data, name=param.name, requires_grad=param.requires_grad)


def _linear_parameters(cell: nn.Cell, path: str) -> tuple[Parameter, Parameter | None]:
    own = dict(cell.parameters_and_names(expand=False))
    weight, bias = own.pop("weight", None), own.pop("bias", None)
    if weight is None or weight.ndim != 2 or own or (bias is not None and bias.shape != weight.shape[:1]):
        raise UserError(
            f"tensor parallelism: {path} ({type(cell).__name__}) is no linear layer: expected weight "
            f"[out, in] and bias [out] or none"
        )
    return weight, bias


def _change_first_argument(cell: nn.Cell, path: str, change: Callable[[Tensor], Tensor]) -> None:
    def before(cell: nn.Cell, args: tuple) -> tuple:
        if not args:
            raise UserError(f"tensor parallelism: {path} is called without positional arguments")
        return (change(args[0]), *args[1:])

    cell.register_forward_pre_hook(before)


def _match(cells: Mapping[str, nn.Cell], plan: Plan) -> dict[str, Style]:
    """The style of each matched path."""
    found: dict[str, tuple[str, Style]] = {}
    for pattern, style in plan.items():
        if not isinstance(style, Style):
            raise UserError(f"tensor parallelism: pattern {pattern} of the plan has {style}, not a style")
        paths = [path for path in cells if path and matches(path, pattern)]
        if not paths:
            raise UserError(f"tensor parallelism: pattern {pattern} of the plan matches no cell of the model")
        for path in paths:
            if path in found:
                raise UserError(f"tensor parallelism: {path} matches {found[path][0]} and {pattern}")
            found[path] = pattern, style
    return {path: style for path, (_, style) in found.items()}


def _check_regions(found: Mapping[str, Style]) -> None:
    """Refuse a plan by which gradients or results would be summed twice over the ranks, or never."""
    regions = {path: style for path, style in found.items() if isinstance(style, Enter | Region)}
    for path, style in found.items():
        outer = next((cell for cell in _around(path) if cell in regions), None)
        wrong = _wrong_in(style, regions.get(outer))
        if wrong:
            inside = "in no region" if outer is None else f"in the region that {outer} enters"
            raise UserError(f"tensor parallelism: {path} is {inside}: {wrong}")


def _wrong_in(style: Style, region: Enter | Region | None) -> str:
    """What is wrong with a style in a cell of a region, or outside of them, and how to put it right."""
    match style:
        case Column(enters=False) if region is None:
            return "gradients of its input are not summed; use Column(enters=True), or Enter() around it"
        case Column(enters=True) | Enter() | Region() if region is not None:
            return "entering again would sum gradients twice; let one of the two enter"
        case Row(leaves=True) if isinstance(region, Region):
            return "Region sums its result again; use Row(leaves=False)"
        case Row(leaves=False) if not isinstance(region, Region):
            return "nothing adds up its partial sum; use Row(), or Region() around it"
    return ""


def _around(path: str) -> Iterator[str]:
    """Paths of the cells that hold a cell, the nearest first."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def matches(path: str, pattern: str) -> bool:
    """Whether a dotted path fits a pattern, in which ``*`` and ``?`` stay within one name."""
    names, patterns = path.split("."), pattern.split(".")
    return len(names) == len(patterns) and all(map(fnmatchcase, names, patterns))


def _replace(cells: dict[str, nn.Cell], path: str, new: nn.Cell) -> None:
    """Put a cell where another was; its parameters keep the names that they have."""
    parent, _, name = path.rpartition(".")
    if hasattr(cells[path], "parameter_rules"):  # what a layer of ours says about its initial values
        new.parameter_rules = cells[path].parameter_rules
    names = {param: param.name for param in new.get_parameters()}
    owner = cells[parent]
    if isinstance(owner, nn.CellList | nn.SequentialCell):
        owner[int(name)] = new
    else:
        setattr(owner, name, new)
    for param, original in names.items():
        param.name = original
    cells[path] = new
