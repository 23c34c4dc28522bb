from itertools import pairwise

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import kernels
from ms_zero.errors import UserError

RNG = np.random.default_rng(0)
LOGITS = RNG.standard_normal((6, 5)) * 3


def cross_entropy_sum(logits, labels, ignore_index=-100):
    total = np.zeros((), logits.dtype)
    for row, label in zip(logits, labels):
        if label != ignore_index:
            top = row.real.max()
            total += top + np.log(np.exp(row - top).sum()) - row[label]
    return total


def labels_of(*labels):
    return Tensor(np.array(labels, np.int32))


@pytest.mark.parametrize("labels", [(1, 4, 0, 2, 2, 3), (-100, 4, -100, -100, 0, -100)])
def test_sum_over_valid_labels(check_kernel, labels, target):
    def reference(logits):
        return cross_entropy_sum(logits, labels)

    check_kernel(kernels.CrossEntropySum(target=target), reference, [LOGITS], constants=[labels_of(*labels)])


def test_another_ignore_index(check_kernel, target):
    labels = (1, 0, 1, 0, 2, 0)
    check_kernel(
        kernels.CrossEntropySum(ignore_index=0, target=target),
        lambda logits: cross_entropy_sum(logits, labels, ignore_index=0),
        [LOGITS],
        constants=[labels_of(*labels)],
    )


def test_without_a_valid_label_value_and_gradient_are_exactly_zero(target):
    logits, labels = Tensor(LOGITS.astype(np.float32)), labels_of(*[-100] * 6)
    value, gradient = ms.value_and_grad(kernels.CrossEntropySum(target=target))(logits, labels)
    assert value.asnumpy() == 0
    assert not gradient.asnumpy().any()


def test_stable_for_large_logits(target):
    logits = np.array([[1e4, 0, -1e4], [-1e4, -1e4, 1e4]], np.float32)
    cell = kernels.CrossEntropySum(target=target)
    value, gradient = ms.value_and_grad(cell)(Tensor(logits), labels_of(1, 2))
    assert value.asnumpy() == 1e4
    assert np.array_equal(gradient.asnumpy(), [[1, -1, 0], [0, 0, 0]])


def test_half_precision_logits_are_summed_in_fp32(target):
    logits = (RNG.standard_normal((4096, 7)) * 2).astype(np.float16)
    labels = RNG.integers(0, 7, 4096).astype(np.int32)
    out = kernels.CrossEntropySum(target=target)(Tensor(logits), Tensor(labels))
    assert out.dtype == ms.float32
    assert out.shape == ()
    expected = cross_entropy_sum(logits.astype(np.float64), labels)
    assert abs(float(out.asnumpy()) - expected) < 1e-5 * expected


@pytest.mark.parametrize("label", [5, -1, 2**31 - 1, -(2**31)])
def test_a_label_outside_of_the_vocabulary_is_refused(label):
    with pytest.raises(UserError, match=f"outside of the 5 entries.*{label}"):
        kernels.CrossEntropySum()(Tensor(LOGITS.astype(np.float32)), labels_of(0, 1, label, 2, 3, 4))


def test_labels_of_another_dtype_or_shape_are_refused():
    logits = Tensor(LOGITS.astype(np.float32))
    for labels in (np.zeros(6, np.int64), np.zeros(5, np.int32), np.zeros((6, 1), np.int32)):
        with pytest.raises(UserError, match=r"labels: expected int32 \[6\]"):
            kernels.CrossEntropySum()(logits, Tensor(labels))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_broken_logit_gives_a_broken_loss(bad):
    logits = LOGITS.astype(np.float32)
    logits[2, 3] = bad
    assert np.isnan(kernels.CrossEntropySum()(Tensor(logits), labels_of(0, 1, 2, 3, 4, 0)).asnumpy())
    ignored = kernels.CrossEntropySum()(Tensor(logits), labels_of(0, 1, -100, 3, 4, 0))
    assert np.isfinite(ignored.asnumpy())


@pytest.mark.parametrize("cuts", [(0, 5), (0, 2, 5), (0, 1, 2, 5)])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_slices_of_the_vocabulary_join_to_the_whole(cuts, dtype, target):
    logits, labels = (LOGITS - 200).astype(dtype), np.array([1, 4, -100, 2, 0, 3], np.int32)
    slices = [(first, Tensor(logits[:, first:stop])) for first, stop in pairwise(cuts)]
    ids = Tensor(labels)
    stats = [kernels.softmax_stats(part, ids, first=first, target=target) for first, part in slices]
    maxima, sums, picked = (np.stack([each[i].asnumpy() for each in stats]) for i in range(3))
    top = maxima.max(0)
    log_sums = np.log((sums * np.exp(maxima - top)).sum(0)) + top
    valid = labels != -100
    wide = logits.astype(np.float64)
    total = ((log_sums - picked.sum(0)) * valid).sum()
    assert abs(total - cross_entropy_sum(wide, labels)) < 1e-4
    for grad in (np.float32(0.5), np.linspace(1, 2, 6, dtype=np.float32)):
        found = [
            kernels.softmax_gradient(
                part, ids, Tensor(log_sums), Tensor(grad), first=first, target=target
            )
            for first, part in slices
        ]
        expected = np.exp(wide - wide.max(1, keepdims=True))
        expected /= expected.sum(1, keepdims=True)
        expected[np.arange(6), np.maximum(labels, 0)] -= 1
        expected *= np.reshape(grad * valid, (-1, 1))
        assert found[0].dtype == slices[0][1].dtype
        error = np.concatenate([each.asnumpy() for each in found], 1) - expected
        assert np.abs(error).max() < (3e-5 if dtype == np.float32 else 1e-3)  # fp32 steps near 200: 1.5e-5


@pytest.mark.parametrize("log_sums, grads", [(1, 2), (2, 1)])
def test_a_gradient_for_other_rows_is_refused(log_sums, grads):
    logits, labels = Tensor(np.ones((2, 8), np.float32)), Tensor(np.zeros(2, np.int32))
    other, grad = (Tensor(np.ones(size, np.float32)) for size in (log_sums, grads))
    with pytest.raises(AssertionError):
        kernels.softmax_gradient(logits, labels, other, grad, first=0, target="CPU")
