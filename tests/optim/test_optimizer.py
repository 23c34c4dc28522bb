import numpy as np
import pytest

from ms_zero import _compat
from ms_zero.errors import UserError
from ms_zero.optim import SGD, AdamW, GroupOptions
from ms_zero.precision.policy import Policy
from ms_zero.zero import HostStates, NvmeStates
from tests.optim.models import give, sharded, weights

MATRIX, VECTOR = np.full((2, 3), 2.0), np.full(5, 2.0)


@pytest.fixture(scope="module", autouse=True)
def blocking():
    _compat.launch_blocking()


def constant(value):
    return {"matrix": np.full((2, 3), value), "vector": np.full(5, value)}


def test_weight_decay_of_a_group_overrides_the_general_one():
    for make in (AdamW, SGD):
        model = sharded(matrix=MATRIX, vector=VECTOR)
        optimizer = make(model, weight_decay=0.5, groups={False: GroupOptions(weight_decay=0.0)})
        give(model, **constant(0.0))
        optimizer.apply(lr=0.1)
        np.testing.assert_allclose(weights(model)["matrix"], 2.0 * (1 - 0.05), rtol=1e-6)
        np.testing.assert_array_equal(weights(model)["vector"], 2.0)


def test_the_learning_rate_of_a_group_is_scaled():
    model = sharded(matrix=MATRIX, vector=VECTOR)
    optimizer = SGD(model, groups={True: GroupOptions(0.0, lr_scale=0.1)})
    give(model, **constant(1.0))
    optimizer.apply(lr=1.0)
    np.testing.assert_allclose(weights(model)["matrix"], 1.9, rtol=1e-6)
    np.testing.assert_allclose(weights(model)["vector"], 1.0, rtol=1e-6)


def test_adamw_keeps_moments_and_counts_updates():
    model = sharded(matrix=MATRIX, vector=VECTOR)
    optimizer = AdamW(model, beta1=0.5, beta2=0.75, eps=1e-8)
    for value in (4.0, 0.0):
        give(model, **constant(value))
        optimizer.apply(lr=0.1)
    for index in range(2):
        np.testing.assert_allclose(optimizer.read(index, "exp_avg"), 1.0)
        np.testing.assert_allclose(optimizer.read(index, "exp_avg_sq"), 3.0)
    assert optimizer.num_updates == 2


def test_wrong_arguments_are_named():
    model, held = sharded(matrix=MATRIX, vector=VECTOR), HostStates()
    for make, message in (
        (lambda: AdamW([1]), "the model is list: expected what zero.shard"),
        (lambda: AdamW(model, fraction=1.5), "fraction is 1.5: expected a number from 0 to 1"),
        (lambda: AdamW(model, beta1=1.0), "beta1 is 1.0"),
        (lambda: AdamW(model, beta2=None), "beta2 is None"),
        (lambda: AdamW(model, eps=0), "eps is 0: expected a finite number above 0"),
        (lambda: AdamW(model, weight_decay="0.1"), "weight_decay is '0.1'"),
        (lambda: AdamW(model, offload="cpu"), r"offload is 'cpu': expected zero.HostStates\(\)"),
        (lambda: AdamW(model, groups={"decay": GroupOptions(0.0)}), "'decay': the groups are False, True"),
        (lambda: AdamW(model, groups={True: 0.1}), "group True are 0.1: expected optim.GroupOptions"),
        (lambda: AdamW(model, offload=held).step(lr=float("nan")), "lr is nan: expected a finite number"),
        (lambda: AdamW(sharded(vector=VECTOR), offload=held), "state of another optimizer"),
        (lambda: SGD(sharded(vector=VECTOR)).step(lr=0.1, clip_norm=-1), "clip_norm is -1"),
    ):
        with pytest.raises(UserError, match=message):
            make()


def test_gradients_are_scaled_before_use_and_dropped_after():
    model = sharded(matrix=MATRIX, vector=VECTOR)
    give(model, **constant(4.0))
    SGD(model).apply(lr=1.0, grad_scale=0.25)
    np.testing.assert_allclose(weights(model)["vector"], 1.0)
    assert all(bucket.reduced is None for bucket in model.buckets)


def test_a_step_that_is_not_finite_changes_nothing():
    model = sharded("fp16", matrix=MATRIX, vector=VECTOR)
    optimizer = AdamW(model, weight_decay=0.5)
    before, scale = weights(model), model.loss_scale
    for _ in range(2):  # the first overflow only spends hysteresis
        give(model, matrix=np.full((2, 3), np.inf), vector=np.ones(5))
        assert not optimizer.step(lr=0.1).finite
    assert {name: value.tolist() for name, value in weights(model).items()} == {
        name: value.tolist() for name, value in before.items()
    }
    assert optimizer.num_updates == 0 and model.loss_scale == scale / 2
    np.testing.assert_array_equal(optimizer.read(0, "exp_avg"), 0)


def test_clipping_uses_the_norm_without_the_loss_scale():
    model = sharded("fp16", matrix=np.zeros((1, 2)))
    give(model, matrix=np.array([[3.0, 4.0]]) * model.loss_scale)
    decision = SGD(model).step(lr=1.0, clip_norm=1.0)
    assert decision.norm == pytest.approx(5.0) and decision.scale == pytest.approx(0.2)
    np.testing.assert_allclose(weights(model)["matrix"], [[-0.6, -0.8]], rtol=1e-3)


def test_master_weights_keep_what_16_bits_lose():
    """A hundred updates below half a unit in the last place of bf16 add up in the master weights only."""
    for master, expected in (("fp32", 1.1), ("param", 1.0)):
        model = sharded(Policy("bf16", "bf16", master=master), matrix=np.ones((2, 3)))
        optimizer = SGD(model)
        for _ in range(100):
            give(model, matrix=np.full((2, 3), -1.0))
            optimizer.apply(lr=1e-3)
        np.testing.assert_allclose(weights(model)["matrix"], expected, rtol=4e-3)


def test_stored_weights_are_a_rounding_of_the_master_weights():
    rng = np.random.default_rng(0)
    start, grad = rng.standard_normal((2, 31, 33)).astype(np.float32)
    plain, mixed = sharded(matrix=start), sharded("bf16", matrix=start)
    masters = AdamW(mixed)
    for optimizer, model in ((AdamW(plain), plain), (masters, mixed)):
        for _ in range(3):
            give(model, matrix=grad)
            optimizer.apply(lr=1e-2)
    np.testing.assert_array_equal(masters.read(0, "master"), weights(plain)["matrix"].ravel())
    found, exact = weights(mixed)["matrix"], weights(plain)["matrix"]
    assert np.abs(found - exact).max() <= np.abs(exact).max() * 2.0**-8
    assert (found.view(np.uint32) & 0xFFFF == 0).all()


@pytest.mark.parametrize("policy", ["fp32", "bf16"])
@pytest.mark.parametrize("fraction", [1.0, 0.5, 0.01])
def test_where_state_lives_changes_no_bit(tmp_path, policy, fraction):
    rng = np.random.default_rng(1)
    start, grads = rng.standard_normal((40, 50)), rng.standard_normal((3, 40, 50))
    results, places = [], []
    for offload in (None, HostStates(), NvmeStates(tmp_path / "states")):
        model = sharded(policy, matrix=start, vector=start[0])
        optimizer = AdamW(model, offload=offload, fraction=fraction)
        for grad in grads:
            give(model, matrix=grad, vector=grad[0])
            optimizer.apply(lr=1e-2)
        state = [optimizer.read(index, kind) for index in range(2) for kind in optimizer.kinds]
        results.append((weights(model), state))
        places.append(optimizer.held_bytes())
        optimizer.close()
    for ours, state in results[1:]:
        assert all((ours[name] == results[0][0][name]).all() for name in ours)
        assert all((a == b).all() for a, b in zip(state, results[0][1], strict=True))
    total = sum(places[0]["device"].values())
    for place, held in (("host", places[1]), ("nvme", places[2])):
        away = sum(held[place].values())
        assert away + sum(held["device"].values()) == total
        assert away == pytest.approx(fraction * total, rel=0.1)
    assert list((tmp_path / "states").iterdir()) == []


def test_state_can_be_overwritten_part_by_part():
    model = sharded("bf16", matrix=np.ones((8, 9)))
    optimizer = AdamW(model, offload=HostStates(), fraction=0.3)
    values = np.arange(72, dtype=np.float32)
    optimizer.write(0, "exp_avg", values)
    np.testing.assert_array_equal(optimizer.read(0, "exp_avg"), values)


def test_weights_load_before_the_optimizer_and_not_after():
    model = sharded("bf16", matrix=np.zeros((2, 2)))
    exact = np.array([[1.001, 2.002], [3.003, 4.004]], np.float32)
    model.load_state_dict({"matrix": exact})
    optimizer = AdamW(model)
    np.testing.assert_array_equal(optimizer.read(0, "master"), exact.ravel())
    with pytest.raises(UserError, match="before the optimizer is made"):
        model.load_state_dict({"matrix": exact})
