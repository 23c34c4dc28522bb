"""AdamW against torch.optim.AdamW (skipped where torch is not installed)."""

import numpy as np
import pytest

from ms_zero import _compat
from ms_zero.optim import AdamW
from tests.optim.models import give, sharded, weights

torch = pytest.importorskip("torch")

STEPS, SIZE = 50, 4099


@pytest.mark.parametrize("change", [{}, {"weight_decay": 0.0}, {"eps": 1e-4, "betas": (0.8, 0.999)}])
def test_fifty_steps_with_a_changing_rate_agree(change):
    """Torch in float64 is the reference, torch in float32 shows what rounding is worth."""
    _compat.launch_blocking()
    options = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, **change}
    rng = np.random.default_rng(0)
    start = rng.standard_normal(SIZE).astype(np.float32)
    grads = (rng.standard_normal((STEPS, SIZE)) * 10.0 ** rng.integers(-5, 2, SIZE)).astype(np.float32)
    rates = [3e-3 * min(1.0, (step + 1) / 10) for step in range(STEPS)]
    exact = torch_run(torch.float64, start, grads, rates, options)
    rounding = np.abs(torch_run(torch.float32, start, grads, rates, options) - exact).max()

    model = sharded(vector=start)
    beta1, beta2 = options.pop("betas")
    optimizer = AdamW(model, beta1=beta1, beta2=beta2, **options)
    for grad, rate in zip(grads, rates, strict=True):
        give(model, vector=grad)
        optimizer.apply(lr=rate)
    assert np.abs(exact - start).max() > 0.05
    assert np.abs(weights(model)["vector"] - exact).max() < 2 * rounding


def torch_run(dtype, start, grads, rates, options):
    param = torch.nn.Parameter(torch.tensor(start, dtype=dtype))
    optimizer = torch.optim.AdamW([param], **options)
    for grad, rate in zip(grads, rates, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        param.grad = torch.tensor(grad, dtype=dtype)
        optimizer.step()
    return param.detach().numpy().astype(np.float64)
