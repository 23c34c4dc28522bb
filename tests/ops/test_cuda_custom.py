"""The CUDA operators in MindSpore on kernels compiled for the host: the same interface and Cells."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

from ms_zero.errors import UserError
from ms_zero.kernels import cuda_custom, reference

N = 5000
MODES = [ms.PYNATIVE_MODE, ms.GRAPH_MODE]


@pytest.fixture(params=MODES, ids=["pynative", "graph"])
def mode(request):
    before = ms.get_context("mode")
    ms.set_context(mode=request.param)
    ms.runtime.launch_blocking()
    yield request.param
    ms.set_context(mode=before)


class Step(nn.Cell):
    """Parameters that the update changes, with a low-precision copy or without."""

    def __init__(self, arrays, low, library):
        super().__init__()
        self.p, self.m, self.v = (Parameter(Tensor(x), name=name) for x, name in zip(arrays, "pmv"))
        self.low = Parameter(Tensor(low), name="low") if low is not None else None
        self.update = cuda_custom.FusedAdamW(library)

    def construct(self, grad, scalars):
        if self.low is None:
            return self.update(self.p, self.m, self.v, grad, scalars)
        return self.update(self.p, self.m, self.v, grad, scalars, self.low)


@pytest.mark.parametrize("with_low", [False, True])
def test_two_steps_update_the_parameters_in_place(mode, cuda_libraries, with_low):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(N).astype(np.float32) for _ in range(3)]
    arrays[2] = np.abs(arrays[2])
    low = np.zeros(N, np.float16) if with_low else None
    step = Step(arrays, low, cuda_libraries["fused_adam_w"])
    expected, expected_low = [array.copy() for array in arrays], None if low is None else low.copy()
    for number, found, token in ((1, 0.0, 1.0), (2, 1.0, 0.0), (3, 0.0, 1.0)):
        grad = rng.standard_normal(N).astype(np.float16)
        scalars = reference.adamw_scalars(
            lr=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=number, found_inf=found
        )
        reference.adamw(*expected, grad, expected_low, scalars)
        assert step(Tensor(grad), Tensor(scalars)).asnumpy().tolist() == [token]
    for parameter, wanted in zip((step.p, step.m, step.v), expected):
        assert np.array_equal(parameter.asnumpy(), wanted)
    if with_low:
        assert np.array_equal(step.low.asnumpy(), expected_low)


def test_statistics_are_one_number(mode, cuda_libraries):
    compute = cuda_custom.SumOfSquares(cuda_libraries["grad_stats"])
    x = np.random.default_rng(1).standard_normal(N).astype(np.float32)
    result = compute(Tensor(x))
    assert result.shape == ()
    assert result.dtype == ms.float32
    assert abs(float(result.asnumpy()) / float((x.astype(np.float64) ** 2).sum()) - 1) < 2.0**-23
    x[17] = np.nan
    assert not np.isfinite(compute(Tensor(x)).asnumpy())


def test_a_missing_library_is_one_line(monkeypatch):
    monkeypatch.setattr(cuda_custom, "find_cuda_library", lambda: None)
    for make in (cuda_custom.FusedAdamW, cuda_custom.SumOfSquares):
        with pytest.raises(UserError, match="CUDA library was not built"):
            make()
