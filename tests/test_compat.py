import os

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ms_zero import _compat
from ms_zero.testing import run_workers


@pytest.fixture
def weight():
    return Parameter(Tensor(np.array([1.0, 2.0, 3.0], np.float32)), name="w")


def test_backward_fills_grad_of_parameters_and_inputs(weight):
    x = Tensor(np.array([4.0, 5.0, 6.0], np.float32))
    x.requires_grad_(True)
    with _compat.tape():
        loss = (weight * x).sum()
    _compat.backward(loss)
    np.testing.assert_array_equal(weight._grad.asnumpy(), [4, 5, 6])
    np.testing.assert_array_equal(x._grad.asnumpy(), [1, 2, 3])


def test_several_graphs_live_at_once_and_gradients_add_up(weight):
    losses = []
    for scale in (1.0, 10.0, 100.0):
        with _compat.tape():
            losses.append((weight * weight * scale).sum())
    for loss in losses:
        _compat.backward(loss)
    np.testing.assert_allclose(weight._grad.asnumpy(), np.array([1, 2, 3]) * 2 * 111.0)


def test_output_gradients_and_several_outputs(weight):
    with _compat.tape():
        first, second = weight * 2, weight * 3
    ones = ops.ones_like(first)
    _compat.backward((first, second), (ones, ones * 10))
    np.testing.assert_array_equal(weight._grad.asnumpy(), [32, 32, 32])


def test_inputs_limits_what_receives_a_gradient(weight):
    other = Parameter(Tensor(np.ones(3, np.float32)), name="other")
    with _compat.tape():
        loss = (weight * other).sum()
    _compat.backward(loss, inputs=(other,))
    assert weight._grad is None
    np.testing.assert_array_equal(other._grad.asnumpy(), [1, 2, 3])


def test_keep_graph_allows_a_second_backward(weight):
    with _compat.tape():
        loss = (weight * weight).sum()
    _compat.backward(loss, keep_graph=True)
    _compat.backward(loss)
    np.testing.assert_array_equal(weight._grad.asnumpy(), [4, 8, 12])


def test_no_grad_and_outside_of_the_tape_nothing_is_recorded(weight):
    with _compat.tape(), _compat.no_grad():
        constant = weight * 5
    with _compat.tape():
        loss = (weight * constant).sum()
    _compat.backward(loss)
    np.testing.assert_array_equal(weight._grad.asnumpy(), [5, 10, 15])


def test_a_tape_is_told_from_the_public_way(weight):
    seen = []

    def forward(x):
        seen.append((_compat.is_recording(), _compat.is_taped()))
        return (weight * x).sum()

    x = Tensor(np.ones(3, np.float32))
    forward(x)
    ms.value_and_grad(forward, 0)(x)
    with _compat.tape():
        forward(x)
    assert seen == [(False, False), (True, False), (True, True)] and not _compat.is_taped()


def test_tape_restores_the_previous_state_after_an_error(weight):
    with pytest.raises(KeyError), _compat.tape():
        raise KeyError
    outside = weight * 2
    with _compat.tape():
        loss = (weight * outside).sum()
    _compat.backward(loss)
    np.testing.assert_array_equal(weight._grad.asnumpy(), [2, 4, 6])


def test_function_class_uses_its_own_backward(weight):
    class Doubled(_compat.function_class):
        @staticmethod
        def forward(ctx, x, factor):
            ctx.factor = factor
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.factor, None

    with _compat.tape():
        loss = Doubled.apply(weight, 7.0).sum()
    _compat.backward(loss)
    np.testing.assert_array_equal(weight._grad.asnumpy(), [7, 7, 7])


def test_backward_inside_a_function_backward(weight):
    class Recomputed(_compat.function_class):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            (x,) = ctx.saved_tensors
            inner = x.data
            inner.requires_grad_(True)
            with _compat.tape():
                y = inner * inner
            _compat.backward(y, grad)
            return inner._grad

    with _compat.tape():
        loss = Recomputed.apply(weight * 1).sum()
    _compat.backward(loss)
    np.testing.assert_array_equal(weight._grad.asnumpy(), [2, 4, 6])


class Nested(_compat.function_class):
    """2 x, with a backward inside its backward."""

    @staticmethod
    def forward(ctx, around, x):
        ctx.around = around
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        with _compat.tape():
            inner = _compat.leaf(grad, requires_grad=True) * 2
        with _compat.nested_backward(ctx.around):
            _compat.backward(inner, grad)
        return None, grad * 2


@pytest.mark.parametrize("input_needs_gradient", [True, False])
def test_nested_backward_leaves_the_hooks_of_the_cells_around_it_waiting(weight, input_needs_gradient):
    class Twice(nn.Cell):
        def construct(self, x):
            return Nested.apply([self], Nested.apply([self], x * weight))

    cell, log = Twice(), []
    cell.register_backward_hook(lambda _, inputs, outputs: log.append((inputs[0], outputs[0].asnumpy()[0])))
    weight.register_hook(lambda grad: log.append("weight"))
    x = _compat.leaf(Tensor(np.ones(3, np.float32)), requires_grad=input_needs_gradient)
    for _ in range(2):
        log.clear()
        with _compat.tape():
            loss = cell(x).sum()
        _compat.backward(loss)
        assert len(log) == 2 and "weight" in log
        inputs, output = next(entry for entry in log if entry != "weight")
        assert output == 1
        assert (inputs is not None) == input_needs_gradient
        if input_needs_gradient:
            np.testing.assert_array_equal(inputs.asnumpy(), [4, 8, 12])


def test_backward_hooks_are_seen_until_they_are_removed():
    for register in ("register_backward_hook", "register_backward_pre_hook"):
        cell = nn.Dense(2, 2)
        cell.register_forward_hook(lambda *_: None)
        assert not _compat.has_backward_hooks(cell)
        handle = getattr(cell, register)(lambda *_: None)
        assert _compat.has_backward_hooks(cell)
        handle.remove()
        assert not _compat.has_backward_hooks(cell)


def test_leaf_shares_the_storage_but_not_the_graph(weight):
    with _compat.tape():
        y = weight * 2
        inner = _compat.leaf(y, requires_grad=True)
        loss = (inner * inner).sum()
    assert _compat.needs_gradient(y) and inner.data_ptr() == y.data_ptr()
    _compat.backward(loss)
    assert _compat.gradient(weight) is None
    np.testing.assert_array_equal(_compat.gradient(inner).asnumpy(), [4, 8, 12])


def test_a_leaf_wants_a_gradient_only_when_told(weight):
    assert _compat.needs_gradient(_compat.leaf(weight, requires_grad=True))
    assert not _compat.needs_gradient(_compat.leaf(weight, requires_grad=False))
    assert _compat.needs_gradient(weight)


def test_device_target_is_cpu_here():
    assert _compat.device_target() == ms.get_context("device_target") == "CPU"


def one_core_worker(comm):
    """A worker has one core; connecting has told the framework, which takes no second number."""
    _compat.run_without_pool()
    try:
        ms.device_context.cpu.op_tuning.threads_num(2)
    except RuntimeError as error:
        return [len(os.sched_getaffinity(0)), str(error)]


def test_a_worker_with_one_core_runs_operators_without_a_pool():
    ((cores, refusal),) = run_workers(1, one_core_worker)
    assert cores == 1
    assert "repeatedly" in refusal
