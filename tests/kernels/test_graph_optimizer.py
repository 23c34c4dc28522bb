"""The fused update and the statistics inside compiled graphs, against the numpy reference."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from ms_zero.errors import UserError
from ms_zero.kernels import reference
from ms_zero.kernels.graph_optimizer import FusedAdamW, SumOfSquares

HYPER = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
N = 1003


class Step(nn.Cell):
    """The update of a flat parameter and the sum of squares of its gradient."""

    def __init__(self, initial, low_dtype):
        super().__init__()
        values = [initial, np.zeros(N, np.float32), np.zeros(N, np.float32)]
        names = ("param", "exp_avg", "exp_avg_sq")
        self.state = ms.ParameterTuple([Parameter(Tensor(v), name=name) for v, name in zip(values, names)])
        low = Tensor(np.zeros(N, np.float32)).astype(low_dtype or ms.float16)
        self.low = Parameter(low, name="low") if low_dtype else None
        self.update, self.stats = FusedAdamW(low_dtype is not None), SumOfSquares()

    def construct(self, grad, scalars):
        total = self.stats(grad)
        if self.low is not None:
            return total, self.update(*self.state, grad, scalars, self.low)
        return total, self.update(*self.state, grad, scalars)


def bits(tensor):
    array = tensor.asnumpy()
    return array.view(np.uint16) if tensor.dtype == ms.bfloat16 else array


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """MindSpore leaves a folder custom_kernel_meta where a custom operator is made."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(params=["graph", "pynative"])
def mode(request):
    ms.set_context(mode=ms.GRAPH_MODE if request.param == "graph" else ms.PYNATIVE_MODE)
    yield request.param
    ms.set_context(mode=ms.PYNATIVE_MODE)


@pytest.mark.parametrize(
    ("grad_dtype", "low_dtype"),
    [(ms.float32, None), (ms.float16, ms.float16), (ms.bfloat16, ms.bfloat16)],
    ids=["fp32", "fp16", "bf16"],
)
def test_steps_in_a_graph_have_the_bits_of_the_reference(mode, grad_dtype, low_dtype):
    rng = np.random.default_rng(1)
    initial, *slopes = rng.standard_normal((4, N)).astype(np.float32)
    step = Step(initial, low_dtype)
    expected = [initial.copy(), np.zeros(N, np.float32), np.zeros(N, np.float32)]
    low = {None: None, ms.float16: np.zeros(N, np.float16), ms.bfloat16: np.zeros(N, np.uint16)}[low_dtype]
    for number, slope in enumerate(slopes, 1):
        grad = Tensor(slope).astype(grad_dtype)
        # The third step is told that an overflow was found: nothing may change.
        scalars = reference.adamw_scalars(**HYPER, step=number, found_inf=float(number == 3))
        total, token = step(grad, Tensor(scalars))
        reference.adamw(*expected, bits(grad), low, scalars)
        assert total.asnumpy() == reference.sum_of_squares(bits(grad)) and total.shape == ()
        assert token.asnumpy().tolist() == [float(number != 3)]
    assert all(np.array_equal(*pair) for pair in zip([p.asnumpy() for p in step.state], expected))
    if low is not None:
        assert np.array_equal(bits(step.low), low)


def test_a_device_without_the_operator_is_refused():
    with pytest.raises(UserError, match="FusedAdamW has no implementation for GPU: available for"):
        FusedAdamW(target="GPU")
    with pytest.raises(UserError, match=r"use hardware\.kernels=native"):
        SumOfSquares("CPU-portable")
