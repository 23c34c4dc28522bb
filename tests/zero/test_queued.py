"""A user's operations may come before ours, and then MindSpore queues all of them: nothing may change."""

from ms_zero.comm import local
from ms_zero.testing import run_workers
from tests.zero.strangers import train


def test_training_is_the_same_when_operations_are_queued():
    ((queued, found),) = run_workers(1, "tests.zero.queued:train_queued", timeout_s=200)
    assert queued
    expected = train(local())
    assert found == expected
    assert expected[1] == expected[2] == expected[3] == expected[0] and expected[4] == expected[5]
