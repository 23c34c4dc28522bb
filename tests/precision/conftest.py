import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import _compat
from ms_zero.precision.autocast import fp32_parameters
from ms_zero.precision.cast import round_array


@pytest.fixture(scope="session", autouse=True)
def blocking():
    _compat.launch_blocking()


@pytest.fixture(scope="session")
def make_working():
    """make_working(cell, policy): replace every parameter by its working copy, as the engine does."""

    def replace(cell, policy, fp32=()):
        working, wide = policy.working("CPU"), fp32_parameters(cell, fp32)
        for name, parameter in cell.parameters_and_names():
            values = parameter.asnumpy()
            if working.grid:
                parameter.data = Tensor(round_array(values))
            elif working.dtype == ms.float16 and name not in wide:
                parameter.data = Tensor(values.astype(np.float16))

    return replace


@pytest.fixture(scope="session")
def gradients():
    """gradients(cell, *args, seed=None): the output on the tape and the gradients of parameters by name."""

    def run(cell, *args, seed=None, **kwargs):
        with _compat.tape():
            out = cell(*args, **kwargs)
        _compat.backward(out, seed)
        found = {name: parameter._grad for name, parameter in cell.parameters_and_names()}
        _compat.clear_grads(cell.get_parameters())
        return out, found

    return run
