"""A stage: the part of a model that one rank of a pipeline holds.

A model that can be split is a chain: something makes hidden states of the ids, equal-kind blocks follow one
another, something makes logits of the last hidden states. It says so by a :class:`Chain`. :func:`split` takes
what a rank does not hold out of the plain model; what stays keeps its paths, and with them its parameters
keep their logical names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspore import Tensor, nn

from ms_zero.errors import UserError

#: Hidden states, or these and what rides along.
Hidden = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True)
class Chain:
    """What a model has to say about itself to be split.

    The three functions are called with the cell that holds the parts of this rank under their paths in the
    plain model, then what is listed. ``inputs`` are the arguments of the plain model's call, by name: every
    stage has those of the microbatch, so that masks and positions need not travel. ``hidden`` is what blocks
    take and return: hidden states, or a tuple of these and what rides along.

    Attributes:
        blocks: path of the CellList of the blocks.
        first: paths of the cells with parameters that only `begin` uses.
        last: paths of the cells with parameters that only `end` uses.
        begin: ``begin(cell, inputs)``: the hidden states that enter the first block.
        context: ``context(cell, hidden, inputs)``: what each block is called with after the hidden states.
        end: ``end(cell, hidden)``: the model's result, of the hidden states that leave the last block.
    """

    blocks: str
    first: tuple[str, ...]
    last: tuple[str, ...]
    begin: Callable[[nn.Cell, Mapping[str, Any]], Hidden]
    context: Callable[[nn.Cell, Hidden, Mapping[str, Any]], tuple]
    end: Callable[[nn.Cell, Hidden], Hidden]


# Splitting a model


class Staged(nn.Cell):
    """The stages of one rank; called with a stage and the hidden states that enter it.

    Children and parameters have the paths that they have in the plain model.
    """

    fp32_arguments = ("carried",)  # read by ms_zero.precision

    def __init__(self, model: nn.Cell, chain: Chain, stages: Mapping[int, range], num_stages: int) -> None:
        """Take over the children of `model`, from which other ranks' parts were taken out; see `split`."""
        super().__init__(auto_prefix=False)
        self._chain, self._stages, self._num_stages = chain, dict(stages), num_stages
        for name, cell in model.name_cells().items():
            self.insert_child_to_cell(name, cell)
        for name, param in model.parameters_and_names(expand=False):
            self.insert_param_to_cell(name, param, check_name_contain_dot=False)

    @property
    def stages(self) -> dict[int, range]:
        """The blocks of each stage of this rank."""
        return dict(self._stages)

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self._num_stages

    def uncalled(self) -> list[nn.Cell]:
        """Cells of the plain model that a stage reaches through and does not call."""
        chain, found = self._chain, dict[str, None]()
        for path in (f"{chain.blocks}.", *chain.first, *chain.last):
            names = path.split(".")
            for depth in range(1, len(names)):
                found[".".join(names[:depth])] = None
        return [cell_at(self, path) for path in found]

    def construct(
        self,
        stage: int,
        hidden: Tensor | None,
        inputs: Mapping[str, Any],
        *,
        carried: tuple[Tensor, ...] = (),
    ) -> Hidden:
        """Run one stage.

        Args:
            stage: one of this rank.
            hidden: what the stage before gave; None for the first stage.
            inputs: arguments of the plain model, of this microbatch.
            carried: what the stage before gave besides hidden states.

        Returns:
            Hidden states, and what rides along if anything does, or the model's result after the last stage.
        """
        x = (hidden, *carried) if carried else hidden
        if stage == 0:
            x = self._chain.begin(self, inputs)
        blocks = self._stages[stage]
        if blocks:
            context = self._chain.context(self, x, inputs)
            named = cell_at(self, self._chain.blocks).name_cells()
            for number in blocks:
                x = named[str(number)](*(x if isinstance(x, tuple) else (x,)), *context)
        return self._chain.end(self, x) if stage == self._num_stages - 1 else x


class Elsewhere(nn.Cell):
    """Takes the place of a cell that another rank holds."""

    def construct(self, *args: Any) -> Any:
        """Never called: a stage runs its own cells only."""
        raise AssertionError("a cell of another pipeline stage was called")


def split(model: nn.Cell, chain: Chain, ranges: Sequence[range], stages: Sequence[int]) -> Staged:
    """Reduce a plain model, in place, to the stages of one rank.

    A parameter that the first and the last stage share stays on both, under its first path in the plain
    model; see `shared_names`.

    Args:
        model: the plain model; it is used up.
        chain: how it runs.
        ranges: blocks of every stage.
        stages: those of this rank.

    Raises:
        UserError: the ranges do not cover every block once, a path does not exist in the model, or a trained
            parameter is on no stage, or on several, other than one that `first` and `last` share.
    """
    blocks = list(blocks_of(model, chain).name_cells().items())
    covered = [number for part in ranges for number in part]
    if covered != list(range(len(blocks))):
        raise UserError(
            f"pipeline: stages hold blocks {covered} of {chain.blocks}, expected each of its {len(blocks)} "
            f"blocks once and in order"
        )
    _check_homes(model, chain, ranges, blocks)
    mine = {number for stage in stages for number in ranges[stage]}
    if len(mine) < len(blocks):
        _replace(model, chain.blocks, _sublist(blocks, mine))
    last = len(ranges) - 1
    gone = [path for path in chain.first if 0 not in stages]
    gone += [path for path in chain.last if last not in stages]
    kept = [path for path in (*chain.first, *chain.last) if path not in gone]
    needed = {id(param) for path in kept for param in cell_at(model, path).get_parameters()}
    names = {id(param): name for name, param in model.parameters_and_names()}
    for path in gone:
        own = {names[id(param)]: id(param) in needed for param in cell_at(model, path).get_parameters()}
        if not _gives_names(path, own):
            _replace(model, path, Elsewhere())
    return Staged(model, chain, {stage: ranges[stage] for stage in stages}, len(ranges))


def shared_names(model: nn.Cell, chain: Chain) -> tuple[str, ...]:
    """Logical names of the parameters that cells of `first` and of `last` share, in a whole model."""
    first, last = (
        {id(param) for path in paths for param in cell_at(model, path).get_parameters()}
        for paths in (chain.first, chain.last)
    )
    return tuple(name for name, param in model.parameters_and_names() if id(param) in first & last)


def blocks_of(model: nn.Cell, chain: Chain) -> nn.CellList | nn.SequentialCell:
    """The list of the blocks; raises UserError when its path has something else."""
    found = cell_at(model, chain.blocks)
    if not isinstance(found, nn.CellList | nn.SequentialCell):
        raise UserError(
            f"pipeline: {chain.blocks} is a {type(found).__name__}, expected the CellList of the blocks: "
            f"correct the Chain"
        )
    return found


def cell_at(root: nn.Cell, path: str) -> nn.Cell:
    """The cell at a path with dots; raises UserError when there is none."""
    cell = root
    for name in path.split("."):
        cell = cell.name_cells().get(name)
        if cell is None:
            raise UserError(f"pipeline: {type(root).__name__} has no cell {path}: correct its Chain")
    return cell


def _check_homes(
    model: nn.Cell, chain: Chain, ranges: Sequence[range], blocks: Sequence[tuple[str, nn.Cell]]
) -> None:
    """Refuse trained parameters whose gradient no stage, or more than one, would have."""
    in_blocks: dict[int, set[int]] = {}
    for stage, part in enumerate(ranges):
        for number in part:
            for param in blocks[number][1].get_parameters():
                in_blocks.setdefault(id(param), set()).add(stage)
    at_ends: dict[int, set[int]] = {}
    for stage, paths in ((0, chain.first), (len(ranges) - 1, chain.last)):
        for path in paths:
            for param in cell_at(model, path).get_parameters():
                at_ends.setdefault(id(param), set()).add(stage)
    for name, param in model.parameters_and_names():
        inside, ends = in_blocks.get(id(param), set()), at_ends.get(id(param), set())
        if param.requires_grad and not inside | ends:
            raise UserError(
                f"pipeline: {name} is in none of the cells that the Chain names: give it to one of these, "
                f"or name its cell in first or last"
            )
        if inside and len(inside | ends) > 1:
            raise UserError(
                f"pipeline: {name} is used on stages {sorted(inside | ends)}: only cells of first and last "
                f"may share a parameter; put the blocks that share it on one stage"
            )


def _sublist(blocks: Sequence[tuple[str, nn.Cell]], mine: set[int]) -> nn.CellList:
    """A list of some blocks under their old names."""
    kept = nn.CellList(auto_prefix=False)
    for number, (name, block) in enumerate(blocks):
        if number in mine:
            kept.insert_child_to_cell(name, block)
    return kept


def _replace(root: nn.Cell, path: str, cell: nn.Cell) -> None:
    parent, _, name = path.rpartition(".")
    setattr(cell_at(root, parent) if parent else root, name, cell)


def _gives_names(path: str, own: Mapping[str, bool]) -> bool:
    """Whether a cell that is not run here stays, because parameters used here have their names by it.

    `own` says of its parameters, by name, whether they are used here.
    """
    named = [used for name, used in own.items() if name.startswith(f"{path}.")]
    if any(named) and not all(named):
        raise UserError(
            f"pipeline: {path} shares some of its parameters with another stage and not others: "
            f"put the shared ones into a cell of their own"
        )
    return any(named)
