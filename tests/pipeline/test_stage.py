"""What splitting leaves of a model on each rank."""

import pytest
from mindspore import nn

from ms_zero.errors import UserError
from ms_zero.models.init import init_rules
from ms_zero.models.layers import Embedding, Linear, name_parameters_by_path
from ms_zero.pipeline.balance import explicit
from ms_zero.pipeline.stage import Chain, shared_names, split


class Body(nn.Cell):
    def __init__(self, num_blocks):
        super().__init__()
        self.embed = Embedding(11, 4, init_std=0.02)
        self.place = Embedding(5, 4, init_std=0.02)
        self.blocks = nn.CellList([Linear(4, 4, bias=True, init_std=0.02) for _ in range(num_blocks)])


class Model(nn.Cell):
    def __init__(self, num_blocks=4, tied=True):
        super().__init__()
        self.body = Body(num_blocks)
        weight = self.body.embed.weight if tied else None
        self.head = Linear(4, 11, bias=tied, init_std=0.02, weight=weight)
        name_parameters_by_path(self)


CHAIN = Chain(
    blocks="body.blocks",
    first=("body.embed", "body.place"),
    last=("head",),
    begin=lambda cell, inputs: cell.body.embed(inputs["ids"]) + cell.body.place(inputs["places"]),
    context=lambda cell, hidden, inputs: (),
    end=lambda cell, hidden: cell.head(hidden),
)
RANGES = explicit([1, 0, 2, 1], 4, 4)


@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_is_on_one_stage_under_its_plain_name(tied):
    plain = {name: tuple(param.shape) for name, param in Model(tied=tied).parameters_and_names()}
    held = [split(Model(tied=tied), CHAIN, RANGES, [stage]) for stage in range(4)]
    names = [[name for name, _ in cell.parameters_and_names()] for cell in held]
    shared = shared_names(Model(tied=tied), CHAIN)
    assert shared == (("body.embed.weight",) if tied else ())
    everything = [name for stage in names for name in stage]
    assert sorted(everything) == sorted([*plain, *shared])
    assert set(shared) <= set(names[0]) & set(names[3])
    assert names[1] == []
    for cell in held:  # the rules of initial values and decay go by the same paths
        shapes = {name: tuple(param.shape) for name, param in cell.parameters_and_names()}
        assert {name: plain[name] for name in init_rules(cell)} == shapes


def test_a_rank_with_several_stages_holds_them_all():
    cell = split(Model(tied=False), CHAIN, RANGES, [0, 2])
    assert cell.stages == {0: range(1), 2: range(1, 3)}
    assert list(cell.body.blocks.name_cells()) == ["0", "1", "2"]
    assert "head.weight" not in dict(cell.parameters_and_names())


def test_a_split_has_to_cover_every_block_once():
    for counts in ([1, 1], [2, 3]):
        ends = [0, counts[0], sum(counts)]
        with pytest.raises(UserError, match="expected each of its 4 blocks once and in order"):
            split(Model(), CHAIN, [range(ends[0], ends[1]), range(ends[1], ends[2])], [0])
    with pytest.raises(UserError, match=r"has no cell body\.layers"):
        split(Model(), Chain("body.layers", (), (), None, None, None), RANGES, [0])
    with pytest.raises(UserError, match=r"body\.embed is a Embedding, expected the CellList of the blocks"):
        split(Model(), Chain("body.embed", (), (), None, None, None), RANGES, [0])


def test_a_parameter_without_a_stage_or_with_several_is_refused():
    forgotten = Chain("body.blocks", ("body.embed",), ("head",), None, None, None)
    with pytest.raises(UserError, match=r"body\.place\.weight is in none of the cells that the Chain names"):
        split(Model(), forgotten, RANGES, [0])
    frozen = Model()
    frozen.body.place.weight.requires_grad = False  # the same everywhere, whoever uses it
    assert "body.place.weight" in dict(split(frozen, forgotten, RANGES, [2]).parameters_and_names())
    for one, other, where in ((1, 2, None), (0, 1, r"\[0, 2\]"), (0, 3, r"\[0, 3\]")):
        model = Model()
        model.body.blocks[other].weight = model.body.blocks[one].weight
        if where is None:  # both blocks are on stage 2
            assert "body.blocks.1.weight" in dict(split(model, CHAIN, RANGES, [2]).parameters_and_names())
        else:
            with pytest.raises(UserError, match=rf"body\.blocks\.0\.weight is used on stages {where}"):
                split(model, CHAIN, RANGES, [2])
    model = Model()
    model.body.blocks[3].weight = model.body.embed.weight  # blocks and ends, on other stages
    with pytest.raises(UserError, match=r"body\.embed\.weight is used on stages \[0, 3\]"):
        split(model, CHAIN, RANGES, [0])


def test_a_cell_with_shared_and_other_parameters_is_refused():
    model = Model()
    model.body.embed.bias = model.body.place.weight
    chain = Chain("body.blocks", ("body.embed",), ("head",), None, None, None)
    with pytest.raises(UserError, match="shares some of its parameters"):
        split(model, chain, RANGES, [3])
