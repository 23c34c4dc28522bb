"""Small models and one forward and backward of them."""

import numpy as np
from mindspore import Tensor

from ms_zero import kernels, models
from ms_zero._compat import backward, clear_grads, gradient, tape

VOCAB, LENGTH, BATCH = 61, 16, 2
GPT = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "num_layers": 5,
    "num_heads": 4,
    "ffn_hidden_size": 80,
    "max_seq_len": LENGTH,
}
LLAMA = {**GPT, "num_kv_heads": 2, "head_dim": 6}


def build(family="gpt", seed=0, **changes):
    model = models.GPT(**{**GPT, **changes}) if family == "gpt" else models.Llama(**{**LLAMA, **changes})
    models.initialise(model, seed)
    return model


def batch(seed=0, length=LENGTH, count=BATCH):
    draw = np.random.default_rng(seed)
    ids = draw.integers(0, VOCAB, (count, length + 1)).astype(np.int32)
    return Tensor(ids[:, :-1].copy()), Tensor(ids[:, 1:].reshape(-1).copy())


def forward(model, data, **arguments):
    ids, labels = data
    logits = model(ids, **arguments)
    return kernels.CrossEntropySum()(logits.reshape(-1, logits.shape[-1]), labels)


def step(model, data=None, **arguments):
    """Loss and every gradient of one batch, as arrays by name."""
    clear_grads(model.get_parameters())
    with tape():
        loss = forward(model, batch() if data is None else data, **arguments)
    backward(loss)
    return results(model, loss)


def results(model, loss):
    grads = {name: gradient(param) for name, param in model.parameters_and_names()}
    found = {"loss": loss, **{name: grad for name, grad in grads.items() if grad is not None}}
    return {name: value.asnumpy().copy() for name, value in found.items()}


def assert_bitwise(left, right):
    assert left.keys() == right.keys()
    different = [name for name in left if not np.array_equal(left[name], right[name])]
    assert different == []


def leaf_of(values):
    tensor = Tensor(np.asarray(values, np.float32))
    tensor.requires_grad_(True)
    return tensor

