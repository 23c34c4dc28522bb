"""What can be trained in graphs, and what is refused before anything is compiled."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn

from ms_zero import graph
from ms_zero.errors import UserError
from ms_zero.graph.reduce import plan_buckets
from ms_zero.graph.update import step_scalars
from ms_zero.kernels import reference


class Holder(nn.Cell):
    def __init__(self, param):
        super().__init__(auto_prefix=False)
        self.param = param


class Network(nn.Cell):
    def __init__(self, *params):
        super().__init__(auto_prefix=False)
        self.holders = [Holder(param) for param in params]
        for index, holder in enumerate(self.holders):
            setattr(self, f"holder{index}", holder)


def parameter(name="w", dtype=np.float32, **options):
    return Parameter(Tensor(np.ones((2, 3), dtype)), name=name, **options)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([parameter(requires_grad=False)], "no parameter that wants a gradient"),
        ([parameter(), parameter()], r"two parameters are named \S+: give each a name"),
        ([Parameter(mint.empty((2,), dtype=ms.float32, device="meta"), name="w")], "has no values"),
        ([parameter(dtype=np.float16)], r"parameter \S+ is Float16: expected float32"),
    ],
)
def test_parameters_that_cannot_be_trained_are_refused(params, message):
    with pytest.raises(UserError, match=message):
        graph.build_step(Network(*params))


@pytest.mark.parametrize(
    ("sizes", "limit", "buckets"),
    [
        ([4, 4, 4], 8, ((0, 2), (2, 3))),
        ([9, 1, 1], 8, ((0, 1), (1, 3))),
        ([1, 9, 1], 8, ((0, 1), (1, 2), (2, 3))),
        ([3], 1, ((0, 1),)),
    ],
)
def test_buckets_hold_every_tensor_once_and_no_more_than_the_limit(sizes, limit, buckets):
    assert plan_buckets(sizes, limit) == buckets


def test_scalars_differ_in_decay_only_and_say_when_to_skip():
    rates = {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    for kind in ("adamw", "sgd"):
        decayed, plain = step_scalars(kind, lr=0.1, step=3, grad_scale=0.5, **rates)
        assert np.flatnonzero(decayed != plain).tolist() == [0]
        assert decayed[0] == np.float32(0.99) and plain[0] == 1 and decayed[reference.FOUND_INF] == 0
        skipped, _ = step_scalars(kind, lr=0.1, step=3, grad_scale=0.5, skip=True, **rates)
        assert skipped[reference.FOUND_INF] == 1
