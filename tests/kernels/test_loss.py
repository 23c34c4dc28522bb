import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_zero import kernels

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
def test_sum_over_valid_labels(check_kernel, labels):
    def reference(logits):
        return cross_entropy_sum(logits, labels)

    check_kernel(kernels.CrossEntropySum(), reference, [LOGITS], constants=[labels_of(*labels)])


def test_another_ignore_index(check_kernel):
    labels = (1, 0, 1, 0, 2, 0)
    check_kernel(
        kernels.CrossEntropySum(ignore_index=0),
        lambda logits: cross_entropy_sum(logits, labels, ignore_index=0),
        [LOGITS],
        constants=[labels_of(*labels)],
    )


def test_without_a_valid_label_value_and_gradient_are_exactly_zero():
    logits, labels = Tensor(LOGITS.astype(np.float32)), labels_of(*[-100] * 6)
    value, gradient = ms.value_and_grad(kernels.CrossEntropySum())(logits, labels)
    assert value.asnumpy() == 0
    assert not gradient.asnumpy().any()


def test_stable_for_large_logits():
    logits = np.array([[1e4, 0, -1e4], [-1e4, -1e4, 1e4]], np.float32)
    value, gradient = ms.value_and_grad(kernels.CrossEntropySum())(Tensor(logits), labels_of(1, 2))
    assert value.asnumpy() == 1e4
    assert np.array_equal(gradient.asnumpy(), [[1, -1, 0], [0, 0, 0]])


def test_half_precision_logits_are_summed_in_fp32():
    logits = (RNG.standard_normal((4096, 7)) * 2).astype(np.float16)
    labels = RNG.integers(0, 7, 4096).astype(np.int32)
    out = kernels.CrossEntropySum()(Tensor(logits), Tensor(labels))
    assert out.dtype == ms.float32
    assert out.shape == ()
    expected = cross_entropy_sum(logits.astype(np.float64), labels)
    assert abs(float(out.asnumpy()) - expected) < 1e-5 * expected
