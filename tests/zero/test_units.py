"""Every parameter belongs to exactly one unit, whatever the model looks like and whatever is wrapped."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ms_zero.comm import ProcessMesh, local
from ms_zero.memory.recompute import recompute
from ms_zero.mesh import Mesh
from ms_zero.zero import Options, shard, wrap_blocks, wrap_classes, wrap_size
from ms_zero.zero.units import plan_units
from tests.zero.models import Awkward

WIDTH = 4


class Block(nn.Cell):
    """A residual matrix; `inside` is a further cell with parameters."""

    def __init__(self, inside=None):
        super().__init__()
        self.weight = Parameter(Tensor(np.eye(WIDTH, dtype=np.float32) * 0.5), name="weight")
        self.inside = inside

    def construct(self, x):
        y = ops.MatMul()(x, self.weight)
        return x + (y if self.inside is None else self.inside(y))


class Stack(nn.Cell):
    """Blocks between two matrices; calls the blocks in the order of `calls`."""

    def __init__(self, blocks, calls=None):
        super().__init__()
        self.first, self.blocks, self.last = nn.Dense(WIDTH, WIDTH), nn.CellList(blocks), nn.Dense(WIDTH, 2)
        self.calls = calls or range(len(blocks))

    def construct(self, x):
        x = self.first(x)
        for number in self.calls:
            x = self.blocks[number](x)
        return self.last(x)


def units(model, wrap):
    return {spec.name: list(spec.params) for spec in plan_units(model, wrap)}


def shared_inside():
    inside = nn.Dense(WIDTH, WIDTH)
    return Stack([Block(inside), Block(inside), Block()])


def shared_with_root():
    model = Stack([Block(nn.Dense(WIDTH, WIDTH)), Block()])
    model.last = model.blocks[0].inside
    return model


def one_block_three_times():
    block = Block(nn.Dense(WIDTH, WIDTH))
    return Stack([block, block, block])


def tied_blocks():
    model = Stack([Block(), Block(), Block()])
    model.blocks[2].weight = model.blocks[0].weight
    return model


MODELS = [Awkward, shared_inside, shared_with_root, one_block_three_times, tied_blocks]


@pytest.mark.parametrize("make", MODELS)
def test_every_parameter_is_in_exactly_one_unit(make):
    model = make()
    expected = sorted(name for name, _ in model.parameters_and_names())
    wraps = {
        "blocks": wrap_blocks(model),
        "leaves": wrap_blocks(model, leaves=True),
        "classes": wrap_classes(Block, nn.Dense),
        "small": wrap_size(model, 1),
        "large": wrap_size(model, 10**9),
        "all": lambda path, cell: True,
        "none": lambda path, cell: False,
        "user": lambda path, cell: path.endswith("0"),
    }
    for title, wrap in wraps.items():
        specs = plan_units(model, wrap)
        assert sorted(name for spec in specs for name in spec.params) == expected, title
        assert all(spec.params and spec.cells for spec in specs), title


def test_blocks_are_units_and_the_rest_is_the_root():
    model = Stack([Block(), Block()])
    assert units(model, wrap_blocks(model)) == {
        "the root": ["first.weight", "first.bias", "last.weight", "last.bias"],
        "blocks.0": ["blocks.0.weight"],
        "blocks.1": ["blocks.1.weight"],
    }
    assert list(units(model, wrap_blocks(model, leaves=True))) == ["first", "blocks.0", "blocks.1", "last"]


def test_a_parameter_belongs_to_the_innermost_wrapped_cell():
    model = Stack([Block(nn.Dense(WIDTH, WIDTH)), Block()])
    found = units(model, wrap_classes(Block, nn.Dense))
    assert found["blocks.0"] == ["blocks.0.weight"]
    assert found["blocks.0.inside"] == ["blocks.0.inside.weight", "blocks.0.inside.bias"]


def test_a_tied_parameter_merges_units():
    model = tied_blocks()
    assert units(model, wrap_blocks(model))["blocks.0 + blocks.2"] == ["blocks.0.weight"]


def test_a_cell_shared_by_two_blocks_merges_them():
    model = shared_inside()
    found = units(model, wrap_blocks(model))
    merged = ["blocks.0.weight", "blocks.0.inside.weight", "blocks.0.inside.bias", "blocks.1.weight"]
    assert found["blocks.0 + blocks.1"] == merged and found["blocks.2"] == ["blocks.2.weight"]


def test_a_cell_shared_with_the_root_takes_its_block_there():
    model = shared_with_root()
    found = units(model, wrap_blocks(model))
    assert "blocks.0" not in found and "blocks.0.weight" in found["the root"]


def test_a_cell_without_parameters_makes_no_unit():
    model = Awkward()
    assert not any("silent" in name for name in units(model, lambda path, cell: True))


def test_wrapping_by_size_collects_bottom_up():
    model = Stack([Block(nn.Dense(WIDTH, WIDTH)), Block()])
    # A dense layer has 20 elements, the first block 36 and the second 16.
    assert set(units(model, wrap_size(model, 36))) == {"the root", "blocks.0"}
    assert set(units(model, wrap_size(model, 20))) == {"the root", "first", "blocks.0.inside"}


def test_what_is_not_called_is_no_unit():
    """A list of cells has no window, nor a cell whose children others call."""
    model = Stack([Block(), Block()])
    assert set(units(model, wrap_size(model, 17))) == {"the root", "first"}  # the list has 32 elements
    assert set(units(model, wrap_size(model, 16, uncalled=[model.blocks[0]]))) == {
        "the root",
        "first",
        "blocks.1",
    }


def test_parameters_can_be_left_out():
    model = Stack([Block(), Block()])
    specs = plan_units(model, wrap_blocks(model), leave_out=["blocks.0.weight", "first.bias"])
    assert [spec.name for spec in specs] == ["the root", "blocks.1"]


def gradients(model, x):
    with model.record():
        loss = (model(x) ** 2).mean()
    model.backward(loss)
    model.reduce()
    found = {s.name: s.view(b.reduced.asnumpy()).copy() for b in model.buckets for s in b.layout.slots}
    model.drop_gradients()
    return found


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("make", [*MODELS[1:], lambda: Stack([Block(), Block()], calls=(0, 1, 0, 1, 1))])
def test_stage_3_gives_the_gradients_of_plain_training(make, again):
    """Shared cells, tied weights and blocks that run several times, with and without recompute."""
    x = Tensor(np.random.default_rng(0).standard_normal((3, WIDTH)).astype(np.float32))
    ms.set_seed(1)
    plain = make()
    params = plain.trainable_params()
    _, grads = ms.value_and_grad(lambda: (plain(x) ** 2).mean(), None, params)()
    names = {id(param): name for name, param in plain.parameters_and_names()}
    expected = {names[id(param)]: grad.asnumpy() for param, grad in zip(params, grads, strict=True)}
    for prefetch, reshard in ((0, True), (2, True), (1, False)):
        ms.set_seed(1)
        cell = make()
        if again:
            for block in {id(block): block for block in cell.blocks}.values():
                recompute(block, enclosing=[cell])
        options = Options(3, prefetch=prefetch, reshard_after_forward=reshard)
        model = shard(cell, ProcessMesh(Mesh(), local()), stage=3, options=options)
        for _ in range(2):  # the second pass gathers ahead
            found = gradients(model, x)
            for name, grad in expected.items():
                np.testing.assert_allclose(found[name], grad, atol=1e-6, err_msg=name)
        assert model.held_bytes()["unsharded"] == 0
