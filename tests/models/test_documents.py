"""Packed documents with reset attention and positions: each gets what it would get alone."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import ParameterTuple, Tensor, nn

from ms_zero import kernels, models
from ms_zero.data import DocumentResets

SIZES = {"vocab_size": 11, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "ffn_hidden_size": 24}
SIZES |= {"max_seq_len": 16, "init_std": 0.3}
MODELS = {
    "gpt": lambda: models.GPT(**SIZES),
    "llama": lambda: models.Llama(**SIZES, num_kv_heads=2, head_dim=4, qk_norm=True),
}
#: Lengths of the documents of each of three samples; the second is one document.
LENGTHS = ((3, 1, 6, 2), (12,), (5, 7))
STARTS = np.array([np.repeat(np.cumsum((0, *sizes[:-1])), sizes) for sizes in LENGTHS], np.int32)
RNG = np.random.default_rng(3)
IDS = RNG.integers(0, 11, STARTS.shape).astype(np.int32)
LABELS = RNG.integers(0, 11, STARTS.shape).astype(np.int32)
BOTH = DocumentResets(attention=True, positions=True)


@pytest.fixture(params=MODELS)
def model(request):
    made = MODELS[request.param]()
    models.initialise(made, 5)
    return made


def extra(resets=BOTH, starts=STARTS):
    arguments = resets.arguments(starts)
    return [Tensor(arguments[n]) if n in arguments else None for n in ("position_ids", "document_starts")]


def documents():
    """(row, slice of the row) of every document."""
    for row, lengths in enumerate(LENGTHS):
        ends = np.cumsum(lengths).tolist()
        for length, end in zip(lengths, ends, strict=True):
            yield row, slice(end - length, end)


def close(ours, theirs):
    return np.abs(ours - theirs).max() <= 1e-5 * np.abs(theirs).max()


class Loss(nn.Cell):
    """Summed token loss of one batch; the arrays are constants."""

    def __init__(self, model, ids, labels, arguments=()):
        super().__init__()
        self.model, self.loss_sum = model, kernels.CrossEntropySum()
        self.ids, self.labels, self.arguments = Tensor(ids), Tensor(labels.reshape(-1)), arguments

    def construct(self):
        logits = self.model(self.ids, *self.arguments)
        return self.loss_sum(logits.reshape((-1, logits.shape[-1])), self.labels)


def gradients(model, *batch):
    weights = ParameterTuple(model.trainable_params())
    found = ms.value_and_grad(Loss(model, *batch), None, weights)()[1]
    return [grad.asnumpy().astype(np.float64) for grad in found]


def test_logits_are_those_of_each_document_alone(model):
    logits = model(Tensor(IDS), *extra()).asnumpy()
    for row, place in documents():
        alone = model(Tensor(IDS[row : row + 1, place])).asnumpy()[0]
        assert close(logits[row, place], alone)


def test_gradients_are_the_sum_over_the_documents(model):
    packed = gradients(model, IDS, LABELS, extra())
    alone = [gradients(model, IDS[row : row + 1, p], LABELS[row : row + 1, p]) for row, p in documents()]
    names = [parameter.name for parameter in model.trainable_params()]
    for name, ours, *parts in zip(names, packed, *alone, strict=True):
        # A gradient that is zero in exact arithmetic (of key biases) is compared on the scale of the others.
        scale = max(np.abs(sum(parts)).max(), 1e-2 * max(np.abs(grad).max() for grad in packed))
        assert np.abs(ours - sum(parts)).max() <= 1e-5 * scale, name


def test_each_reset_alone_changes_what_it_should(model):
    plain = model(Tensor(IDS)).asnumpy()
    for resets in (DocumentResets(attention=True), DocumentResets(positions=True)):
        logits = model(Tensor(IDS), *extra(resets)).asnumpy()
        assert close(logits[1], plain[1])
        assert close(logits[0, :3], plain[0, :3])
        assert not close(logits[0, 3:], plain[0, 3:])


def test_nothing_flows_between_documents(model):
    changed = IDS.copy()
    changed[0, :3] = (IDS[0, :3] + 1) % 11
    attention = extra(DocumentResets(attention=True))
    before, after = (model(Tensor(ids), *attention).asnumpy() for ids in (IDS, changed))
    assert np.array_equal(before[0, 3:], after[0, 3:])
    assert not np.array_equal(before[0, :3], after[0, :3])


def test_without_resets_the_model_is_called_as_before(model):
    assert extra(DocumentResets()) == [None, None]
    assert np.array_equal(model(Tensor(IDS), None, None).asnumpy(), model(Tensor(IDS)).asnumpy())


@pytest.mark.parametrize("resets", [BOTH, DocumentResets(attention=True), DocumentResets(positions=True)])
def test_graph_mode_gives_the_same(model, resets):
    eager = model(Tensor(IDS), *extra(resets)).asnumpy()
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        weights = ParameterTuple(model.trainable_params())
        step = ms.value_and_grad(Loss(model, IDS, LABELS, tuple(extra(resets))), None, weights)
        loss, grads = step()
        logits = model(Tensor(IDS), *extra(resets)).asnumpy()
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
    assert close(logits, eager)
    expected = gradients(model, IDS, LABELS, extra(resets))
    floor = 1e-2 * max(np.abs(grad).max() for grad in expected)
    for ours, theirs in zip(grads, expected, strict=True):
        assert np.abs(ours.asnumpy() - theirs).max() <= 2e-5 * max(np.abs(theirs).max(), floor)
    assert np.isfinite(loss.asnumpy())
