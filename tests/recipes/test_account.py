"""A run tells what a step sends and holds; measured and theory agree."""

import json

import pytest

from ms_zero import runner
from ms_zero.config import load_config
from ms_zero.recipes.account import Account
from ms_zero.testing import run_workers

COMMON = ("train.steps=2", "train.eval_interval=0", "data.seq_len=32", "train.global_batch_size=8")
SHAPE = ("model.num_layers=2", "model.hidden_size=32", "optim.warmup_steps=0", "parallel.bucket_mb=0.02")
CASES = {
    "stage 0": ("parallel.zero_stage=0",),
    "stage 1 accumulating": ("parallel.zero_stage=1", "train.accumulation_steps=2"),
    "stage 2 accumulating on the host": (
        "parallel.zero_stage=2",
        "train.accumulation_steps=2",
        "offload.optimizer=cpu",
        "offload.fraction=0.5",
    ),
    "stage 3 bf16": ("parallel.zero_stage=3", "precision.policy=bf16"),
    "stage 3 weights on the host": (
        "parallel.zero_stage=3",
        "parallel.reshard_after_forward=false",
        "offload.params=cpu",
        "offload.optimizer=cpu",
    ),
}


def train(comm, folder):
    for number, options in enumerate(CASES.values()):
        where = f"train.output_dir={folder}/{number}"
        runner.run(load_config("runs/quickstart", [*COMMON, *SHAPE, *options, where], comm.world_size), comm)


@pytest.fixture(scope="module", params=[1, 2])
def logs(request, tmp_path_factory):
    """World size, and by case the log's lines of the last rank."""
    world, folder = request.param, tmp_path_factory.mktemp("runs")
    run_workers(world, train, str(folder), timeout_s=240)
    paths = [folder / f"{number}/logs/metrics-{world - 1:05d}.jsonl" for number in range(len(CASES))]
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths]
    return world, dict(zip(CASES, lines, strict=True))


def test_what_is_sent_and_held_is_told_once_and_is_what_the_theory_says(logs):
    world, logs = logs
    for case, lines in logs.items():
        (found,) = [line for line in lines if line["event"] == "account"]
        assert abs(found["sent"] - found["sent_theory"]) <= 0.01 * found["sent_theory"], (case, found)
        assert found["held"] == pytest.approx(found["held_theory"], rel=0.02), (case, found)
        assert (found["sent_theory"] > 0) == (world > 1)
        on_host = set(found["optimizer"]) if "on the host" in case else set()
        assert ("host" in on_host) == ("on the host" in case)
        assert (found["host_weights"] > 0) == (case == "stage 3 weights on the host")


def test_the_lines_for_people_are_short():
    found = Account(
        sent=24 * 2**20,
        sent_theory=24e6,
        weights=2**30,
        host_weights=0,
        gradients=10**9,
        optimizer={"host": 123 * 2**20, "device": 456 * 2**20},
        held_theory=1e9,
    )
    traffic, memory = found.lines()
    assert traffic == "traffic of weights and gradients: 24.0MiB sent per rank and step, theory 22.9MiB"
    assert memory == (
        "memory per rank: weights 1.00GiB, gradients 954MiB, optimizer 123MiB host + 456MiB device; "
        "together 2.50GiB, theory 954MiB"
    )
