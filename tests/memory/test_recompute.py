import gc
import sys
import weakref

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from ms_zero import memory
from ms_zero._compat import backward, clear_grads, gradient, no_grad, tape
from ms_zero.errors import UserError
from tests.memory.training import assert_bitwise, batch, build, forward, leaf_of, results, step


class Scale(nn.Cell):
    """x * w, with everything a signature may hold."""

    def __init__(self, value=2.0):
        super().__init__()
        self.w = Parameter(Tensor(np.full(3, value, np.float32)), name="w")
        self.calls = 0

    def construct(self, x, pair=None, *, power=1, extra=None):
        self.calls += 1
        y = x * self.w
        for _ in range(power - 1):
            y = y * x
        if pair is not None:
            y = y + pair[0] * pair[1]
        if extra is not None:
            y = y + extra["bias"] * x
        return y, {"count": power, "ids": Tensor(np.array([1, 2], np.int32)), "square": y * y}, None


def both_ways(run):
    """The outcome of `run(wrap)` without and with recompute."""
    return run(lambda cell: cell), run(lambda cell: memory.recompute(cell).cell)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_every_block_recomputed_is_bitwise_plain_training(family):
    model = build(family)
    plain = step(model)
    wrapped = [memory.recompute(block) for block in memory.find_blocks(model).values()]
    assert_bitwise(step(model), plain)
    for handle in wrapped:
        handle.remove()
    assert_bitwise(step(model), plain)


def test_arguments_and_results_of_any_form():
    def run(wrap):
        cell = wrap(Scale())
        x, first, second, bias = (leaf_of(np.arange(3) + k) for k in range(4))
        with tape():
            y, rest, nothing = cell(x, (first, second), power=3, extra={"bias": bias})
            loss = (y + rest["square"]).sum()
        assert nothing is None and rest["count"] == 3 and rest["ids"].asnumpy().tolist() == [1, 2]
        backward(loss)
        return {str(k): gradient(t).asnumpy() for k, t in enumerate((x, first, second, bias, cell.w))}

    assert_bitwise(*both_ways(run))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_parameter_as_an_argument_gets_all_of_its_gradient(dtype):
    """Used outside as well, and holding another dtype than it was created with, as under ZeRO in 16 bits."""

    class AddProduct(nn.Cell):
        def construct(self, x, w):
            return x + x * w

    def run(wrap):
        cell = wrap(AddProduct())
        weight = Parameter(Tensor(np.ones(3, np.float32)), name="weight")
        weight.data = Tensor(np.array([1, 2, 3], dtype))
        seen = []
        weight.register_hook(lambda grad: seen.append(grad.asnumpy().astype(np.float64)))
        with tape():
            x = Tensor(np.array([[1, 2, 4], [8, 1, 2]], dtype)) * weight
            loss = cell(cell(x, weight), weight).sum()
        backward(loss)
        return {"weight": sum(seen), "plain": np.array(len(seen) == 1)}

    plain, recomputed = both_ways(run)
    assert plain["plain"]
    np.testing.assert_array_equal(recomputed["weight"], plain["weight"])


def test_an_unused_result_and_a_constant_input_get_no_gradient():
    def run(wrap):
        cell = wrap(Scale())
        x, constant = leaf_of([1, 2, 3]), Tensor(np.ones(3, np.float32))
        with tape():
            _, rest, _ = cell(x, (constant, constant))
            loss = rest["square"].sum()
        backward(loss)
        assert gradient(constant) is None
        return {"x": gradient(x).asnumpy(), "w": gradient(cell.w).asnumpy()}

    assert_bitwise(*both_ways(run))


def test_parameters_get_gradients_though_no_input_needs_one():
    cell = memory.recompute(Scale()).cell
    with tape():
        loss = cell(Tensor(np.array([1, 2, 3], np.float32)))[0].sum()
    backward(loss)
    np.testing.assert_array_equal(gradient(cell.w).asnumpy(), [1, 2, 3])


def test_a_frozen_cell_passes_the_gradient_of_its_input():
    cell = memory.recompute(Scale()).cell
    cell.w.requires_grad = False
    x = leaf_of([1, 2, 3])
    with tape():
        loss = cell(x)[0].sum()
    backward(loss)
    np.testing.assert_array_equal(gradient(x).asnumpy(), [2, 2, 2])
    assert gradient(cell.w) is None


def test_a_parameter_given_as_argument_gets_its_gradient():
    weight = Parameter(Tensor(np.ones(3, np.float32)), name="tied")
    cell = memory.recompute(Scale()).cell
    with tape():
        loss = cell(leaf_of([1, 2, 3]), (weight, Tensor(np.full(3, 5, np.float32))))[0].sum()
    backward(loss)
    np.testing.assert_array_equal(gradient(weight).asnumpy(), [5, 5, 5])


def test_a_result_that_is_the_input():
    class Both(nn.Cell):
        def construct(self, x):
            return x, x * 2

    cell = memory.recompute(Both()).cell
    x = leaf_of([1, 2, 3])
    with tape():
        same, double = cell(x)
        loss = (same * 10 + double).sum()
    backward(loss)
    np.testing.assert_array_equal(gradient(x).asnumpy(), [12, 12, 12])


def test_recompute_within_recompute():
    class Outer(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inner = Scale()

        def construct(self, x):
            return self.inner(x)[0] * x

    outer = Outer()
    results_of = []
    for wrapped in ((), (outer.inner,), (outer, outer.inner)):
        handles = [memory.recompute(cell) for cell in wrapped]
        clear_grads([outer.inner.w])
        x = leaf_of([1, 2, 3])
        with tape():
            loss = outer(x).sum()
        backward(loss)
        results_of.append({"x": gradient(x).asnumpy(), "w": gradient(outer.inner.w).asnumpy()})
        for handle in handles:
            handle.remove()
    assert_bitwise(results_of[1], results_of[0])
    assert_bitwise(results_of[2], results_of[0])


def test_gradient_hooks_fire_once_per_cell_with_the_whole_gradient():
    cell = memory.recompute(Scale()).cell
    received = []

    def hook(grad):
        received.append(grad.asnumpy().tolist())
        return mint.zeros((1,))

    cell.w.register_hook(hook)
    with tape():
        loss = cell(leaf_of([1, 2, 3]), power=2)[0].sum()
    backward(loss)
    assert received == [[1, 4, 9]]
    assert gradient(cell.w).shape == (1,)  # what the hook returned: the full gradient is gone


def test_several_microbatches_in_flight():
    model = build()
    data = [batch(seed) for seed in range(3)]

    def run():
        clear_grads(model.get_parameters())
        with tape():
            losses = [forward(model, each) for each in data]
        for loss in losses:
            backward(loss)
        return results(model, losses[-1])

    plain = run()
    memory.apply_recompute(model, "full")
    assert_bitwise(run(), plain)


def test_hooks_of_the_cell_stay_outside_and_those_of_inner_cells_fire_again():
    class Block(nn.Cell):
        def __init__(self):
            super().__init__()
            self.inner = Scale()

        def construct(self, x):
            return self.inner(x)[0]

    block, log = Block(), []
    block.register_forward_pre_hook(lambda cell, args: log.append("unshard"))
    block.register_forward_hook(lambda cell, args, out: log.append("reshard"))
    block.register_backward_pre_hook(lambda cell, grad: log.append("unshard again"))
    block.register_backward_hook(lambda cell, grad_in, grad_out: log.append("reshard again"))
    block.inner.register_forward_hook(lambda cell, args, out: log.append("inner"))
    block.inner.w.register_hook(lambda grad: log.append("gradient"))
    memory.recompute(block)
    with tape():
        loss = block(leaf_of([1, 2, 3])).sum()
    log.append("backward")
    backward(loss)
    expected = ["unshard", "inner", "reshard", "backward"]
    assert log == [*expected, "unshard again", "inner", "gradient", "reshard again"]


def test_weights_that_exist_only_between_the_hooks_serve_the_second_forward_too():
    """What stage 3 does: two fetches a step, and a placeholder at any other time."""
    model = build(num_layers=2)
    plain = step(model)
    blocks = memory.find_blocks(model)
    fetched = dict.fromkeys(blocks, 0)
    for path, block in blocks.items():
        weights = [(param, param.data) for param in block.get_parameters()]
        placeholder = mint.zeros((1,))

        def fetch(*_, path=path, weights=weights):
            fetched[path] += 1
            for param, full in weights:
                param.data = full

        def free(*_, weights=weights, placeholder=placeholder):
            for param, _ in weights:
                param.data = placeholder

        free()
        block.register_forward_pre_hook(fetch)
        block.register_forward_hook(free)
        block.register_backward_pre_hook(fetch)
        block.register_backward_hook(free)
    memory.apply_recompute(model, "full")
    assert_bitwise(step(model), plain)
    assert set(fetched.values()) == {2}
    assert all(param.shape == (1,) for block in blocks.values() for param in block.get_parameters())


def test_the_activations_of_the_first_forward_are_gone():
    class Keep(nn.Cell):
        def __init__(self):
            super().__init__()
            self.made = []

        def construct(self, x):
            y = x * x
            self.made.append(weakref.ref(y))
            return y * y

    for wrap, alive in ((memory.recompute, False), (lambda cell: cell, True)):
        cell = Keep()
        wrap(cell)
        saved = []
        with tape(), ms.saved_tensors_hooks(lambda t, saved=saved: saved.append(t.asnumpy()), lambda t: t):
            out = cell(leaf_of(np.arange(4)))
        assert out is not None and cell.made[0]() is None
        assert [a.tolist() for a in saved].count([0, 1, 4, 9]) == (2 if alive else 0)


def live_tensors():
    gc.collect()
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


def test_no_tensor_is_left_over_after_200_steps():
    blocks = [nn.SequentialCell([nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 4)]) for _ in range(2)]
    model = nn.SequentialCell(blocks)
    for block in model:
        block.register_backward_hook(lambda *_: None)
        memory.recompute(block, enclosing=[model])
    x = Tensor(np.ones((2, 4), np.float32))

    def train():
        clear_grads(model.get_parameters())
        with tape():
            loss = model(x).sum()
        backward(loss)

    train()
    before = live_tensors()
    for _ in range(200):
        train()
    assert live_tensors() == before


def test_an_error_in_the_second_forward_restores_random_state_and_tape():
    class Fails(nn.Cell):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def construct(self, x):
            self.calls += 1
            if self.calls == 2:
                raise KeyError("second")
            return x * 2

    cell = memory.recompute(Fails()).cell
    with tape():
        loss = cell(leaf_of([1, 2, 3])).sum()
    state = ms.get_rng_state().asnumpy().copy()
    ms.set_rng_state(Tensor(state))
    with pytest.raises(KeyError, match="second"):
        backward(loss)
    np.testing.assert_array_equal(ms.get_rng_state().asnumpy(), state)
    x = leaf_of([1.0])
    outside = x * 2
    with tape():
        loss = (x + ops.stop_gradient(outside)).sum()
    backward(loss)
    np.testing.assert_array_equal(gradient(x).asnumpy(), [1])


def test_state_named_by_a_cell_is_that_of_the_first_forward():
    class Position:
        value = 1.0

        def capture(self):
            return self.value

        def restore(self, captured):
            self.value = captured

    class Uses(nn.Cell):
        def __init__(self, position):
            super().__init__()
            self.replayed_state = position

        def construct(self, x):
            return x * self.replayed_state.value

    position = Position()
    cell = memory.recompute(Uses(position)).cell
    x, losses = leaf_of([1.0]), []
    with tape():
        for value in (1.0, 10.0, 100.0):
            position.value = value
            losses.append(cell(x).sum())
    position.value = 7.0
    for loss, expected in zip(losses, (1, 11, 111), strict=True):
        backward(loss)
        assert gradient(x).asnumpy().tolist() == [expected] and position.value == 7.0


def test_evaluation_runs_forward_once():
    cell = memory.recompute(Scale()).cell
    with no_grad():
        cell(Tensor(np.ones(3, np.float32)))
    assert cell.calls == 1


def test_the_public_way_of_taking_gradients_is_refused_where_it_would_lose_some(monkeypatch):
    cell = memory.recompute(Scale()).cell
    x = Tensor(np.ones(3, np.float32))
    with monkeypatch.context() as patch, tape():  # an error within value_and_grad leaves MindSpore recording
        patch.setattr(sys.modules["ms_zero.memory.recompute"], "is_taped", lambda: False)
        with pytest.raises(UserError, match="the parameters of a recomputed cell get no gradient"):
            cell(x)
    cell.w.requires_grad = False
    _, grad = ms.value_and_grad(lambda x: cell(x)[0].sum(), 0)(x)
    assert grad.asnumpy().tolist() == [2, 2, 2]


def test_refusals():
    cell = Scale()
    memory.recompute(cell)
    with pytest.raises(UserError, match="Scale is recomputed already"):
        memory.recompute(cell)
    with pytest.raises(UserError, match=r"Dropout cannot repeat its mask on CPU: use ms_zero.models.Dropout"):
        memory.recompute(nn.SequentialCell([nn.Dense(2, 2), nn.Dropout(p=0.5)]))
    memory.recompute(nn.SequentialCell([nn.Dense(2, 2), nn.Dropout(p=0.0)]))
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(UserError, match="PyNative mode"):
            memory.recompute(Scale())
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
