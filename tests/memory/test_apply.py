import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_zero import kernels, memory
from ms_zero._compat import backward, gradient, tape
from ms_zero.errors import UserError
from ms_zero.precision import autocast
from ms_zero.precision.policy import policy
from tests.memory.training import assert_bitwise, batch, build, forward, leaf_of, step

SIZES = {"none": 1000, "selective": 400, "full": 50}


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_every_policy_trains_bitwise_as_without(family):
    model = build(family)
    plain = step(model)
    policies = [
        ("none", {}),
        ("full", {}),
        ("every_k", {"every": 2}),
        ("sqrt", {}),
        ("selective", {}),
        ("budget", {"budget_bytes": 3000, "bytes_of": SIZES.__getitem__}),
    ]
    for kind, options in policies:
        applied = memory.apply_recompute(model, kind, **options)
        assert_bitwise(step(model), plain)
        applied.remove()
    assert_bitwise(step(model), plain)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_under_a_16_bit_policy(name):
    """Roundings between cells happen again in the second forward."""
    model = build("llama", num_layers=2)
    if name == "fp16":
        wide = autocast.fp32_parameters(model)
        for path, param in model.parameters_and_names():
            if path not in wide:
                param.data = param.astype(ms.float16)
    autocast.apply(model, policy(name), "CPU")
    plain = step(model)
    for kind in ("full", "sqrt", "selective"):
        applied = memory.apply_recompute(model, kind)
        assert_bitwise(step(model), plain)
        applied.remove()


def test_what_was_wrapped():
    model = build()
    applied = memory.apply_recompute(model, "every_k", every=3)
    assert list(applied.cells) == ["transformer.h.0", "transformer.h.3"]
    assert applied.cells["transformer.h.3"] is model.transformer.h[3]
    assert applied.text == "recompute every_k: 2 of 5 blocks in full"
    applied.remove()
    applied = memory.apply_recompute(model, "selective")
    assert next(iter(applied.cells)) == "transformer.h.0.attn.attention" and len(applied.cells) == 5
    applied.remove()
    applied = memory.apply_recompute(model, "budget", budget_bytes=2600, bytes_of=SIZES.__getitem__)
    assert applied.text.endswith("0 of 5 blocks in full, the attention of 5, 2.6e-06 of 2.6e-06 GB")


def saved_bytes(model):
    found = {}

    def pack(tensor):
        found[tensor.data_ptr()] = tensor.data  # kept, so that no address is used twice
        return tensor.data

    weights = {param.data_ptr() for param in model.get_parameters()}
    with ms.saved_tensors_hooks(pack, lambda tensor: tensor), tape():
        loss = forward(model, batch())
    assert loss is not None
    return sum(tensor.nbytes for address, tensor in found.items() if address not in weights)


def test_policies_keep_less():
    model = build()
    kept = {}
    for kind in ("none", "selective", "full", "sqrt"):
        applied = memory.apply_recompute(model, kind)
        kept[kind] = saved_bytes(model)
        applied.remove()
    inputs = 2 * 16 * 24 * 4
    assert kept["none"] > kept["selective"] > kept["full"] > kept["sqrt"]
    assert kept["full"] - kept["sqrt"] == 3 * inputs  # 5 blocks or 2 segments


def test_llama_and_foreign_blocks_are_found():
    assert list(memory.find_blocks(build("llama"))) == [f"model.layers.{i}" for i in range(5)]

    class Nested(nn.Cell):
        def __init__(self):
            super().__init__()
            self.experts = nn.CellList([nn.Dense(2, 2)])

        def construct(self, x):
            return self.experts[0](x)

    class Two(nn.Cell):
        def __init__(self):
            super().__init__()
            self.encoder = nn.CellList([Nested(), Nested()])
            self.decoder = nn.CellList([Nested()])

    assert list(memory.find_blocks(Two())) == ["encoder.0", "encoder.1", "decoder.0"]
    with pytest.raises(UserError, match=r"Dense has no nn\.CellList of blocks: give the blocks as `blocks`"):
        memory.find_blocks(nn.Dense(2, 2))


def test_blocks_of_the_users_choice():
    model = nn.SequentialCell([nn.Dense(3, 3), nn.Dense(3, 3)])
    applied = memory.apply_recompute(model, "full", blocks={"first": model[0]})
    assert applied.cells == {"first": model[0]}


def test_hooks_of_the_model_around_the_blocks_fire_once_and_last():
    model, log = build(), []
    model.register_backward_hook(lambda *_: log.append("model"))
    model.transformer.wte.weight.register_hook(lambda grad: log.append("embedding"))
    memory.apply_recompute(model, "full")
    for _ in range(2):
        log.clear()
        step(model)
        assert log == ["embedding", "model"]


def test_all_or_nothing():
    model = build()
    memory.recompute(model.transformer.h[3])
    with pytest.raises(UserError, match="GPTBlock is recomputed already"):
        memory.apply_recompute(model, "full")
    wrapped = [block for block in model.transformer.h if "construct" in vars(block)]
    assert wrapped == [model.transformer.h[3]]


def test_selective_needs_a_core():
    model = nn.Cell()
    model.blocks = nn.CellList([nn.Dense(2, 2)])
    with pytest.raises(UserError, match=r"blocks\.0 \(Dense\) contains no CausalAttention: name the cells"):
        memory.apply_recompute(model, "selective")
    applied = memory.apply_recompute(model, "selective", cores=(nn.Dense, kernels.CausalAttention))
    assert list(applied.cells) == ["blocks.0"]


class Chain(nn.Cell):
    """Loops over its blocks, or calls them by number."""

    chained_blocks = ("blocks",)

    def __init__(self, by_number=False):
        super().__init__()
        self.blocks = nn.CellList([nn.Dense(3, 3) for _ in range(4)])
        self.by_number = by_number

    def construct(self, x):
        for block in [self.blocks[number] for number in range(4)] if self.by_number else self.blocks:
            x = block(x)
        return x


def test_a_segment_runs_its_blocks_once_in_forward_and_once_more_in_backward():
    """Each block is a cell both times: its hooks fire, those of its backward too."""
    model, calls = Chain(), []
    for number, block in enumerate(model.blocks):
        block.weight.register_hook(lambda grad, number=number: calls.append(f"gradient {number}"))
        block.register_forward_pre_hook(lambda *_, number=number: calls.append(f"forward {number}"))
        block.register_backward_pre_hook(lambda *_, number=number: calls.append(f"backward {number}"))
    applied = memory.apply_recompute(model, "sqrt")
    x = leaf_of(np.ones((2, 3)))
    with tape():
        loss = model(x).sum()
    assert calls == [f"forward {number}" for number in range(4)]
    calls.clear()
    backward(loss)
    expected = []
    for pair in ((2, 3), (0, 1)):
        expected += [f"forward {number}" for number in pair]
        expected += [f"{what} {number}" for number in pair[::-1] for what in ("backward", "gradient")]
    assert calls == expected and gradient(x) is not None
    applied.remove()
    calls.clear()
    model(x)
    assert calls == [f"forward {number}" for number in range(4)] and len(list(model.blocks)) == 4


def test_a_block_of_a_segment_called_by_number_is_refused():
    model = Chain(by_number=True)
    memory.apply_recompute(model, "sqrt")
    with pytest.raises(UserError, match="a block of a segment is called by itself"):
        model(Tensor(np.ones((2, 3), np.float32)))


def test_segments_need_a_model_that_says_how_it_calls_its_blocks():
    class Undeclared(Chain):
        chained_blocks = ()

    with pytest.raises(UserError, match=r"Undeclared has to say that it calls them one after another"):
        memory.apply_recompute(Undeclared(), "sqrt")
