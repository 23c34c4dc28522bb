"""Checking without refusing, and the number of workers when none is given."""

import pytest

from ms_zero.config import check_config, load_config
from ms_zero.errors import UserError

MODEL_AND_DATA = "data: {seq_len: 64}\ninclude: [models/gpt-tiny]\n"


def text(train):
    return f"{MODEL_AND_DATA}optim: {{warmup_steps: 2}}\ntrain: {{steps: 10, output_dir: out, {train}}}\n"


def test_errors_and_warnings_are_found_together(write):
    path = write(text("global_batch_size: 8, accumulation_steps: 1, log_interval: 11"))
    checked = check_config(path, ["optim.lr=-1", "train.stpes=1"])
    assert {(finding.rule, finding.severity) for finding in checked.findings} == {
        ("MZ004", "error"),
        ("MZ006", "error"),
        ("MZ043", "warning"),
    }
    assert check_config(path, ["train.log_interval=1"]).findings == ()


@pytest.mark.parametrize(
    ("overrides", "workers"),
    [
        ([], 1),
        (["parallel.dp_replicate=3", "train.global_batch_size=24"], 3),
        (["parallel.dp_shard=4"], 4),
        (["parallel.dp_replicate=2", "parallel.dp_shard=4"], 8),
        (["train.micro_batch_size=2"], 4),  # 8 samples = 2 x 1 x dp
        (["train.micro_batch_size=2", "parallel.dp_replicate=2"], 4),
        (["train.micro_batch_size=8"], 1),
    ],
)
def test_without_a_number_the_fewest_workers_are_taken(write, overrides, workers):
    path = write(text("global_batch_size: 8, accumulation_steps: 1"))
    assert check_config(path, overrides).findings == ()
    assert load_config(path, overrides, None).world_size == workers


def test_batch_sizes_that_fit_no_number_of_workers_are_reported(write):
    path = write(text("global_batch_size: 8, accumulation_steps: 1, micro_batch_size: 3"))
    checked = check_config(path)
    assert [finding.rule for finding in checked.findings] == ["MZ040"]
    assert checked.world_size == 1


def test_unusable_degrees_do_not_stop_the_search(write):
    path = write(text("global_batch_size: 8, accumulation_steps: 1"))
    checked = check_config(path, ["parallel.tp=two", "parallel.pp=0", "parallel.dp_replicate=2147483647"])
    assert checked.world_size == 2147483647
    assert {finding.path for finding in checked.findings} >= {"parallel.tp", "parallel.pp"}


@pytest.mark.parametrize("workers", [0, -1, True, 2.0, "2"])
def test_a_number_of_workers_that_is_none_is_refused(write, workers):
    with pytest.raises(UserError, match="is not an integer of at least 1"):
        check_config(write(text("")), (), workers)
