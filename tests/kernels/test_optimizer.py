import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import kernels
from ms_zero.errors import UserError

# The primitives that serve GPU exist on CPU too: their arithmetic is checked, not their CUDA kernels.
all_targets = pytest.mark.parametrize("target", ["CPU", "CPU-portable", "GPU"])

HYPER = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def adamw(param, exp_avg, exp_avg_sq, grad, *, lr, beta1, beta2, eps, weight_decay, step, grad_scale=1.0):
    """torch.optim.AdamW in float64, at the rates that fp32 can hold."""
    beta1, beta2 = float(np.float32(beta1)), float(np.float32(beta2))
    grad = grad * grad_scale
    param = param * (1 - lr * weight_decay)
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad**2
    denominator = np.sqrt(exp_avg_sq / (1 - beta2**step)) + eps
    return param - lr * (exp_avg / (1 - beta1**step)) / denominator, exp_avg, exp_avg_sq


def run_adamw(target, initial, grads, **options):
    """fp32 kernel and float64 reference, (param, exp_avg, exp_avg_sq) each, after all gradients."""
    zeros = np.zeros(initial.shape, np.float32)
    state = [Tensor(initial.copy()), Tensor(zeros.copy()), Tensor(zeros.copy())]
    exact = (initial.astype(np.float64), zeros.astype(np.float64), zeros.astype(np.float64))
    for number, grad in enumerate(grads, 1):
        kernels.adamw_update(*state, Tensor(grad), step=number, target=target, **options)
        exact = adamw(*exact, grad.astype(np.float64), step=number, **options)
    return [tensor.asnumpy() for tensor in state], exact


@all_targets
@pytest.mark.parametrize(
    "change",
    [{}, {"weight_decay": 0.0}, {"grad_scale": 0.125}, {"eps": 1e-3}, {"beta1": 0.0}, {"beta2": 0.999}],
)
def test_adamw_equals_the_formula(target, change):
    rng = np.random.default_rng(1)
    initial = rng.standard_normal(1001).astype(np.float32)
    # Gradients from 1e-6 to 1e2: eps and the bias corrections both matter.
    grads = (rng.standard_normal((8, 1001)) * 10.0 ** rng.integers(-6, 3, 1001)).astype(np.float32)
    found, exact = run_adamw(target, initial, grads, **HYPER | change)
    for left, right in zip(found, exact, strict=True):
        assert np.abs(left - right).max() <= 2e-6 * np.abs(right).max()
    moved = np.abs(exact[0] - initial).max()
    assert np.abs((found[0] - initial) - (exact[0] - initial)).max() <= 1e-4 * moved


@all_targets
def test_first_step_moves_by_the_learning_rate_whatever_the_gradient(target):
    initial = np.zeros(4, np.float32)
    grad = np.array([1e-4, -1.0, 1e4, 0.0], np.float32)
    (param, _, _), _ = run_adamw(target, initial, [grad], **HYPER)
    assert np.allclose(param, [-3e-3, 3e-3, -3e-3, 0], rtol=2e-4, atol=0)


@all_targets
def test_adamw_leaves_the_gradient_and_shows_through_views(target):
    flat, grad = Tensor(np.ones(12, np.float32)), Tensor(np.full(12, 2, np.float32))
    view = flat[4:10].reshape(2, 3)
    moments = [Tensor(np.zeros(12, np.float32)) for _ in range(2)]
    kernels.adamw_update(flat, *moments, grad, step=1, grad_scale=0.5, target=target, **HYPER)
    assert np.array_equal(view.asnumpy(), flat.asnumpy()[4:10].reshape(2, 3))
    assert not np.array_equal(view.asnumpy(), np.ones((2, 3)))
    assert np.array_equal(grad.asnumpy(), np.full(12, 2))


@all_targets
def test_sgd_equals_the_formula(target):
    rng = np.random.default_rng(2)
    initial, grad = rng.standard_normal((2, 501)).astype(np.float32)
    param = Tensor(initial.copy())
    kernels.sgd_update(param, Tensor(grad), lr=0.1, weight_decay=0.5, grad_scale=0.25, target=target)
    assert np.abs(param.asnumpy() - (initial * 0.95 - 0.025 * grad)).max() < 1e-6


@pytest.mark.parametrize("update", ["adamw", "sgd"])
def test_a_part_of_a_storage_is_refused(update):
    flat, grad = Tensor(np.ones(8, np.float32)), Tensor(np.ones(4, np.float32))
    whole = [Tensor(np.ones(4, np.float32)) for _ in range(2)]
    with pytest.raises(AssertionError, match="view cannot be updated in place"):
        if update == "adamw":
            kernels.adamw_update(flat[2:6], *whole, grad, step=1, **HYPER)
        else:
            kernels.sgd_update(flat[:4], grad, lr=0.1)
    assert np.array_equal(flat.asnumpy(), np.ones(8))


@all_targets
def test_sum_of_squares_is_accurate_for_ten_million_elements(target):
    values = np.random.default_rng(3).uniform(0.5, 1.5, 10_000_019).astype(np.float32)
    exact = (values.astype(np.float64) ** 2).sum()
    total = kernels.sum_of_squares(Tensor(values), target=target)
    assert total.shape == ()
    assert total.dtype == ms.float32
    assert abs(float(total.asnumpy()) - exact) < 1e-6 * exact
    again = [kernels.sum_of_squares(Tensor(values), target=target) for _ in range(3)]
    assert {float(repeated.asnumpy()) for repeated in again} == {float(total.asnumpy())}


@pytest.mark.parametrize("target", ["CPU", "CPU-portable"])
def test_parts_of_a_sum_of_squares_do_not_show_where_tensors_end(target):
    rng = np.random.default_rng(11)
    for _ in range(20):
        values = (rng.standard_normal(5_001) * 10 ** rng.uniform(-3, 3)).astype(np.float32)
        cuts = [0, *sorted(rng.integers(0, values.size, 4).tolist()), values.size]
        pieces = [Tensor(values[a:b].copy()) for a, b in itertools.pairwise(cuts) if a < b]
        ranks = pieces[:2], pieces[2:], []
        parts = [kernels.squares_in_parts(rank, target=target).asnumpy() for rank in ranks]
        exact = np.square(values, dtype=np.float64).sum()
        assert np.float32(np.concatenate(parts).sum(dtype=np.float64)) == np.float32(exact)


@all_targets
def test_parts_of_a_sum_of_squares_add_up_and_show_what_is_not_finite(target):
    values = np.linspace(-2, 3, 1000).astype(np.float32)
    tensors = [Tensor(values[:300].copy()), Tensor(values[300:].copy())]
    parts = kernels.squares_in_parts(tensors, target=target).asnumpy()
    assert parts.shape == (2,) and parts.dtype == np.float32
    exact = np.square(values, dtype=np.float64).sum()
    assert abs(parts.sum(dtype=np.float64) - exact) < 1e-6 * exact
    for bad in (np.inf, np.nan, 3e38):
        wrong = [*tensors, Tensor(np.array([1, bad], np.float32))]
        total = kernels.squares_in_parts(wrong, target=target).asnumpy().sum(dtype=np.float64)
        assert not np.isfinite(np.float32(total))


@all_targets
def test_sum_of_squares_keeps_small_values_beside_a_large_one(target):
    values = np.full(1_000_003, 0.1, np.float32)
    values[7] = 100.0
    exact = (values.astype(np.float64) ** 2).sum()
    assert abs(float(kernels.sum_of_squares(Tensor(values), target=target).asnumpy()) - exact) < 1e-6 * exact


@all_targets
@pytest.mark.parametrize(
    "bad, expected", [(np.inf, np.inf), (-np.inf, np.inf), (np.nan, np.nan), (1e30, np.inf)]
)
def test_sum_of_squares_is_not_finite_when_an_element_is_not(bad, expected, target):
    values = np.ones(70_001, np.float32)
    values[60_000] = bad
    total = kernels.sum_of_squares(Tensor(values), target=target)
    assert np.array_equal(total.asnumpy(), expected, equal_nan=True)


def test_an_update_does_not_depend_on_where_an_element_lies():
    """A shard must update like the whole: the same values at another offset and length give the same bits."""
    rng = np.random.default_rng(6)
    values = [rng.standard_normal(70_001).astype(np.float32) for _ in range(3)]
    whole = [Tensor(values[0].copy()), Tensor(values[1].copy()), Tensor(values[2] ** 2)]
    part = [Tensor(tensor.asnumpy()[30_007:50_000].copy()) for tensor in whole]
    grad = rng.standard_normal(70_001).astype(np.float32)
    kernels.adamw_update(*whole, Tensor(grad), step=3, target="CPU", **HYPER)
    kernels.adamw_update(*part, Tensor(grad[30_007:50_000].copy()), step=3, target="CPU", **HYPER)
    for left, right in zip(whole, part, strict=True):
        assert np.array_equal(left.asnumpy()[30_007:50_000], right.asnumpy())


def bits_of(tensor):
    """An array that can be compared; bf16 as its bits."""
    array = tensor.asnumpy()
    return array.view(np.uint16) if tensor.dtype == ms.bfloat16 else array


@all_targets
@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16], ids=str)
def test_a_16_bit_gradient_is_read_and_a_16_bit_parameter_written(target, dtype):
    rng = np.random.default_rng(7)
    initial, slope = rng.standard_normal((2, 1003)).astype(np.float32)
    grad = Tensor(slope).astype(dtype)
    wide = Tensor(grad.astype(ms.float32).asnumpy())
    results = []
    for given, low in ((grad, Tensor(np.zeros(1003, np.float32)).astype(dtype)), (wide, None)):
        state = [Tensor(initial.copy()), *(Tensor(np.zeros(1003, np.float32)) for _ in range(2))]
        kernels.adamw_update(*state, given, step=1, low_precision=low, target=target, **HYPER)
        if low is not None:
            assert np.array_equal(bits_of(low), bits_of(state[0].astype(dtype)))
        kernels.sgd_update(state[0], given, lr=0.5, weight_decay=0.1, low_precision=low, target=target)
        if low is not None:
            assert np.array_equal(bits_of(low), bits_of(state[0].astype(dtype)))
        results.append([tensor.asnumpy() for tensor in state])
    assert all(np.array_equal(*pair) for pair in zip(*results, strict=True))
    found = [float(kernels.sum_of_squares(each, target=target).asnumpy()) for each in (grad, wide)]
    assert found[0] == found[1]


def test_native_and_portable_updates_are_the_same_to_the_last_bit():
    rng = np.random.default_rng(8)
    initial, *grads = rng.standard_normal((5, 40_003)).astype(np.float32)
    runs = [run_adamw(target, initial, grads, **HYPER)[0] for target in ("CPU", "CPU-portable")]
    assert all(np.array_equal(*pair) for pair in zip(*runs, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad": np.ones(5, np.float32)}, "lengths differ from 4"),
        ({"grad": np.ones(4, np.int32)}, "expected a float dtype"),
        ({"grad": np.ones((2, 2), np.float32)}, "expected a flat tensor"),
        ({"low": np.ones(4, np.float32)}, "low_precision is Float32"),
        ({"low": np.ones(3, np.float16)}, "lengths differ from 4"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change, message):
    state = [Tensor(np.ones(4, np.float32)) for _ in range(3)]
    grad, low = Tensor(change.get("grad", np.ones(4, np.float32))), change.get("low")
    low = None if low is None else Tensor(low)
    with pytest.raises(AssertionError, match=message):
        kernels.adamw_update(*state, grad, step=1, low_precision=low, target="CPU", **HYPER)


def test_a_default_target_holds_within_its_block_only(monkeypatch):
    from ms_zero.kernels import native_optimizer

    def no_library(*args, **options):
        raise AssertionError("the library was used")

    monkeypatch.setattr(native_optimizer, "sum_of_squares", no_library)
    values = Tensor(np.ones(4, np.float32))
    with kernels.default_target("CPU-portable"):
        assert float(kernels.sum_of_squares(values).asnumpy()) == 4
        assert kernels.sum_of_squares_host(np.ones(3, np.float32)) == 3
        with pytest.raises(AssertionError, match="was used"):
            kernels.sum_of_squares(values, target="CPU")
    with pytest.raises(AssertionError, match="was used"):
        kernels.sum_of_squares(values)


@pytest.mark.parametrize("target", ["GPU-custom", "Ascend-custom"])
def test_own_kernels_that_are_not_built_are_refused_and_not_replaced(target, monkeypatch):
    from ms_zero.kernels import ascend_custom, cuda_custom

    monkeypatch.setattr(cuda_custom, "find_cuda_library", lambda: None)
    monkeypatch.setattr(ascend_custom, "why_unusable", lambda: "the AscendC operators were not built")
    state = [Tensor(np.ones(4, np.float32)) for _ in range(4)]
    with pytest.raises(UserError, match="not built"):
        kernels.adamw_update(*state, step=1, target=target, **HYPER)
    with pytest.raises(UserError, match="not built"):
        kernels.sum_of_squares(state[0], target=target)
    with pytest.raises(UserError, match="not built"):
        kernels.require_built(target)
