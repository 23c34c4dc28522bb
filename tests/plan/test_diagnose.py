"""Remedies: ordered, each with the effect that the models predict for it."""

import re

import pytest

from ms_zero.config import load_config
from ms_zero.errors import UserError
from ms_zero.hardware import load_device
from ms_zero.plan.diagnose import PROBLEMS, remedies_for, single_changes
from ms_zero.plan.layout import MIXED_FP32_GRADIENTS, Layout
from ms_zero.plan.memory import MemoryModel
from ms_zero.plan.models import load_model
from ms_zero.plan.time import TimeModel

DEVICE = load_device("ascend-910b")
SHAPE = load_model("llama2-7b")
MEMORY, TIME = MemoryModel(SHAPE), TimeModel(SHAPE, DEVICE)
CONFIG = load_config("runs/quickstart", world_size=2).config
BIG = Layout(
    seq_len=4096, dp_shard=8, zero_stage=1, micro_batch_size=4, microbatches=4, precision=MIXED_FP32_GRADIENTS
)


def ask(problem, layout=BIG, config=CONFIG, time=TIME, capacity=DEVICE.usable_memory):
    title, *lines = remedies_for(problem, config, layout, MEMORY, time, capacity)
    assert problem in title
    assert [int(line.split(".")[0]) for line in lines] == list(range(1, len(lines) + 1))
    return lines


def test_every_change_trains_the_same_batch_on_the_same_devices():
    changes = dict(single_changes(BIG, MEMORY))
    assert len(changes) >= 8
    for layout in changes.values():
        assert layout.violations(SHAPE) == []
        assert layout.global_batch_size == BIG.global_batch_size
        assert layout.devices == BIG.devices


def test_memory_remedies_that_fit_come_first_and_the_quickest_of_them_first():
    assert MEMORY.peak(BIG) > DEVICE.usable_memory
    lines = ask("memory")[:-1]
    fits = ["(fits)" in line for line in lines]
    assert any(fits)
    assert fits == sorted(fits, reverse=True)
    costs = [int(re.search(r"([+-]\d+)% step time", line)[1]) for line in lines if "(fits)" in line]
    assert costs == sorted(costs)


def test_memory_remedies_say_what_the_model_says():
    changes = dict(single_changes(BIG, MEMORY))
    for line in ask("memory")[:-1]:
        name, peak = re.match(r"\s*\d+\. (.*): [\d.]+ -> ([\d.]+) GB", line).groups()
        assert float(peak) == pytest.approx(MEMORY.peak(changes[name]) / 1e9, abs=0.06)
        assert MEMORY.peak(changes[name]) < MEMORY.peak(BIG)


def test_changes_that_break_a_budget_of_recompute_are_left_out():
    tight = MEMORY.report(BIG.replace(recompute="full", micro_batch_size=4)).worst.parts["activations"]
    layout = BIG.replace(recompute="budget", recompute_budget=2 * tight)
    names = [name for name, _ in single_changes(layout, MEMORY)]
    assert "train.micro_batch_size 2" in names and "train.micro_batch_size 8" not in names
    assert ask("memory", layout=layout)


def test_memory_remedies_work_without_a_device():
    lines = ask("memory", time=None, capacity=None)
    assert lines and "step time" not in "".join(lines) and "fit" not in "".join(lines)


def test_speed_remedies_are_faster_and_fit():
    slow = BIG.replace(micro_batch_size=1, microbatches=16, recompute="full", zero_stage=3)
    lines = ask("speed", layout=slow)
    assert any("memory.recompute none" in line for line in lines)
    gains = [int(match[1]) for match in (re.search(r": (-\d+)% step time", line) for line in lines) if match]
    assert gains == sorted(gains)
    assert gains[0] < 0
    assert "largest cost besides computing: recompute" in lines[-1]


@pytest.mark.parametrize(
    ("problem", "overrides", "suspect"),
    [
        ("convergence", ["optim.lr=0.01"], "optim.lr 0.01"),
        ("convergence", ["optim.clip_norm=0"], "optim.clip_norm 0"),
        ("convergence", ["optim.warmup_steps=0"], "optim.warmup_steps 0"),
        ("convergence", ["optim.beta2=0.999"], "remembers 1000 steps"),
        ("convergence", ["optim.weight_decay=0"], "optim.weight_decay 0"),
        ("nan", ["precision.policy=fp16"], "overflows above 65504"),
        ("nan", ["precision.policy=bf16", "precision.master=param"], "precision.master param"),
        ("nan", ["optim.eps=1e-12"], "optim.eps 1e-12"),
        ("nan", ["optim.clip_norm=0"], "optim.clip_norm 0"),
    ],
)
def test_suspects_are_named_only_where_they_are(problem, overrides, suspect):
    suspicious = load_config("runs/quickstart", overrides, world_size=2).config
    assert any(suspect in line for line in ask(problem, config=suspicious))
    usual = ["optim.lr=3e-4", "train.global_batch_size=1024"]
    calm = load_config("runs/quickstart", usual, world_size=2).config
    assert not any(suspect in line for line in ask(problem, config=calm))


def test_an_unknown_problem_is_refused():
    with pytest.raises(UserError, match=", ".join(PROBLEMS)):
        ask("slowness")
