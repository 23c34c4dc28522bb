import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import models, rng
from ms_zero._compat import backward, clear_grads, gradient, no_grad, tape
from ms_zero.errors import UserError
from ms_zero.models.dropout import Dropout, DropoutPosition, DropoutState, dropout_threshold, keep_mask

SHAPE = (32, 48)  # tokens, width
SMALL = {
    "vocab_size": 13,
    "hidden_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "ffn_hidden_size": 12,
    "max_seq_len": 8,
}
LLAMA = {**SMALL, "num_kv_heads": 1, "head_dim": 4}


def mask(rate=0.1, stream="h.0", seed=3, step=5, samples=(7, 8), spans=None, shape=SHAPE):
    return keep_mask(dropout_threshold(rate), stream, DropoutPosition(seed, step, samples, spans), shape)


def ready(rate=0.5, stream="h.0", samples=(0, 1), step=0):
    state = DropoutState()
    cell = Dropout(rate, state)
    cell.stream = stream
    state.set_position(seed=1, step=step, sample_numbers=samples)
    return cell


def ids(count=4, seed=0):
    return np.random.default_rng(seed).integers(0, 13, (count, 8)).astype(np.int32)


def test_share_of_dropped_elements_and_independence_of_neighbours():
    size = 400_000
    for rate in (0.1, 0.5, 0.9):
        kept = mask(rate, samples=(1,), shape=(size,)).reshape(-1)
        deviation = np.sqrt(rate * (1 - rate) / size)
        assert abs((1 - kept.mean()) - dropout_threshold(rate) / 65536) < 4 * deviation
        centred = kept - kept.mean()
        for distance in (1, 2, 3, 4, 7):
            correlation = (centred[:-distance] * centred[distance:]).mean() / centred.var()
            assert abs(correlation) < 4 / np.sqrt(size)


@pytest.mark.parametrize(
    "other", [{"seed": 4}, {"step": 6}, {"samples": (9, 10)}, {"stream": "h.1"}, {"stream": "h.0/5"}]
)
def test_another_seed_step_sample_or_layer_is_another_independent_mask(other):
    left, right = mask(0.5), mask(0.5, **other)
    agreement = (left == right).mean()
    assert abs(agreement - 0.5) < 4 * 0.5 / np.sqrt(left.size)


def test_masks_of_a_sample_do_not_depend_on_its_row():
    whole = mask(samples=(7, 8, 9))
    np.testing.assert_array_equal(mask(samples=(9, 7)), whole[[2, 0]])


@pytest.mark.parametrize("shape", [(32, 48), (32, 3), (32,)])
def test_a_rank_with_some_of_the_tokens_draws_their_part(shape):
    whole = mask(shape=shape)
    middle = mask(spans=((5, 11),), shape=(6, *shape[1:]))
    np.testing.assert_array_equal(middle, whole[:, 5:11])
    zigzag = mask(spans=((0, 7), (25, 32)), shape=(14, *shape[1:]))
    np.testing.assert_array_equal(zigzag, np.concatenate([whole[:, :7], whole[:, 25:]], axis=1))


def test_the_stream_is_the_documented_one():
    """Four decisions from each word of the named stream, low bits first."""
    words = rng.uniform_bits(3, "dropout/h.0/5/7", 0, 2)
    values = [int(words[i // 4] >> np.uint64(16 * (i % 4))) & 0xFFFF for i in range(8)]
    expected = [value >= dropout_threshold(0.3) for value in values]
    assert mask(0.3, samples=(7,), shape=(8,)).reshape(-1).tolist() == expected


def test_kept_elements_are_scaled_so_that_the_mean_stays():
    x = np.random.default_rng(0).standard_normal((2, 64, 64)).astype(np.float32)
    out = ready(0.3)(Tensor(x)).asnumpy()
    kept = out != 0
    threshold = dropout_threshold(0.3)
    np.testing.assert_allclose(out[kept], x[kept] * (65536 / (65536 - threshold)), rtol=3e-7)
    assert abs(out[kept].size / x.size - 0.7) < 0.02


def test_gradient_by_finite_differences():
    cell = ready(0.4)
    draw = np.random.default_rng(1)
    point, weight, direction = (draw.standard_normal((2, 5, 6)).astype(np.float32) for _ in range(3))

    def loss(values):
        return (cell(values) * Tensor(weight)).sum()

    x = Tensor(point)
    x.requires_grad_(True)
    with tape():
        out = loss(x)
    backward(out)
    ahead, behind = (float(loss(Tensor(point + h * direction)).asnumpy()) for h in (0.5, -0.5))
    slope = float((gradient(x).asnumpy() * direction).sum())
    assert abs(ahead - behind - slope) < 1e-5 * np.abs(weight * direction).sum()  # the function is linear


def test_only_the_mask_is_kept_for_backward():
    saved = []

    def pack(tensor):
        saved.append((tensor.dtype, tensor.nbytes))
        return tensor.data

    x = Tensor(np.ones((2, 4, 8), np.float32))
    x.requires_grad_(True)
    with ms.saved_tensors_hooks(pack, lambda tensor: tensor), tape():
        out = ready()(x)
    assert out is not None
    kept = [entry for entry in saved if entry[1] > 8]
    assert kept == [(ms.bool_, 64)]


def losses(model, sample_numbers, step=2):
    """Loss of each sample alone, in one batch of them."""
    rows = ids()[list(sample_numbers)]
    model.dropout_state.set_position(seed=11, step=step, sample_numbers=sample_numbers)
    with no_grad():
        return (model(Tensor(rows)) ** 2).mean((1, 2)).asnumpy()


@pytest.mark.parametrize(("family", "sizes"), [(models.GPT, SMALL), (models.Llama, LLAMA)])
def test_a_model_gives_a_sample_the_same_numbers_in_any_batch(family, sizes):
    model = family(**sizes, dropout=0.2)
    models.initialise(model, 0)
    together = losses(model, (0, 1, 2, 3))
    np.testing.assert_allclose(losses(model, (2, 3, 0, 1)), together[[2, 3, 0, 1]], rtol=1e-6)
    np.testing.assert_allclose([losses(model, (n,))[0] for n in range(4)], together, rtol=1e-6)
    assert (losses(model, (0, 1, 2, 3), step=3) != together).all()


@pytest.mark.parametrize(("family", "sizes"), [(models.GPT, SMALL), (models.Llama, LLAMA)])
def test_places_and_streams(family, sizes):
    model = family(**sizes, dropout=0.2)
    found = {path: cell.stream for path, cell in model.cells_and_names() if isinstance(cell, Dropout)}
    assert all(path == stream for path, stream in found.items())
    assert len(found) == 1 + 2 * sizes["num_layers"]
    assert sum(path.endswith("attn_dropout") for path in found) == sizes["num_layers"]


@pytest.mark.parametrize(("family", "sizes"), [(models.GPT, SMALL), (models.Llama, LLAMA)])
def test_without_dropout_there_is_no_cell_and_evaluation_is_that_model(family, sizes):
    plain, model = family(**sizes), family(**sizes, dropout=0.5)
    assert plain.dropout_state is None
    assert not any(isinstance(cell, Dropout) for _, cell in plain.cells_and_names())
    assert [name for name, _ in plain.parameters_and_names()] == [n for n, _ in model.parameters_and_names()]
    for each in (plain, model):
        models.initialise(each, 0)
    with model.dropout_state.off():
        np.testing.assert_array_equal(model(Tensor(ids())).asnumpy(), plain(Tensor(ids())).asnumpy())


def test_gradients_of_two_microbatches_add_up_to_those_of_the_batch():
    model = models.GPT(**SMALL, dropout=0.3)
    models.initialise(model, 0)

    def grads(groups):
        clear_grads(model.get_parameters())
        for group in groups:
            model.dropout_state.set_position(seed=1, step=0, sample_numbers=group)
            with tape():
                loss = (model(Tensor(ids()[list(group)])) ** 2).sum()
            backward(loss)
        return {name: gradient(param).asnumpy() for name, param in model.parameters_and_names()}

    whole, parts = grads([(0, 1, 2, 3)]), grads([(2, 0), (1, 3)])
    largest = max(np.abs(expected).max() for expected in whole.values())
    for name, expected in whole.items():
        np.testing.assert_allclose(parts[name], expected, rtol=0, atol=1e-6 * largest, err_msg=name)


def test_off_ends_with_its_context_and_keeps_the_position():
    cell = ready()
    x = Tensor(np.ones((2, 4, 8), np.float32))
    before = cell(x).asnumpy()
    with pytest.raises(KeyError), cell.state.off():
        np.testing.assert_array_equal(cell(x).asnumpy(), x.asnumpy())
        raise KeyError
    np.testing.assert_array_equal(cell(x).asnumpy(), before)


def test_refusals():
    x = Tensor(np.ones((2, 4, 8), np.float32))
    with pytest.raises(UserError, match="dropout: no position: call set_position"):
        Dropout(0.1, DropoutState())(x)
    with pytest.raises(UserError, match="3 sample numbers for a batch of 2 samples"):
        ready(samples=(1, 2, 3))(x)
    for rate in (-0.1, 1.0, float("nan")):
        with pytest.raises(UserError, match=r"model: dropout .* is not in \[0, 1\)"):
            models.GPT(**SMALL, dropout=rate)
    almost = ready(1 - 1e-9)(x).asnumpy()
    assert np.isfinite(almost).all()
