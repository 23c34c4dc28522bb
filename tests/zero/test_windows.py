"""When parameters are whole: gathers as a communicator sees them, and what happens off the usual course."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_zero._compat import gradient as gradient_of
from ms_zero._compat import leaf
from ms_zero.comm import ProcessMesh, local
from ms_zero.errors import UserError
from ms_zero.memory.recompute import recompute
from ms_zero.mesh import Mesh
from ms_zero.optim import SGD
from ms_zero.zero import Options, shard, wrap_blocks
from tests.zero.recorder import INPUT, WIDTH, Followed, follow, forward, loss_of, step

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]
DOWN = BLOCKS[::-1]


class Broken(Exception):
    """Raised by the tests' hooks."""


def gathers(comm):
    return [event.removeprefix("gather ") for event in comm.take() if event.startswith("gather ")]


def open_units(model):
    return [unit.name for unit in model.units if unit.is_open]


def test_each_unit_is_gathered_once_for_forward_and_once_for_backward():
    model, comm = follow()
    for _ in range(3):
        step(model)
        assert gathers(comm) == ["the root", *BLOCKS, "the root", *DOWN]
    assert open_units(model) == []


def test_kept_parameters_are_gathered_once():
    model, comm = follow(reshard_after_forward=False, prefetch=2)
    for _ in range(3):
        step(model)
        assert gathers(comm) == ["the root", *BLOCKS]
    assert open_units(model) == []


@pytest.mark.parametrize("prefetch", [1, 2, 100])
def test_the_next_units_are_gathered_before_the_present_one_runs(prefetch):
    model, comm = follow(prefetch=prefetch)
    step(model)
    assert gathers(comm) == ["the root", *BLOCKS, "the root", *DOWN]  # the first pass knows no order
    step(model)
    events = comm.take()
    for verb, order in (("forward", BLOCKS), ("backward", DOWN)):
        start = events.index(f"{verb} {order[0]}")
        begin = 0 if verb == "forward" else events.index("forward the root")
        ahead = [event for event in events[begin:start] if event.startswith("gather")]
        expected = ["the root", *order[: 1 + min(prefetch, 2)]]
        assert ahead == [f"gather {name}" for name in expected]
    assert [event for event in events if event.startswith("gather")].count("gather blocks.1") == 2


def test_what_was_gathered_ahead_and_not_used_is_not_used_later():
    cell = Followed()
    model, _ = follow(cell=cell, prefetch=2)
    optimizer = SGD(model)
    step(model, optimizer)
    cell.calls = (0,)  # the blocks 1 and 2 are gathered ahead in vain
    with model.evaluate():
        loss_of(model)
    cell.calls = (1, 2)
    values = {name: value * 2 for name, value in model.state_dict().items()}
    model.set_initial_values(lambda name, start, stop: values[name].reshape(-1)[start:stop])
    with model.evaluate():
        found = loss_of(model)
    plain = Followed((1, 2))
    for name, param in plain.parameters_and_names():
        param.set_data(Tensor(values[name]))
    assert float(found) == float(loss_of(plain))


def test_evaluation_leaves_nothing_open():
    for reshard in (True, False):
        model, comm = follow(reshard_after_forward=reshard)
        for _ in range(2):
            with model.evaluate():
                loss_of(model)
            assert gathers(comm) == ["the root", *BLOCKS]
            assert open_units(model) == [] and model.held_bytes()["unsharded"] == 0


def test_outside_of_windows_a_parameter_is_no_number():
    model, _ = follow()
    for _, param in model.model.parameters_and_names():
        assert np.isnan(param.asnumpy()).all() and param.size == 1


class Borrows(Followed):
    """Uses a parameter of a block outside of the block: one element broadcasts without an error."""

    def construct(self, x):
        return super().construct(x) * self.blocks[0].extra


def test_using_a_parameter_outside_of_its_unit_does_not_go_unnoticed():
    model, _ = follow(cell=Borrows())
    assert not np.isfinite(float(forward(model)))
    root = shard(Borrows(), ProcessMesh(Mesh(), local()), stage=3, wrap=lambda path, cell: False)
    assert float(forward(root)) == float(loss_of(Borrows()))


def test_recompute_needs_no_third_gather():
    for prefetch in (0, 2):
        cell = Followed()
        for block in cell.blocks:
            recompute(block, enclosing=[cell])
        model, comm = follow(cell=cell, prefetch=prefetch)
        for _ in range(2):
            step(model)
            assert sorted(gathers(comm)) == sorted([*BLOCKS, "the root"] * 2)


def gradient(model):
    model.reduce()
    found = np.concatenate([bucket.reduced.asnumpy() for bucket in model.buckets])
    model.drop_gradients()
    return found


def two_microbatches(model):
    for number, x in enumerate((INPUT, INPUT * 2)):
        model.backward(forward(model, x), last=number == 1)
    return gradient(model)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("reshard", [True, False])
def test_several_forwards_before_one_backward(stage, reshard):
    model, _ = follow(stage, reshard_after_forward=reshard, prefetch=1)
    expected = two_microbatches(model)
    for _ in range(2):
        with model.record():
            loss = loss_of(model) + loss_of(model, INPUT * 2)
        model.backward(loss)
        np.testing.assert_allclose(gradient(model), expected, rtol=1e-5, atol=1e-6)
        first, second = forward(model), forward(model, INPUT * 2)
        model.backward(first, last=False)
        model.backward(second)
        np.testing.assert_allclose(gradient(model), expected, rtol=1e-5, atol=1e-6)
    assert open_units(model) == []


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_forward_without_backward_does_not_keep_old_weights(stage, policy):
    options = Options(stage, reshard_after_forward=False, prefetch=2)
    mesh = ProcessMesh(Mesh(), local())
    model = shard(Followed(), mesh, stage=stage, policy=policy, options=options)
    optimizer = SGD(model)
    step(model, optimizer)
    loss = forward(model)
    model.backward(loss)
    before = float(forward(model))  # opens windows that no backward closes
    optimizer.step(lr=0.1)
    recorded = float(forward(model))
    with model.evaluate():
        assert float(loss_of(model)) == recorded != before
    model.backward(forward(model))  # and the next step is as good as any
    assert optimizer.step(lr=0.1).finite and open_units(model) == []


def raise_broken(*_):
    raise Broken


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("reshard", [True, False])
def test_an_exception_in_forward_leaves_the_model_usable(stage, reshard):
    model, comm = follow(stage, reshard_after_forward=reshard, prefetch=1)
    step(model)
    model.backward(forward(model))
    expected = gradient(model)
    hook = model.model.blocks[1].register_forward_pre_hook(raise_broken)
    for _ in range(2):
        with pytest.raises(Broken):
            forward(model)
    hook.remove()
    comm.take()
    model.backward(forward(model))
    np.testing.assert_array_equal(gradient(model), expected)
    assert open_units(model) == []
    comm.take()
    step(model)  # gathers ahead as before
    assert stage == 0 or gathers(comm)[:3] == ["the root", *BLOCKS[:2]]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_exception_in_backward_has_to_be_acknowledged(stage):
    model, _ = follow(stage, prefetch=1)
    optimizer = SGD(model)
    model.backward(forward(model))
    expected = gradient(model)
    model.backward(forward(model), last=False)  # lost with the step
    hook = model.model.blocks[1].register_backward_hook(raise_broken)
    with pytest.raises(Broken):
        model.backward(forward(model), last=False)
    hook.remove()
    assert open_units(model) == []
    for use in (lambda: model.backward(forward(model)), lambda: optimizer.step(lr=0.1)):
        with pytest.raises(UserError, match="a microbatch of this step failed: call drop_gradients"):
            use()
    model.drop_gradients()
    model.backward(forward(model))
    np.testing.assert_array_equal(gradient(model), expected)


class Doubled(nn.Cell):
    """Has a backward of its own, of which MindSpore calls no forward hook."""

    def __init__(self):
        super().__init__()
        self.inside = nn.Dense(WIDTH, WIDTH)

    def construct(self, x):
        return x * 2

    def bprop(self, x, out, dout):
        return (dout * 2,)


class OwnBackward(Followed):
    def __init__(self):
        super().__init__()
        self.doubled = nn.CellList([Doubled(), Doubled()])

    def construct(self, x):
        for cell in self.doubled:
            x = cell(x)
        return super().construct(x)


def test_a_unit_with_a_backward_of_its_own():
    model = shard(OwnBackward(), ProcessMesh(Mesh(), local()), stage=3)
    plain = OwnBackward()
    weight = plain.blocks[0].weight
    _, expected = ms.value_and_grad(lambda: loss_of(plain), None, [weight])()
    for _ in range(2):
        with model.microbatch(last=True):
            ms.value_and_grad(lambda: loss_of(model), None, model.model.trainable_params())()
        model.reduce()
        slots = {s.name: s.view(b.reduced.asnumpy()) for b in model.buckets for s in b.layout.slots}
        np.testing.assert_allclose(slots["blocks.0.weight"], expected[0].asnumpy(), atol=1e-6)
        model.drop_gradients()
        with model.evaluate():
            loss_of(model)
        assert open_units(model) == []


def test_leaves_can_be_called_outside_of_the_model():
    cell = Followed()
    model = shard(cell, ProcessMesh(Mesh(), local()), stage=3, wrap=wrap_blocks(cell, leaves=True))
    expected = Followed().blocks[1](INPUT).asnumpy()
    np.testing.assert_array_equal(model.model.blocks[1](INPUT).asnumpy(), expected)
    assert open_units(model) == []


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_autograd_keeps_parameters_and_not_their_values(stage):
    """Else the weights of all units would stay alive from their forward to their backward."""
    model, _ = follow(stage, cell=Followed(calls=()))
    entry = leaf(INPUT, requires_grad=True)
    grads = []
    for factor in (1, 3):
        loss = forward_sum(model, entry)
        for bucket in model.buckets:
            bucket.write(bucket.store * factor)
        model.backward(loss)
        model.drop_gradients()
        grads.append(gradient_of(entry).asnumpy().copy())
        entry._grad = None
    np.testing.assert_allclose(grads[1], 3 * grads[0], rtol=1e-6)


def forward_sum(model, x):
    with model.record():
        return model(x).sum()


class Answers(nn.Cell):
    """A block whose result is a dict in a list."""

    def __init__(self, inside):
        super().__init__()
        self.inside = inside

    def construct(self, x):
        return [None, {"found": self.inside(x)}]


class Asks(Followed):
    def __init__(self):
        super().__init__()
        self.blocks = nn.CellList([Answers(block) for block in self.blocks])

    def construct(self, x):
        for block in self.blocks:
            x = block(x)[1]["found"]
        return x


def test_units_with_nested_results_are_gathered_for_backward():
    model, comm = follow(cell=Asks())
    for _ in range(2):
        step(model)
        assert sorted(gathers(comm)) == sorted(["the root", *BLOCKS] * 2)
    model.backward(forward(model))
    expected, _ = follow(0, cell=Asks())
    expected.backward(forward(expected))
    for name, grad in gradients(model).items():
        np.testing.assert_array_equal(grad, gradients(expected)[name])


def gradients(model):
    model.reduce()
    return {s.name: s.view(b.reduced.asnumpy()) for b in model.buckets for s in b.layout.slots}
