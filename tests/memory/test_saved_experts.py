"""The count of what layers with experts keep against what is measured."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import kernels, memory
from ms_zero.config import load_config
from ms_zero.memory.saved import measure_saved
from ms_zero.models import initialise
from ms_zero.plan.saved import Split, block_bytes, block_of, edge_bytes
from ms_zero.plan.shapes import from_config
from ms_zero.precision import autocast
from ms_zero.precision.policy import policy
from ms_zero.recipes.build import build_model

BATCH, LENGTH = 3, 24
SMALL = ("model.hidden_size=48", "model.num_layers=2", "model.expert_ffn_hidden_size=40", "data.seq_len=24")
GATED = ("model.shared_ffn_hidden_size=24", "model.shared_gate=true", "model.dropout=0.1")
GATED = (*GATED, "model.qk_norm=true")
WIDE = ("model.latent.q_rank=0", "model.latent.value_head_dim=40")
VARIANTS = {
    "mixtral": ("mixtral-tiny", ()),
    "qwen": ("mixtral-tiny", GATED),
    "deepseek": ("deepseek-tiny", ("model.ffn_hidden_size=60",)),
    "deepseek, wide values": ("deepseek-tiny", WIDE),
}


def built(variant, target="CPU"):
    name, changes = VARIANTS[variant]
    config = load_config(f"runs/{name}", [*SMALL, *changes]).config.model
    with kernels.default_target(target):
        model = build_model(config)
    initialise(model, 1)
    if config.dropout:
        model.dropout_state.set_position(seed=0, step=0, sample_numbers=range(BATCH))
    return model, config


def measured(model, kind, target="CPU"):
    """Bytes that one forward pass with loss keeps."""
    ids = Tensor(np.random.default_rng(0).integers(0, 257, (BATCH, LENGTH)).astype(np.int32))
    with kernels.default_target(target):
        loss = kernels.CrossEntropySum()

    def forward():
        logits, aux = model(ids)
        return loss(logits.reshape(-1, 257), ids.reshape(-1)) + aux.sum()

    applied = memory.apply_recompute(model, kind)
    with kernels.default_target(target):
        forward()  # builds cached constants
        saved, _ = measure_saved(forward)
    applied.remove()
    return sum(tensor.bytes for tensor in saved)


def counted(config, kind, implementation="native", **split):
    shape = from_config(config)
    split = Split(
        **{"batch": BATCH, "seq_len": LENGTH, "activation_bytes": 4, "dropout": config.dropout > 0, **split}
    )
    blocks = [block_of(shape, layer) for layer in shape.layers()]
    edges = edge_bytes(blocks[0], config.vocab_size, split, implementation=implementation)
    sizes = (block_bytes(b, split, implementation=implementation, recompute=kind) for b in blocks)
    return sum(sizes) + sum(vars(edges).values())


@pytest.mark.parametrize(
    ("variant", "implementation", "target"),
    [
        *((variant, "native", "CPU") for variant in VARIANTS),
        *((variant, "portable", "CPU-portable") for variant in ("qwen", "deepseek")),
    ],
)
def test_count_is_what_is_measured(variant, implementation, target):
    model, config = built(variant, target)
    for kind in ("none", "selective", "full"):
        expected = counted(config, kind, implementation)
        assert measured(model, kind, target) == pytest.approx(expected, rel=0.02), kind


@pytest.mark.parametrize(("name", "split"), [("bf16", {"rounded": True}), ("fp16", {"activation_bytes": 2})])
@pytest.mark.parametrize("variant", ["mixtral", "deepseek"])
def test_count_under_a_16_bit_policy(variant, name, split):
    model, config = built(variant)
    if name == "fp16":
        wide = autocast.fp32_parameters(model)
        for path, param in model.parameters_and_names():
            if path not in wide:
                param.data = param.astype(ms.float16)
    autocast.apply(model, policy(name), "CPU")
    assert measured(model, "none") == pytest.approx(counted(config, "none", **split), rel=0.02)
