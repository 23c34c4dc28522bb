"""Checking without refusing, and the number of workers when none is given."""

import pytest

from ms_zero.config import RULES, ConfigError, check_config, load_config
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


LAYOUT = ["parallel.cp=2", "parallel.dp_shard=4", "engine.kind=graph"]
UNAVAILABLE = [rule for rule in RULES if rule.severity == "unavailable"]


def test_what_this_version_cannot_run_loads_but_is_refused_to_run(write):
    path = write(text("global_batch_size: 8, accumulation_steps: 1"))
    with pytest.raises(ConfigError, match=r"parallel.cp: 2 is not available with engine graph.*\[MZ069\]"):
        load_config(path, LAYOUT, 8)
    loaded = load_config(path, LAYOUT, 8, to_run=False)
    assert loaded.warnings == () and loaded.config.parallel.cp == 2
    assert [(finding.rule, finding.severity) for finding in loaded.unavailable] == [("MZ069", "unavailable")]
    with pytest.raises(ConfigError, match=r"\[MZ069\]"):
        loaded.require_runnable()


def test_what_is_wrong_is_refused_for_a_plan_as_well(write):
    path = write(text("global_batch_size: 8, accumulation_steps: 1"))
    with pytest.raises(ConfigError) as caught:
        load_config(path, [*LAYOUT, "parallel.dp_shard=3"], 8, to_run=False)
    assert {finding.rule for finding in caught.value.findings} == {"MZ060", "MZ042", "MZ069"}


def test_a_config_that_can_be_run_has_nothing_to_refuse(write):
    path = write(text("global_batch_size: 8, accumulation_steps: 1"))
    for to_run in (True, False):
        loaded = load_config(path, to_run=to_run)
        assert loaded.unavailable == ()
        loaded.require_runnable()


@pytest.mark.parametrize("rule", UNAVAILABLE, ids=lambda rule: rule.id)
def test_an_explanation_says_that_only_this_version_cannot(rule):
    assert "version" in rule.explanation
