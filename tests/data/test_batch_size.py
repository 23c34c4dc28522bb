import pytest

from ms_zero.data import BatchSchedule


def sizes(schedule, steps):
    consumed, found = 0, []
    for _ in range(steps):
        found.append(schedule(consumed))
        consumed += found[-1]
    return found


def test_without_ramp_up_every_step_has_the_full_size():
    assert sizes(BatchSchedule(full=8), 4) == [8, 8, 8, 8]


def test_sizes_grow_by_the_increment_over_the_given_samples():
    schedule = BatchSchedule(full=8, start=2, increment=2, samples=30)
    # three increments share 30 samples: size 2 below 10, 4 below 20, 6 below 30, then 8
    assert [schedule(consumed) for consumed in (0, 9, 10, 19, 20, 29, 30, 10**9)] == [2, 2, 4, 4, 6, 6, 8, 8]
    assert sizes(schedule, 12) == [2, 2, 2, 2, 2, 4, 4, 4, 6, 6, 8, 8]


@pytest.mark.parametrize(
    "schedule", [BatchSchedule(8, 2, 2, 1), BatchSchedule(64, 4, 12, 1000), BatchSchedule(3, 1, 1, 7)]
)
def test_sizes_grow_from_the_start_in_whole_increments_to_the_full_size(schedule):
    found = [schedule(consumed) for consumed in range(schedule.samples + 5)]
    assert found[0] == schedule.start
    assert found == sorted(found)
    assert found[-5:] == [schedule.full] * 5
    assert all((size - schedule.start) % schedule.increment == 0 for size in found)
