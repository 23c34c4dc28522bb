"""What is packed, and that backward gets it back."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from ms_zero import memory
from ms_zero._compat import backward, clear_grads, gradient, no_grad, tape
from ms_zero.errors import UserError
from ms_zero.memory.offload import HostCodec
from ms_zero.memory.packing import pack_activations
from tests.memory.training import assert_bitwise, batch, build, forward, leaf_of, results, step

INPUT_BYTES = 2 * 16 * 24 * 4  # of a block


class Spy(HostCodec):
    """Remembers what it was given."""

    def __init__(self):
        self.seen = []

    def encode(self, tensor):
        self.seen.append(tensor.asnumpy().copy())
        return super().encode(tensor)


def offload(model, **options):
    return memory.offload_activations(model, **{"min_bytes": 1, **options})


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_offload_is_bitwise_plain_training(family):
    model = build(family, num_layers=2, dropout=0.1)
    model.dropout_state.set_position(seed=0, step=0, sample_numbers=(0, 1))
    plain = step(model)
    packed = offload(model)
    assert_bitwise(step(model), plain)
    assert packed.ledger.peak_host_bytes > 0 and packed.ledger.host_bytes == 0
    packed.remove()
    count = packed.ledger.packed
    assert_bitwise(step(model), plain)
    assert packed.ledger.packed == count


def test_a_document_mask_is_left_to_its_owner():
    model = build("gpt", num_layers=2)
    starts = Tensor(np.repeat(np.array([[0] * 5 + [5] * 11], np.int32), 2, axis=0))
    plain = step(model, document_starts=starts)
    spy = Spy()
    pack_activations(model, spy, cells=None, min_bytes=1)
    assert_bitwise(step(model, document_starts=starts), plain)
    assert all(array.dtype in (np.float32, np.bool_) for array in spy.seen)


def test_what_a_block_saves_is_all_on_the_host():
    model = build("gpt", num_layers=2)
    forward(model, batch())
    saved, loss = memory.measure_saved(lambda: model.transformer.h[0](leaf_of(np.ones((2, 16, 24)))))
    del loss
    # The leaf existed before, so it is not measured, but it is saved.
    expected = sum(tensor.bytes for tensor in saved) + INPUT_BYTES
    packed = offload(model, cells="transformer.h.0")
    with tape():
        out = model.transformer.h[0](leaf_of(np.ones((2, 16, 24))))
    assert packed.ledger.host_bytes == packed.ledger.original_bytes == expected
    assert packed.ledger.device_bytes == 0
    del out
    assert packed.ledger.host_bytes == 0


def test_a_tensor_that_several_operators_save_is_packed_once():
    """Swapping it once for each of them, and freeing it after the first, is how gradients become nan."""
    model, spy = build("gpt", num_layers=1), Spy()
    plain = step(model)
    packed = pack_activations(model, spy, cells=None, min_bytes=1)
    assert_bitwise(step(model), plain)
    shapes = [array.shape for array in spy.seen]
    # Input of each norm, one input for q, k and v, and one for the MLP; the output of attention is the
    # input of its projection under another shape.
    assert shapes.count((2, 16, 24)) == 5
    assert packed.ledger.packed == len(spy.seen) and packed.ledger.shared >= 2


def test_the_same_address_in_two_calls_is_not_the_same_tensor():
    class Square(nn.Cell):
        def construct(self, x):
            made = x + 1.0
            return made * made

    class Twice(nn.Cell):
        def __init__(self):
            super().__init__()
            self.square = Square()

        def construct(self, x):
            return self.square(x).sum() + self.square(x * 3.0).sum() * 10.0

    def run(model):
        x = leaf_of(np.arange(64))
        with tape():
            loss = model(x)
        backward(loss)
        return {"x": gradient(x).asnumpy()}

    plain = run(Twice())
    model = Twice()
    packed = offload(model, cells="square")
    assert_bitwise(run(model), plain)
    assert packed.ledger.packed == 2 and packed.ledger.shared == 2


def test_views_are_packed_by_their_own_elements():
    class Parts(nn.Cell):
        def construct(self, x):
            made = x * 2.0
            left, right, turned = made[:, :3], made[:, 3:], made.T
            return (ops.sin(left) * right).sum() + (turned * turned).sum() + (made * made).sum()

    class Holder(nn.Cell):
        def __init__(self):
            super().__init__()
            self.parts = Parts()

        def construct(self, x):
            return self.parts(x)

    def run(model):
        x = leaf_of(np.arange(24).reshape(4, 6) / 10)
        with tape():
            loss = model(x)
        backward(loss)
        return {"x": gradient(x).asnumpy()}

    plain, model = run(Holder()), Holder()
    packed = offload(model, cells="parts")
    assert_bitwise(run(model), plain)
    assert packed.ledger.packed > 0


class Product(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.full(8, 2.0, np.float32)), name="w")

    def construct(self, x):
        return x * self.w


class OneCell(nn.Cell):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def construct(self, x):
        return self.inner(x)


def test_parameters_are_never_packed_and_backward_reads_what_they_hold_then():
    model, spy = OneCell(Product()), Spy()
    pack_activations(model, spy, cells="inner", min_bytes=1)
    x = leaf_of(np.arange(8))
    with tape():
        loss = model(x).sum()
    assert [array.tolist() for array in spy.seen] == [list(range(8))]
    model.inner.w.data = Tensor(np.full(8, 5.0, np.float32))
    backward(loss)
    assert gradient(x).asnumpy().tolist() == [5.0] * 8


def test_weights_freed_after_forward_are_not_kept_by_packing():
    """What stage 3 does, with and without recompute."""
    for kind in ("none", "full"):
        model = build("gpt", num_layers=2)
        plain = step(model)
        for block in model.transformer.h:
            weights = [(param, param.data) for param in block.get_parameters()]
            placeholder = mint.zeros((1,))

            def fetch(*_, weights=weights):
                for param, full in weights:
                    param.data = full.copy()

            def free(*_, weights=weights, placeholder=placeholder):
                for param, _ in weights:
                    param.data = placeholder

            free()
            block.register_forward_pre_hook(fetch)
            block.register_forward_hook(free)
            block.register_backward_pre_hook(fetch)
        memory.apply_recompute(model, kind)
        offload(model)
        assert_bitwise(step(model), plain)


def test_small_tensors_and_integers_stay():
    model, spy = build("gpt", num_layers=1), Spy()
    pack_activations(model, spy, cells=None, min_bytes=INPUT_BYTES + 1)
    step(model)
    assert {array.shape for array in spy.seen} == {(2, 16, 80)}


def test_only_the_cells_that_a_pattern_chooses():
    model, spy = build("gpt", num_layers=2), Spy()
    packed = pack_activations(model, spy, cells=["transformer.h.*.mlp", "transformer.ln_f"], min_bytes=1)
    paths = ["transformer.h.0.mlp", "transformer.h.1.mlp", "transformer.ln_f"]
    assert sorted(packed.cells) == paths
    plain = step(build("gpt", num_layers=2))
    assert_bitwise(step(model), plain)
    assert {array.shape for array in spy.seen} <= {(2, 16, 24), (2, 16, 80), (32, 2)}


@pytest.mark.parametrize("kind", ["full", "sqrt", "selective"])
def test_with_recompute_its_inputs_are_offloaded(kind):
    model = build("gpt", num_layers=4)
    plain = step(model)
    applied = memory.apply_recompute(model, kind)
    packed = offload(model)
    assert_bitwise(step(model), plain)
    if kind != "selective":
        assert packed.ledger.peak_host_bytes == {"full": 4, "sqrt": 2}[kind] * INPUT_BYTES
    packed.remove()
    applied.remove()
    assert_bitwise(step(model), plain)


def test_microbatches_in_flight():
    model = build("gpt", num_layers=2)

    def run():
        clear_grads(model.get_parameters())
        with tape():
            losses = [forward(model, batch(seed)) for seed in range(3)]
        for loss in losses:
            backward(loss)
        return results(model, losses[0])

    plain = run()
    packed = offload(model)
    assert_bitwise(run(), plain)
    one = packed.ledger.peak_host_bytes / 3
    step(model)
    assert one == int(one) and packed.ledger.host_bytes == 0


def test_evaluation_packs_nothing():
    model = build("gpt", num_layers=1)
    packed = offload(model)
    with no_grad():
        forward(model, batch())
    assert packed.ledger.packed == 0


def test_nothing_is_left_over_after_200_steps():
    model = OneCell(nn.SequentialCell([nn.Dense(4, 4), nn.ReLU(), nn.Dense(4, 4)]))
    packed = offload(model, cells="inner")
    x = Tensor(np.ones((2, 4), np.float32))

    def train():
        clear_grads(model.get_parameters())
        with tape():
            loss = model(x).sum()
        backward(loss)

    train()
    before = len(memory.live_tensors())
    for _ in range(200):
        train()
    assert len(memory.live_tensors()) == before
    assert packed.ledger.host_bytes == packed.ledger.original_bytes == 0 < packed.ledger.packed


def test_bf16_and_fp16_come_back():
    for dtype in (ms.bfloat16, ms.float16):
        tensor = Tensor(np.arange(6).reshape(2, 3).astype(np.float32)).astype(dtype)
        kept, device, host = HostCodec().encode(tensor)
        back = HostCodec().decode(kept)
        assert (device, host) == (0, 12) and back.dtype == dtype and back.shape == (2, 3)
        np.testing.assert_array_equal(back.astype(ms.float32).asnumpy(), tensor.astype(ms.float32).asnumpy())


def test_refusals_leave_everything_as_it_was():
    model = build("gpt", num_layers=3)
    with pytest.raises(UserError, match=r"no cell of GPT matches 'h\.\*': paths look like 'lm_head"):
        offload(model, cells="h.*")
    offload(model, cells="transformer.h.1")
    with pytest.raises(UserError, match="this GPTBlock is packed already: apply it once"):
        offload(model)
    assert "construct" not in vars(model.transformer.h[0])
    with pytest.raises(UserError, match="this GPTBlock is packed already: apply recompute first"):
        memory.apply_recompute(model, "full")
    assert "construct" not in vars(model.transformer.h[0])


def test_what_a_second_forward_saves_is_not_packed():
    model = build("gpt", num_layers=2)
    memory.apply_recompute(model, "full")
    with pytest.raises(UserError, match=r"h\.0\.mlp \(GPTMLP\) lies within transformer\.h\.0, which is"):
        offload(model, cells="*.mlp")
    assert offload(model, cells="transformer.ln_f").cells.keys() == {"transformer.ln_f"}


def test_removal_goes_in_the_reverse_order():
    model = build("gpt", num_layers=1)
    applied = memory.apply_recompute(model, "full")
    packed = offload(model)
    with pytest.raises(UserError, match="not recomputed now, or something was applied to it afterwards"):
        applied.remove()
    packed.remove()
    applied.remove()
    assert "construct" not in vars(model.transformer.h[0])
