"""The twins with strategies compute what the plain models do; on CPU, where strategies change nothing."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from ms_zero import kernels, models
from ms_zero.config import GPTConfig, LlamaConfig
from ms_zero.graph.strategies import Grid, RowNorm, ShardedCrossEntropySum, sharded_model

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "ffn_hidden_size": 64,
    "max_seq_len": 16,
    "norm_eps": 1e-5,
    "init_std": 0.1,
    "dropout": 0.0,
}
GPT = GPTConfig(**SIZES, tie_embeddings=True)
LLAMA = LlamaConfig(
    **SIZES, num_kv_heads=2, head_dim=8, tie_embeddings=False, rope_theta=1e4, rope_scaling=None
)


class ComposedRMSNorm(nn.Cell):
    """Stands for the operator that CPU lacks."""

    def __init__(self, eps):
        super().__init__()
        self.norm = kernels.RMSNorm(eps, "CPU-portable")

    def construct(self, x, weight):
        return (self.norm(x, weight),)


@pytest.mark.parametrize("config", [GPT, LLAMA], ids=["gpt", "llama"])
def test_twins_have_the_loss_and_the_gradients_of_the_plain_models(config):
    values = {key: value for key, value in vars(config).items() if key != "family"}
    plain = (models.GPT if config.family == "gpt" else models.Llama)(**values, target="CPU-portable")
    models.initialise(plain, 7)
    twin = sharded_model(plain, config, Grid(), ms.float32)
    for _, cell in twin.cells_and_names():
        if isinstance(cell, RowNorm) and cell.bias is None:
            cell.norm = ComposedRMSNorm(config.norm_eps)
    rng = np.random.default_rng(0)
    ids = Tensor(rng.integers(0, 64, (3, 16)).astype(np.int32))
    labels = rng.integers(0, 64, 48).astype(np.int32)
    labels[::5] = -100
    labels = Tensor(labels)
    plain_loss, twin_loss = kernels.CrossEntropySum(target="CPU-portable"), ShardedCrossEntropySum(64, Grid())
    params = ms.ParameterTuple(plain.trainable_params())
    assert [param.name for param in params] == [param.name for param in twin.trainable_params()]
    assert models.decay_names(twin) == models.decay_names(plain)

    expected, wanted = ops.value_and_grad(
        lambda: plain_loss(plain(ids).reshape((-1, 64)), labels), None, params
    )()
    loss, grads = ops.value_and_grad(lambda: twin_loss(twin(ids), labels), None, params)()
    np.testing.assert_allclose(loss.asnumpy(), expected.asnumpy(), rtol=1e-5)
    # The keys' bias has no gradient but what is rounded: it is measured by the others.
    largest = max(np.abs(want.asnumpy()).max() for want in wanted)
    for param, grad, want in zip(params, grads, wanted, strict=True):
        np.testing.assert_allclose(
            grad.asnumpy(), want.asnumpy(), rtol=1e-3, atol=1e-5 * largest, err_msg=param.name
        )
