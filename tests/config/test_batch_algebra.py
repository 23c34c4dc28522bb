"""global batch = micro batch x accumulation x dp: any two determine the third, exactly or not at all."""

from itertools import product

import pytest

from ms_zero.config import ConfigError, load_config

NAMES = ("global_batch_size", "micro_batch_size", "accumulation_steps")


@pytest.fixture
def solve(write):
    path = write(
        "include: [models/gpt-tiny]\ndata: {seq_len: 8}\noptim: {warmup_steps: 1}\n"
        "train: {steps: 10, output_dir: o}\n"
    )

    def solve(world, **given):
        overrides = [f"train.{name}={value}" for name, value in given.items()]
        train = load_config(path, overrides, world).config.train
        return tuple(getattr(train, name) for name in NAMES)

    return solve


def test_any_two_determine_the_third(solve):
    for world, micro, accumulation in product((1, 3), (1, 4), (1, 5)):
        values = (micro * accumulation * world, micro, accumulation)
        for left_out in NAMES:
            given = {name: value for name, value in zip(NAMES, values) if name != left_out}
            assert solve(world, **given) == values
            assert solve(world, **given, **{left_out: "auto"}) == values
        assert solve(world, **dict(zip(NAMES, values))) == values


def test_nothing_is_rounded(solve):
    for world, total, other, name in product((1, 2), (6, 7), (1, 4), NAMES[1:]):
        given = {"global_batch_size": total, name: other}
        if total % (other * world):
            with pytest.raises(ConfigError, match="MZ042"):
                solve(world, **given)
        else:
            solved = solve(world, **given)
            assert solved[0] == total == solved[1] * solved[2] * world


@pytest.mark.parametrize(
    ("world", "given", "message"),
    [
        (
            2,
            (33, 4, 4),
            r"33 is not .* = 4 x 4 x 2 = 32; set global_batch_size=32, or leave one of them auto",
        ),
        (2, (64, 4, 4), r"global_batch_size=32 or micro_batch_size=8 or accumulation_steps=8, or leave"),
    ],
)
def test_a_contradiction_says_what_would_agree(solve, world, given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        solve(world, **dict(zip(NAMES, given)))
    assert [finding.rule for finding in caught.value.findings] == ["MZ040"]


@pytest.mark.parametrize(
    ("total", "accumulation", "message"),
    [
        (33, 4, "set global_batch_size to 32 or 40, or change accumulation_steps"),
        (3, 4, "set global_batch_size to 8, or"),
    ],
)
def test_a_batch_that_does_not_divide_names_the_nearest_that_do(solve, total, accumulation, message):
    with pytest.raises(ConfigError, match=message):
        solve(2, global_batch_size=total, accumulation_steps=accumulation)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "none is given"),
        ({"global_batch_size": 8}, "only global_batch_size is given"),
        ({"accumulation_steps": 8}, "only accumulation_steps is given"),
    ],
)
def test_one_alone_is_not_enough(solve, given, message):
    with pytest.raises(ConfigError, match=message) as caught:
        solve(2, **given)
    assert [finding.rule for finding in caught.value.findings] == ["MZ041"]


def test_replicas_and_shards_both_count(solve, write):
    path = write(
        "include: [models/gpt-tiny]\ndata: {seq_len: 8}\noptim: {warmup_steps: 1}\n"
        "train: {steps: 10, output_dir: o, micro_batch_size: 3, accumulation_steps: 5}\n"
        "parallel: {dp_replicate: 2}\n"
    )
    assert load_config(path, world_size=6).config.train.global_batch_size == 3 * 5 * 6
