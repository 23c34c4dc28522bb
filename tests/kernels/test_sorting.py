"""Choices sorted by expert: by numpy and as on devices, with a stand-in where CPUs have no kernel."""

import inspect

import numpy as np
import pytest
from mindspore import Tensor, mint

from ms_zero import kernels
from ms_zero.kernels.sorting import ascending_of


@pytest.fixture
def stable_sort(monkeypatch):
    """Stands for `mint.sort`, which CPUs have not; takes what that takes."""
    signature = inspect.signature(mint.sort)

    def sort(*args, **kwargs):
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        assert given.arguments["stable"] and not given.arguments["descending"]
        values = given.arguments["input"].asnumpy()
        assert values.dtype == np.float32
        order = np.argsort(values, axis=given.arguments["dim"], kind="stable")
        return Tensor(np.take_along_axis(values, order, -1)), Tensor(order)

    monkeypatch.setattr(mint, "sort", sort)


@pytest.mark.parametrize("target", ["CPU", "GPU", "Ascend"])
def test_choices_are_sorted_by_expert_and_then_by_token(target, stable_sort):
    ids = Tensor(np.array([[2, 0], [0, -1], [3, 2]], np.int32))
    tokens, places, counts = kernels.SortByExpert(target)(ids, 5)
    assert tokens.asnumpy().tolist() == [0, 1, 0, 2, 2]
    assert places.asnumpy().tolist() == [[2, 0], [1, -1], [4, 3]]
    assert counts == (2, 0, 2, 1, 0)


@pytest.mark.parametrize("target", ["GPU", "Ascend"])
def test_a_device_sorts_as_the_host_does(target, stable_sort):
    rng = np.random.default_rng(0)
    for tokens, choices, experts in ((1, 1, 1), (7, 2, 3), (200, 8, 64), (40, 3, 2)):
        ids = Tensor(rng.integers(-1, experts, (tokens, choices)).astype(np.int32))
        host, device = kernels.SortByExpert("CPU")(ids, experts), kernels.SortByExpert(target)(ids, experts)
        assert host.counts == device.counts
        for mine, theirs in zip(host[:2], device[:2], strict=True):
            assert mine.dtype == theirs.dtype and np.array_equal(mine.asnumpy(), theirs.asnumpy())


def test_no_choice_at_all_gives_no_rows():
    ids = Tensor(np.full((3, 2), -1, np.int32))
    for target in ("CPU", "GPU"):
        tokens, places, counts = kernels.SortByExpert(target)(ids, 4)
        assert tokens.shape == (0,) and counts == (0,) * 4 and (places.asnumpy() == -1).all()


def test_of_equal_values_the_first_comes_first():
    values = np.array([[0.5, -np.inf, 0.5, 0.1, -np.inf], [1, 1, 1, 1, 1]], np.float32)
    ascending, order = ascending_of("GPU")(Tensor(values))
    assert np.array_equal(order.asnumpy(), np.argsort(values, -1, kind="stable"))
    assert np.array_equal(ascending.asnumpy(), np.sort(values, -1))
